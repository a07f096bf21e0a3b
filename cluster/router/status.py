"""The one mapper between gRPC statuses and our errors, in both directions. Used by everything in the router that calls or answers."""

from __future__ import annotations

import math
from typing import NoReturn

import grpc

from common.errors import (
    CapacityError,
    Corrupted,
    DeadlineError,
    InvalidRequestError,
    LayoutMismatch,
    NotSupportedError,
    OverloadedError,
    ServingError,
    TransferTimeout,
    WorkerError,
    WorkerLost,
    WriterDead,
)

RETRY_AFTER_KEY = "retry-after-ms"
TOKENS_SENT_KEY = "tokens-sent"
ROUTE_KEY = "tandem-route-bin"  # initial metadata of `Generate`: a serialised RouteDecision

_BY_STATUS: dict[str, type[ServingError]] = {
    "RESOURCE_EXHAUSTED": CapacityError,
    "NOT_FOUND": WriterDead,
    "UNAVAILABLE": WorkerLost,
    "ABORTED": WorkerLost,
    "CANCELLED": WorkerLost,
    "DEADLINE_EXCEEDED": TransferTimeout,
    "DATA_LOSS": Corrupted,
    "PERMISSION_DENIED": Corrupted,  # a signature between groups did not fit
    "FAILED_PRECONDITION": LayoutMismatch,
    "UNIMPLEMENTED": NotSupportedError,
}


class RequestAborted(ServingError):
    """Ended by `Abort`."""

    grpc_status = "CANCELLED"


class StreamLost(WorkerLost):
    """A group died after tokens had left. `tokens_sent`: how many the client was given."""

    def __init__(self, message: str, *, tokens_sent: int, request_id: str | None = None):
        super().__init__(f"{message} (tokens_sent={tokens_sent})", request_id=request_id)
        self.tokens_sent = tokens_sent


def from_status(status: str, message: str, where: str) -> ServingError:
    """What a group answered, as our error. `status`: gRPC status name; `where`: the group, for the message."""
    text = f"{where}: {message}"
    if status in ("INVALID_ARGUMENT", "OUT_OF_RANGE"):
        return InvalidRequestError("request", text)
    return _BY_STATUS.get(status, WorkerError)(text)


def from_rpc_error(exc: grpc.RpcError, where: str) -> ServingError:
    """A failed call to a group, as our error. Raise it `from exc`."""
    code, details = exc.code(), exc.details()
    return from_status(code.name if code else "UNKNOWN", details or "no details", where)


def is_retryable(error: ServingError) -> bool:
    """Whether another group may do better: the group is gone, or a transfer ran into its own deadline or spoilt what it carried."""
    return isinstance(error, WorkerLost | TransferTimeout | Corrupted)


def is_client_fault(error: ServingError) -> bool:
    """Whether the request itself is to blame (or its deadline); such errors say nothing about a group."""
    return isinstance(error, InvalidRequestError | CapacityError | DeadlineError | NotSupportedError | RequestAborted)


async def abort(context: grpc.aio.ServicerContext, error: ServingError) -> NoReturn:
    """Ends the call with the error's status, its message, and when to try again or how much was sent in the trailing metadata."""
    metadata = []
    if isinstance(error, OverloadedError):
        metadata.append((RETRY_AFTER_KEY, str(max(1, math.ceil(error.retry_after_s * 1e3)))))
    if isinstance(error, StreamLost):
        metadata.append((TOKENS_SENT_KEY, str(error.tokens_sent)))
    await context.abort(grpc.StatusCode[error.grpc_status], str(error), tuple(metadata))
    raise error  # abort has raised
