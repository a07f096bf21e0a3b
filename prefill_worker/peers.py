"""Calls from a prefill leader to the leaders of decode groups: renew, commit, abandon. Signs what moves or frees KV.

Lives on the event loop; owns one channel per decode address.
"""

from __future__ import annotations

import grpc

from common.auth import sign
from common.errors import PeerLost, RemoteError
from common.proto import worker_pb2, worker_pb2_grpc
from common.server_thread import GRPC_OPTIONS
from common.wire import Channels, Wire

CALL_TIMEOUT_S = 2.0


class DecodePeers:
    def __init__(self, wire: Wire):
        self._key = wire.keys
        self._wire = wire
        self._channels = Channels(wire, GRPC_OPTIONS)

    async def commit(self, address: str, request: worker_pb2.CommitRequest) -> None:
        """Raises: PeerLost if no answer came (ask again: commits are idempotent); RemoteError if the decode group refused"""
        sign(request, self._key)
        await self._call(address, "Commit", request)

    async def abandon(self, address: str, request: worker_pb2.AbandonRequest) -> None:
        """Raises: as `commit`"""
        sign(request, self._key)
        await self._call(address, "Abandon", request)

    async def renew(self, address: str, request: worker_pb2.RenewRequest) -> worker_pb2.RenewReply:
        """Raises: as `commit`"""
        return await self._call(address, "Renew", request)

    async def close(self) -> None:
        await self._channels.close()

    async def _call(self, address: str, method: str, request):
        stub = self._wire.stub(worker_pb2_grpc.DecodeGroupStub(self._channels.get(address)))
        try:
            return await getattr(stub, method)(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            message = f"{method} at decode group {address}: {exc.details()}"
            if exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                raise PeerLost(message) from exc
            raise RemoteError(exc.code().name, message) from exc
