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

logger = logging.getLogger(__name__)
_TIMEOUT_S = 1.0


class Fences:
    """`on_stopped(transfer_id)` is called for each promise."""

    def __init__(self, key: bytes, on_stopped: Callable[[int], None]):
        self._key = key
        self._on_stopped = on_stopped
        self._asking: dict[int, asyncio.Task] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}

    def ask(self, transfer_id: int, writer: types_pb2.GroupDescription) -> None:
        """Returns at once; does nothing while an earlier call for the transfer is under way."""
        if transfer_id not in self._asking:
            task = self._asking[transfer_id] = asyncio.get_running_loop().create_task(self._ask(transfer_id, writer))
            task.add_done_callback(lambda _: self._asking.pop(transfer_id))

    async def close(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    async def _ask(self, transfer_id: int, writer: types_pb2.GroupDescription) -> None:
        channel = self._channels.get(writer.address)
        if channel is None:
            channel = self._channels[writer.address] = grpc.aio.insecure_channel(writer.address, options=GRPC_OPTIONS)
        request = worker_pb2.FenceRequest(transfer_id=transfer_id, incarnation=writer.incarnation)
        sign(request, self._key)
        try:
            reply = await worker_pb2_grpc.PrefillGroupStub(channel).Fence(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            logger.warning("transfer %x: prefill group %s did not promise to stop: %s", transfer_id, writer.group, exc.code().name)
            return
        if reply.stopped:
            self._on_stopped(transfer_id)
