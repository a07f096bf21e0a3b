"""The OpenAPI document of the HTTP API, from the request models themselves, so that it can't lag behind them. Served at /openapi.json."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from common.versions import version_of
from frontend.http.chat_fields import ChatRequest
from frontend.http.completions import CompletionRequest
from frontend.http.fields import RequestModel
from frontend.http.responses_fields import ResponsesRequest

_MODELS: Mapping[str, type[RequestModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/completions": CompletionRequest,
}
_GETS = {"/v1/models": "names that requests may give", "/health": "200 while requests are taken", "/page/loads": "pools and their load"}
_WISHES = {
    "x-tandem-ttft-ms": "wanted time to first token [ms]",
    "x-tandem-itl-ms": "wanted time between tokens [ms]",
    "x-tandem-latency-weight": "0 saves money, 1 buys speed",
    "x-tandem-priority": "-100 to 100, higher first",
    "x-tandem-deadline-ms": "the request ends by then [ms]",
}
_ERROR = {"description": "an error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}


@functools.cache
def openapi() -> dict[str, Any]:
    """The document; do not change it."""
    schemas: dict[str, Any] = {
        "Error": {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]},
    }
    paths: dict[str, Any] = {}
    for path, model in _MODELS.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        for name in sorted(model.IGNORED):
            schema["properties"][name] = {"description": "accepted without effect"}
        schemas[model.__name__] = schema
        reference = {"$ref": f"#/components/schemas/{model.__name__}"}
        paths[path] = {
            "post": {
                "parameters": [
                    {"name": name, "in": "header", "description": text, "schema": {"type": "number"}} for name, text in _WISHES.items()
                ],
                "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
                "responses": {
                    "200": {"description": "the answer", "content": {"application/json": {}, "text/event-stream": {}}},
                    "default": _ERROR,
                },
            }
        }
    for path, text in _GETS.items():
        paths[path] = {"get": {"description": text, "responses": {"200": {"description": text}, "default": _ERROR}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version_of("tandem")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


async def serve_openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return JSONResponse(openapi())
