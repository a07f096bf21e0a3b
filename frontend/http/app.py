"""The ASGI application: the endpoints that generate, and beside them starlette's routes for models and health.

Metrics have a port of their own. Built by `frontend.server` and by tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.errors import ServingError
from common.metrics_server import MetricsServer, own_host
from common.wire import Wire
from frontend.chat_format import ChatFormat
from frontend.generation import Generator
from frontend.grpc.chat_server import start_chat_server
from frontend.http.auth import load_keys
from frontend.http.chat import chat_completions
from frontend.http.completions import completions
from frontend.http.errors import HttpError, error_response
from frontend.http.openapi import serve_openapi
from frontend.http.page import page_routes
from frontend.http.responses import responses
from frontend.http.service import Endpoint, Service
from frontend.metrics import FrontendMetrics
from frontend.router_client import RouterClient
from frontend.settings import FrontendSettings

logger = logging.getLogger(__name__)
_GRPC_CLOSE_S = 1.0  # for calls that the drain's end has just ended
_ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
}


class FrontendApp:
    """Sends requests that generate straight to the service: each layer between would cost every token of a stream something.

    Everything else, and everything while other origins may call (their headers are a middleware's), is starlette's.
    """

    def __init__(self, starlette: Starlette, endpoints: Mapping[str, Endpoint]):
        self.state = starlette.state
        self._starlette = starlette
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._starlette(scope, receive, send)
            return
        service: Service = self.state.service
        response = await service.answer(Request(scope, receive), scope["path"], endpoint)
        await response(scope, receive, send)


def build_app(settings: FrontendSettings, chat_format: ChatFormat) -> FrontendApp:
    """The application; its `state.service` exists once its lifespan has started (the channel needs a running loop).

    Raises: ConfigError if the keys can't be read.
    """
    keys = load_keys(settings.keys_file)
    metrics = FrontendMetrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        router = RouterClient(settings.router, Wire(settings.router_security))
        generator = Generator(router, chat_format, metrics, encoder_threads=settings.encoder_threads)
        app.state.service = Service(settings, generator, keys)
        exporter = MetricsServer(metrics.metrics)
        app.state.metrics_address = await exporter.start(settings.metrics_host, settings.metrics_port, own_host(settings.host))
        logger.info("metrics at http://%s/metrics", app.state.metrics_address)
        chat = await start_chat_server(app.state.service, settings.grpc_listen) if settings.grpc_listen else None
        app.state.grpc_port = chat[1] if chat else None
        try:
            yield
        finally:
            if chat is not None:
                await chat[0].stop(settings.drain_s + _GRPC_CLOSE_S)  # returns as soon as no call runs
            await exporter.close()
            generator.close()
            await router.close()
            if app.state.service.tracing is not None:
                await asyncio.to_thread(app.state.service.tracing.close)

    routes = [_post(path, handle) for path, handle in _ENDPOINTS.items()]
    routes += [
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/models/{model:path}", _models, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/openapi.json", serve_openapi, methods=["GET"]),
        *page_routes(),
    ]
    cors = Middleware(CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"])
    starlette = Starlette(
        routes=routes,
        middleware=[cors] if settings.cors_origins else [],
        exception_handlers={HTTPException: _http_exception},
        lifespan=lifespan,
    )
    return FrontendApp(starlette, {} if settings.cors_origins else _ENDPOINTS)


def _post(path: str, handle: Endpoint) -> Route:
    async def answer(request: Request) -> Response:
        service: Service = request.app.state.service
        return await service.answer(request, path, handle)

    return Route(path, answer, methods=["POST"])


async def _models(request: Request) -> Response:
    service: Service = request.app.state.service
    wanted = request.path_params.get("model")
    try:
        service.keys.caller(request.headers)
        names = (await service.model_name(wanted),) if wanted else await service.model_names()
    except ServingError as exc:
        return error_response(exc)
    listed = [{"id": name, "object": "model", "created": 0, "owned_by": "tandem"} for name in names]
    return JSONResponse(listed[0] if wanted else {"object": "list", "data": listed})


async def _health(request: Request) -> Response:
    """200 while new requests are taken and the router answers; 503 says which of the two is not so."""
    service: Service = request.app.state.service
    if service.is_draining:
        return JSONResponse({"status": "draining"}, 503)
    try:
        info = await service.generator.router.model_info()
    except ServingError as exc:
        return JSONResponse({"status": "router unavailable", "detail": str(exc)}, 503)
    return JSONResponse({"status": "ok", "model": info.model, "max_model_len": info.max_model_len})


async def _http_exception(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    return error_response(HttpError(status, f"{request.method} {request.url.path[:200]}: {code.replace('_', ' ')}", code=code))
