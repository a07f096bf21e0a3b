"""The gRPC face of a decode group, on its leader's event loop: checks signatures, hands commands to the engine, streams frames to routers.

Owns mailboxes and fences; no request, no block.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future

import grpc

from common.auth import verify
from common.errors import KVTransferError, LayoutMismatch, PeerLost, ServingError, WorkerLost
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.server_thread import abort_with
from common.wire import Wire
from decode_worker import commands as cmd
from decode_worker.fence import Fences
from decode_worker.mailbox import Mailboxes


class DecodeService(worker_pb2_grpc.DecodeGroupServicer):
    """Made on the event loop. `load()` gives the engine's latest figures."""

    def __init__(
        self,
        description: types_pb2.GroupDescription,
        commands: queue.SimpleQueue[cmd.Command],
        load: Callable[[], types_pb2.GroupLoad],
        wire: Wire,
        router_lease_s: float,
    ):
        self._description = description
        self._commands = commands
        self._load = load
        self._key = wire.keys
        self._loop = asyncio.get_running_loop()
        self._mailboxes = Mailboxes(router_lease_s, lambda router_id: commands.put(cmd.RouterGone(router_id)))
        self._fences = Fences(wire, lambda transfer_id: commands.put(cmd.WriterStopped(transfer_id)))
        self._waiting: set[Future] = set()
        self._is_closed = False

    # -- from the engine thread --------------------------------------------------------------------------------------------------------

    def publish(self, step: int, outputs: dict[str, list[worker_pb2.SequenceOutput]], load: types_pb2.GroupLoad) -> None:
        self._hop(self._mailboxes.publish, step, outputs, load)

    def fence(self, transfer_id: int, writer: types_pb2.GroupDescription) -> None:
        self._hop(self._fences.ask, transfer_id, writer)

    # -- from the loop -----------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """The engine is gone: whoever waits for it, or asks from now on, gets UNAVAILABLE."""
        self._is_closed = True
        for done in list(self._waiting):
            cmd.refuse(done, self._gone())
        await self._fences.close()

    async def Describe(self, request, context):
        return self._description

    async def GetLoad(self, request, context):
        return self._load()

    async def Drain(self, request, context):
        self._commands.put(cmd.Drain(request.drain))
        return worker_pb2.DrainReply()

    async def Reserve(self, request, context):
        if request.incarnation:
            await self._check_incarnation(context, request.incarnation)
        theirs, ours = request.writer.kv_version, self._description.kv_version
        if theirs and ours and theirs != ours:  # routers don't join such a pair; a stale one may still ask
            await abort_with(context, LayoutMismatch(f"KV versions differ: the writer's is {theirs}, this group's {ours}"))
        self._mailboxes.open(request.router_id)
        command = cmd.Reserve(request.work, request.router_id, request.writer)
        try:
            return await self._answer(context, command)
        except asyncio.CancelledError:  # the router does not wait any more, so nobody will ever use the reservation
            self._commands.put(cmd.Abort(request.work.internal_id, "the router gave the reservation up"))
            raise

    async def Renew(self, request, context):
        await self._check_incarnation(context, request.incarnation)
        return worker_pb2.RenewReply(unknown_ids=await self._answer(context, cmd.Renew(list(request.transfer_ids))))

    async def Commit(self, request, context):
        await self._check_signed(context, request)
        await self._answer(context, cmd.Commit(request))
        return worker_pb2.CommitReply()

    async def Abandon(self, request, context):
        await self._check_signed(context, request)
        await self._check_incarnation(context, request.incarnation)
        self._commands.put(cmd.Abandon(request.transfer_id))
        return worker_pb2.AbandonReply()

    async def WritersDied(self, request, context):
        await self._check_signed(context, request)
        self._commands.put(cmd.WritersDied(list(request.incarnations)))
        return worker_pb2.WritersDiedReply()

    async def Abort(self, request, context):
        return worker_pb2.AbortReply(found=await self._answer(context, cmd.Abort(request.internal_id, request.reason)))

    async def Subscribe(self, request, context):
        async with contextlib.aclosing(self._mailboxes.subscribe(request.router_id)) as frames:
            async for frame in frames:
                yield frame

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    async def _answer(self, context, command):
        """Puts a command and waits for the engine's answer."""
        if self._is_closed:
            await abort_with(context, self._gone())
        self._waiting.add(command.done)
        self._commands.put(command)
        try:
            return await asyncio.wrap_future(command.done)
        except ServingError as exc:
            await abort_with(context, exc)
        finally:
            self._waiting.discard(command.done)

    async def _check_signed(self, context, message) -> None:
        try:
            verify(message, self._key)
        except KVTransferError as exc:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, exc.message)

    async def _check_incarnation(self, context, incarnation: int) -> None:
        if incarnation != self._description.incarnation:
            await abort_with(context, PeerLost(f"incarnation {incarnation:x} does not live here any more"))

    def _gone(self) -> WorkerLost:
        return WorkerLost(f"decode group {self._description.group} is ending")

    def _hop(self, method, *arguments) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(method, *arguments)
