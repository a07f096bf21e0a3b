"""HTTP fields and headers -> the router's request. The router checks ranges again; here wrong ones get their HTTP name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import InvalidRequestError
from common.proto import router_pb2, types_pb2
from common.requests import MAX_LOGIT_BIAS
from frontend.http.errors import HttpError

_UINT32_MAX = 2**32 - 1
_COPIED = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "n"),
)


class SamplingFields(Protocol):
    """What the request models have in common; a field that a model lacks is left to the router's default."""

    temperature: float | None
    top_p: float | None


@dataclass(frozen=True)
class ServingHeaders:
    """Wishes that OpenAI's bodies have no field for. None: the router's default."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    priority: int | None = None
    latency_weight: float | None = None
    deadline_s: float | None = None
    wants_route: bool = False


def read_headers(headers: Mapping[str, str]) -> ServingHeaders:
    """Reads the `x-tandem-*` headers. Raises: HttpError 400 naming the header."""
    priority = _number(headers, "x-tandem-priority", -100, 100)
    if priority is not None and priority != int(priority):
        raise _bad_header("x-tandem-priority", "must be a whole number")
    deadline_ms = _number(headers, "x-tandem-deadline-ms", 1, 86_400_000)
    return ServingHeaders(
        ttft_ms=_number(headers, "x-tandem-ttft-ms", 1e-3, 1e9),
        itl_ms=_number(headers, "x-tandem-itl-ms", 1e-3, 1e9),
        priority=None if priority is None else int(priority),
        latency_weight=_number(headers, "x-tandem-latency-weight", 0, 1),
        deadline_s=None if deadline_ms is None else deadline_ms / 1e3,
        wants_route=headers.get("x-tandem-include-route", "").lower() in ("1", "true"),
    )


def router_request(
    fields: SamplingFields,
    token_ids: Sequence[int],
    headers: ServingHeaders,
    *,
    request_id: str,
    max_tokens: int | None,
    logprobs: int | None,
    stop_token_ids: Sequence[int],
    logit_bias: Mapping[str, Any] | None = None,
    priority: int = 0,
) -> router_pb2.GenerateRequest:
    """The router's request. Stop strings are not in it: they act on visible text, which only the frontend knows.

    Raises: InvalidRequestError naming the field.
    """
    request = router_pb2.GenerateRequest(request_id=request_id)
    request.tokenized.input_ids.extend(token_ids)
    params = request.sampling_params
    for name in _COPIED:
        value = getattr(fields, name, None)
        if value is not None:
            setattr(params, name, value)
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if logprobs is not None:
        params.logprobs = logprobs
    params.stop_token_ids.extend(stop_token_ids)
    _set_logit_bias(params, logit_bias or {})
    if headers.ttft_ms is not None:
        request.slo.ttft_ms = headers.ttft_ms
    if headers.itl_ms is not None:
        request.slo.itl_ms = headers.itl_ms
    if headers.latency_weight is not None:
        request.latency_weight = headers.latency_weight
    request.priority = priority
    return request


def _set_logit_bias(params: types_pb2.SamplingParams, logit_bias: Mapping[str, Any]) -> None:
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError("logit_bias", f"{len(logit_bias)} entries; at most {MAX_LOGIT_BIAS}")
    for key, bias in logit_bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= _UINT32_MAX):
            raise InvalidRequestError("logit_bias", f"{key[:40]!r} is not a token id")
        if type(bias) not in (int, float) or not math.isfinite(bias) or not -100 <= bias <= 100:
            raise InvalidRequestError("logit_bias", f"the bias of {key} must be a number from -100 to 100")
        params.logit_bias[int(key)] = bias


def _number(headers: Mapping[str, str], name: str, low: float, high: float) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise _bad_header(name, "must be a number") from None
    if not (math.isfinite(value) and low <= value <= high):
        raise _bad_header(name, f"must lie in [{low:g}, {high:g}]")
    return value


def _bad_header(name: str, message: str) -> HttpError:
    return HttpError(400, f"{name}: {message}", code="invalid_header", param=name)
