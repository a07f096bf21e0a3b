"""The frontend's side of the router's gRPC: one channel and, on it, one stream that all requests share.

Owns the channel and opens the stream anew when it has broken. It knows no chat. Called by `frontend.generation` and by the HTTP app for
models, pools and loads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from common.errors import ServingError
from common.proto import router_pb2, router_pb2_grpc
from common.wire import PLAIN, Channels, Wire
from frontend.router_link import RouterLink, RouterStream
from frontend.rpc_errors import from_rpc_error

_UNARY_TIMEOUT_S = 10.0
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class RouterClient:
    """A channel to one router. Made inside a running event loop; `close` it there."""

    def __init__(self, address: str, wire: Wire = PLAIN):
        """`address`: host:port."""
        self.address = address
        self._wire = wire
        self._channels = Channels(wire, _CHANNEL_OPTIONS)
        self._link: RouterLink | None = None

    def generate(self, request: router_pb2.GenerateRequest, *, timeout_s: float, traceparent: str = "") -> RouterStream:
        """Starts a request; errors come from the stream's `take`. `traceparent`: its trace context, "" for none."""
        if self._link is None or self._link.is_broken:
            self._link = RouterLink(self._stub().GenerateMany(metadata=self._wire.metadata()))
        return self._link.start(request, timeout_s=timeout_s, traceparent=traceparent)

    async def model_info(self) -> router_pb2.GetModelInfoResponse:
        """Model name, vocabulary size and context length [tokens]."""
        return await self._unary(self._stub().GetModelInfo, router_pb2.GetModelInfoRequest())

    async def loads(self) -> router_pb2.GetLoadsResponse:
        """Load of every group and queue."""
        return await self._unary(self._stub().GetLoads, router_pb2.GetLoadsRequest())

    async def pools(self) -> router_pb2.ListPoolsResponse:
        """Every pool with its layout and price."""
        return await self._unary(self._stub().ListPools, router_pb2.ListPoolsRequest())

    def fail_all(self, error: ServingError) -> int:
        """Ends every running stream with `error`; returns how many there were."""
        running = self._link.running() if self._link is not None else []
        for stream in running:
            stream.fail(error)
        return len(running)

    async def close(self) -> None:
        """Closes the channel; running requests end."""
        if self._link is not None:
            await self._link.close()
        await self._channels.close()

    def _stub(self) -> router_pb2_grpc.RouterStub:
        return router_pb2_grpc.RouterStub(self._channels.get(self.address))

    async def _unary(self, method: Callable[..., Awaitable[Any]], request: Any) -> Any:
        try:
            return await method(request, timeout=_UNARY_TIMEOUT_S, metadata=self._wire.metadata())
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc
