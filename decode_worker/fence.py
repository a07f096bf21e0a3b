"""Asks prefill leaders to promise that they won't write for a transfer any more. Lives on the decode leader's event loop.

The ledger decides when to ask, and asks again every half second until there is a proof; here is one call per ask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from common.auth import sign
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.server_thread import GRPC_OPTIONS
from common.wire import Channels, Wire

logger = logging.getLogger(__name__)
_TIMEOUT_S = 1.0


class Fences:
    """`on_stopped(transfer_id)` is called for each promise."""

    def __init__(self, wire: Wire, on_stopped: Callable[[int], None]):
        self._key = wire.keys
        self._wire = wire
        self._on_stopped = on_stopped
        self._asking: dict[int, asyncio.Task] = {}
        self._channels = Channels(wire, GRPC_OPTIONS)

    def ask(self, transfer_id: int, writer: types_pb2.GroupDescription) -> None:
        """Returns at once; does nothing while an earlier call for the transfer is under way."""
        if transfer_id not in self._asking:
            task = self._asking[transfer_id] = asyncio.get_running_loop().create_task(self._ask(transfer_id, writer))
            task.add_done_callback(lambda _: self._asking.pop(transfer_id))

    async def close(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._channels.close()

    async def _ask(self, transfer_id: int, writer: types_pb2.GroupDescription) -> None:
        request = worker_pb2.FenceRequest(transfer_id=transfer_id, incarnation=writer.incarnation)
        sign(request, self._key)
        stub = self._wire.stub(worker_pb2_grpc.PrefillGroupStub(self._channels.get(writer.address)))
        try:
            reply = await stub.Fence(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            logger.warning("transfer %x: prefill group %s did not promise to stop: %s", transfer_id, writer.group, exc.code().name)
            return
        if reply.stopped:
            self._on_stopped(transfer_id)
