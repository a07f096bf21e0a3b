"""The one error tree, and its mapping to gRPC status names.

    ServingError
      ConfigError             a config file, flag or checkpoint that can't be served as it is
      InvalidRequestError     a request field is wrong; names the field
      OverloadedError         queues are full; carries when to try again
      CapacityError           no KV blocks for the worst case of this request
      DeadlineError           the request's own deadline passed
      NotSupportedError       asked for something that does not exist yet; names what does
      KVTransferError
        TransferTimeout       the transfer's own deadline passed
        PeerLost              the other side is gone or was replaced
          WriterDead          the group that is to write is known to have died
        TransferGivenUp       one side has ended the transfer, the other goes on for a while
        Corrupted             what arrived is not what was sent
        LayoutMismatch        two groups whose KV can't be joined, or bytes that are not what was promised
      WorkerError
        WorkerLost            a rank or group died
        OutOfMemory
      RemoteError             what another rank or group answered, with its status
      KernelError
        ShapeError            shape, dtype or device is not what the op takes
        UnsupportedArch       the op does not exist for this device

Raised at the edge where the fact is known; foreign errors are wrapped once, at that edge, with `from`.
"""

from __future__ import annotations


class ServingError(Exception):
    """Base of all errors that Tandem raises on purpose.

    Attributes: `message` one sentence (what, expected, got, what to do); `request_id` and `rank` if known.
    """

    grpc_status = "INTERNAL"

    def __init__(self, message: str, *, request_id: str | None = None, rank: int | None = None):
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.rank = rank

    def __str__(self) -> str:
        where = "".join(f" [{name} {value}]" for name, value in (("request", self.request_id), ("rank", self.rank)) if value is not None)
        return self.message + where


class ConfigError(ServingError):
    grpc_status = "FAILED_PRECONDITION"


class InvalidRequestError(ServingError):
    """A request that is refused at the edge. `field` is the path of the field in the request message."""

    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str, *, request_id: str | None = None):
        super().__init__(f"{field}: {message}", request_id=request_id)
        self.field = field


class OverloadedError(ServingError):
    """Queues are full. `retry_after_s`: seconds after which a place is likely."""

    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, request_id: str | None = None):
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s


class CapacityError(ServingError):
    grpc_status = "RESOURCE_EXHAUSTED"


class DeadlineError(ServingError):
    grpc_status = "DEADLINE_EXCEEDED"


class NotSupportedError(ServingError):
    grpc_status = "UNIMPLEMENTED"


class KVTransferError(ServingError):
    grpc_status = "INTERNAL"


class TransferTimeout(KVTransferError):
    grpc_status = "DEADLINE_EXCEEDED"


class PeerLost(KVTransferError):
    grpc_status = "UNAVAILABLE"


class WriterDead(PeerLost):
    grpc_status = "NOT_FOUND"


class TransferGivenUp(KVTransferError):
    grpc_status = "ABORTED"


class Corrupted(KVTransferError):
    grpc_status = "DATA_LOSS"


class LayoutMismatch(KVTransferError):
    grpc_status = "FAILED_PRECONDITION"


class WorkerError(ServingError):
    grpc_status = "INTERNAL"


class WorkerLost(WorkerError):
    grpc_status = "UNAVAILABLE"


class OutOfMemory(WorkerError):
    grpc_status = "RESOURCE_EXHAUSTED"


class RemoteError(ServingError):
    """An error that came as a status and a message from another process of ours."""

    def __init__(self, grpc_status: str, message: str, *, request_id: str | None = None, rank: int | None = None):
        super().__init__(message, request_id=request_id, rank=rank)
        self.grpc_status = grpc_status


class KernelError(ServingError):
    grpc_status = "INTERNAL"


class ShapeError(KernelError):
    grpc_status = "INTERNAL"


class UnsupportedArch(KernelError):
    grpc_status = "UNIMPLEMENTED"
