"""The router's gRPC statuses as our errors: the only place of the frontend that knows them."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
import grpc.aio

from common.errors import DeadlineError, InvalidRequestError, NotSupportedError, OverloadedError, ServingError, WorkerLost

_RETRY_AFTER_KEY = "retry-after-ms"
_LOST = frozenset(status.value[0] for status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED))


def from_rpc_error(exc: grpc.aio.AioRpcError) -> ServingError:
    """A failed call. Raise it `from exc`."""
    metadata = {key: value for key, value in exc.trailing_metadata() or () if isinstance(value, str)}
    return from_status(exc.code().value[0], exc.details() or exc.code().name, metadata)


def from_status(code: int, details: str, trailing_metadata: Mapping[str, str]) -> ServingError:
    """`code`: number of the gRPC status."""
    if code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
        field, separator, message = details.partition(": ")
        return InvalidRequestError(field, message) if separator else InvalidRequestError("request", details)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
        return OverloadedError(details, retry_after_s=_milliseconds(trailing_metadata.get(_RETRY_AFTER_KEY)) / 1e3)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]:
        return DeadlineError(details)
    if code == grpc.StatusCode.UNIMPLEMENTED.value[0]:
        return NotSupportedError(details)
    return WorkerLost(details) if code in _LOST else ServingError(details)


def _milliseconds(value: str | None) -> float:
    try:
        return max(float(value or 1000), 1.0)
    except ValueError:
        return 1000.0
