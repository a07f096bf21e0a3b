"""Errors as OpenAI's clients expect them: one table from our errors to status, type and code.

Owns the names that a client sees: a field of the router's request is shown as the HTTP field it came from.
"""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import JSONResponse

from common.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    NotSupportedError,
    OverloadedError,
    ServingError,
    WorkerLost,
)

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_ROUTER_FIELDS = {
    CHAT: {
        "tokenized.input_ids": "messages",
        "sampling_params.max_tokens": "max_completion_tokens",
        "sampling_params.logprobs": "top_logprobs",
    },
    COMPLETIONS: {"tokenized.input_ids": "prompt"},
    RESPONSES: {
        "tokenized.input_ids": "input",
        "sampling_params.max_tokens": "max_output_tokens",
        "sampling_params.logprobs": "top_logprobs",
    },
}


class HttpError(ServingError):
    """A refusal that only HTTP knows (a wrong key, path or body). `param`: the field or header, if one is to blame."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind


def status_and_body(error: ServingError, path: str = CHAT) -> tuple[int, dict[str, Any]]:
    """HTTP status and the body `{"error": {"message", "type", "param", "code"}}`; fields are named as the request of `path` does."""
    param: str | None = None
    if isinstance(error, HttpError):
        return error.status, _body(str(error), error.kind, error.param, error.code)
    if isinstance(error, InvalidRequestError):
        usual = "stop" if error.field == "sampling_params.stop_token_ids" else error.field.removeprefix("sampling_params.")
        param = _ROUTER_FIELDS.get(path, {}).get(error.field, usual)
        is_too_long = error.field == "tokenized.input_ids" and "context" in error.message
        code = "context_length_exceeded" if is_too_long else "invalid_value"
        text = error.message.replace(f"{error.field}: ", f"{param}: ", 1)
        return 400, _body(text, "invalid_request_error", param, code)
    if isinstance(error, OverloadedError | CapacityError):
        return 429, _body(str(error), "rate_limit_error", None, "overloaded")
    if isinstance(error, DeadlineError):
        return 504, _body(str(error), "timeout_error", None, "deadline_exceeded")
    if isinstance(error, WorkerLost):
        return 503, _body(str(error), "service_unavailable_error", None, "unavailable")
    if isinstance(error, NotSupportedError):
        return 400, _body(str(error), "invalid_request_error", None, "not_supported")
    code = "misconfigured" if isinstance(error, ConfigError) else "internal_error"
    return 500, _body(str(error), "server_error", None, code)


def error_response(error: ServingError, path: str = CHAT) -> JSONResponse:
    """The response of a request that failed before its first byte was sent."""
    status, body = status_and_body(error, path)
    headers = {}
    if status in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else 1.0
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body, status, headers)


def error_event(error: ServingError) -> bytes:
    """The same body as a server-sent event, for a stream that has already begun."""
    return b"data: " + json.dumps(status_and_body(error)[1]).encode() + b"\n\n"


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
