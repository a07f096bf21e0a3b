"""The frontend's side of the router's gRPC: one channel, streams of tokens, errors as our own.

Owns the channel, the set of running streams (so that a shutdown can end them with an error) and the mapping of gRPC
statuses. It knows no chat. Called by `frontend.generation` and by the HTTP app for models, pools and loads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from common.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    NotSupportedError,
    OverloadedError,
    ServingError,
    WorkerLost,
)
from common.proto import router_pb2, router_pb2_grpc

ROUTE_KEY = "tandem-route-bin"  # initial metadata: a serialised RouteDecision
_RETRY_AFTER_KEY = "retry-after-ms"
_UNARY_TIMEOUT_S = 10.0
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class RouterStream:
    """One running `Generate` call. Iterate it for responses; `cancel` frees the request at once."""

    def __init__(self, call: grpc.aio.UnaryStreamCall, ended: Callable[[RouterStream], None]):
        self._call = call
        self._ended = ended
        self._failure: ServingError | None = None

    async def __aiter__(self) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        """Responses until the router is done. Raises: ServingError of the kind that fits the router's status."""
        try:
            async for response in self._call:
                yield response
        except grpc.aio.AioRpcError as exc:
            raise (self._failure or from_rpc_error(exc)) from exc
        except asyncio.CancelledError:  # what gRPC raises for a call that was cancelled here, by `fail` or with its task
            task = asyncio.current_task()
            if self._failure is None or (task is not None and task.cancelling()):
                raise
            raise self._failure from None
        finally:
            self.cancel()

    async def route(self) -> router_pb2.RouteDecision | None:
        """The decision that the router sent ahead of the tokens, if it did."""
        try:
            metadata = await self._call.initial_metadata()
        except grpc.aio.AioRpcError:  # the call has failed; its iteration says how
            return None
        raw = dict(metadata or ()).get(ROUTE_KEY)
        return router_pb2.RouteDecision.FromString(raw) if isinstance(raw, bytes) else None

    def fail(self, error: ServingError) -> None:
        """Ends the stream; whoever iterates it gets `error`."""
        self._failure = error
        self._call.cancel()

    def cancel(self) -> None:
        """Ends the stream; nobody is told. Harmless after the end."""
        self._call.cancel()
        self._ended(self)


class RouterClient:
    """A channel to one router. Made inside a running event loop; `close` it there."""

    def __init__(self, address: str, *, ca_file: Path | None = None, token_file: Path | None = None):
        """`address`: host:port. Raises: ConfigError if a file can't be read."""
        self.address = address
        self._metadata = (("authorization", f"Bearer {_read(token_file).decode().strip()}"),) if token_file else ()
        if ca_file is not None:
            credentials = grpc.ssl_channel_credentials(root_certificates=_read(ca_file))
            self._channel = grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = router_pb2_grpc.RouterStub(self._channel)
        self._running: set[RouterStream] = set()

    def generate(self, request: router_pb2.GenerateRequest, *, timeout_s: float) -> RouterStream:
        """Starts a request; errors come when the stream is iterated."""
        stream = RouterStream(self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata), self._running.discard)
        self._running.add(stream)
        return stream

    async def model_info(self) -> router_pb2.GetModelInfoResponse:
        """Model name, vocabulary size and context length [tokens]."""
        return await self._unary(self._stub.GetModelInfo, router_pb2.GetModelInfoRequest())

    def fail_all(self, error: ServingError) -> int:
        """Ends every running stream with `error`; returns how many there were."""
        running = list(self._running)
        for stream in running:
            stream.fail(error)
        return len(running)

    async def close(self) -> None:
        """Closes the channel; running calls end."""
        await self._channel.close()

    async def _unary(self, method: Callable[..., Awaitable[Any]], request: Any) -> Any:
        try:
            return await method(request, timeout=_UNARY_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc


def from_rpc_error(exc: grpc.aio.AioRpcError) -> ServingError:
    """The router's status as one of our errors; the only place that knows gRPC statuses."""
    status, details = exc.code(), exc.details() or exc.code().name
    if status is grpc.StatusCode.INVALID_ARGUMENT:
        field, separator, message = details.partition(": ")
        return InvalidRequestError(field, message) if separator else InvalidRequestError("request", details)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        after_ms = dict(exc.trailing_metadata() or ()).get(_RETRY_AFTER_KEY)
        return OverloadedError(details, retry_after_s=_milliseconds(after_ms) / 1e3)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(details)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return NotSupportedError(details)
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED):
        return WorkerLost(details)
    return ServingError(details)


def _milliseconds(value: str | bytes | None) -> float:
    try:
        return max(float(value or 1000), 1.0)
    except ValueError:
        return 1000.0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path} can't be read: {exc.strerror}") from exc
