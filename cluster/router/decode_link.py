"""The router's end of a decode group: the one stream that carries the tokens of all its requests here, handed to their attempts.

Adds to `groups.py`: subscribing, coming back after a broken stream, and ending requests that nobody here knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from cluster.router.books import DecodeBook
from cluster.router.groups import DEFAULT_LIVENESS, UNARY_TIMEOUT_S, GroupLink, Liveness, Sink
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.wire import PLAIN, Wire

logger = logging.getLogger(__name__)

RECONNECT_PAUSE_S = 0.05
REMEMBERED_ABORTS = 4096


class DecodeLink(GroupLink):
    """A decode group, its token stream, and the attempts that have a reservation or run there.

    Own requests count as load from the moment they are attached; what the group reports beyond them belongs to other routers.
    """

    def __init__(
        self,
        description: types_pb2.GroupDescription,
        router_id: str,
        on_change: Callable[[], None],
        may_rest: Callable[[], bool] = lambda: True,
        liveness: Liveness = DEFAULT_LIVENESS,
        wire: Wire = PLAIN,
    ):
        super().__init__(description, on_change, may_rest, liveness, wire)
        self.stub = wire.stub(worker_pb2_grpc.DecodeGroupStub(self.channel))
        self._router_id = router_id
        self.book = DecodeBook(description.max_batch)
        self._frame_since_poll = False
        self._aborted: dict[str, None] = {}

    def start(self) -> None:
        super().start()
        self.spawn(self._subscribe_forever())

    def attach(self, internal_id: str, sink: Sink, context_tokens: int) -> None:
        """From now on outputs with this id go to `sink`, and the request counts as load."""
        self._sinks[internal_id] = sink
        self.book.attach(internal_id, context_tokens)
        self._on_change()

    def detach(self, internal_id: str) -> None:
        self._sinks.pop(internal_id, None)
        if self.book.detach(internal_id):
            self._on_change()

    @property
    def own_sequences(self) -> int:
        """Requests of this router that run here or are on the way."""
        return len(self._sinks)

    def abort(self, internal_id: str, reason: str) -> None:
        """Asks the group to end a request, without waiting. A lost group needs no asking: its lease on us runs out."""
        self._aborted[internal_id] = None
        if len(self._aborted) > REMEMBERED_ABORTS:
            del self._aborted[next(iter(self._aborted))]
        if self.lost is None:
            self.spawn(self.abort_and_wait(internal_id, reason))

    async def abort_and_wait(self, internal_id: str, reason: str) -> None:
        try:
            await self.stub.Abort(worker_pb2.AbortRequest(internal_id=internal_id, reason=reason), timeout=UNARY_TIMEOUT_S)
        except grpc.RpcError as exc:
            logger.info("abort of %s on %s failed: %s", internal_id, self.name, exc.code())

    async def _get_load(self) -> types_pb2.GroupLoad:
        return await self.stub.GetLoad(worker_pb2.LoadRequest(), timeout=self._liveness.poll_timeout_s)

    def _wants_poll(self) -> bool:
        fresh, self._frame_since_poll = self._frame_since_poll, False
        return not fresh or not self._answers

    def _take_load(self, load: types_pb2.GroupLoad) -> None:
        before = self.book.rank()
        self.book.take_load(load.running, load.context_tokens, load.free_full_blocks, load.total_full_blocks)
        super()._take_load(load)
        if self.book.rank() != before:
            self._on_change()

    async def _subscribe_forever(self) -> None:
        while self.lost is None:
            try:
                await self._read_frames()
                reason = "its token stream ended"
            except grpc.RpcError as exc:
                reason = f"its token stream broke ({exc.code().name})"
            self._set_answers(False)
            if not await self._comes_back():
                self.lose(reason)
            await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _read_frames(self) -> None:
        sinks = self._sinks
        async for frame in self.stub.Subscribe(worker_pb2.SubscribeRequest(router_id=self._router_id)):
            self._frame_since_poll = True
            for output in frame.outputs:
                sink = sinks.get(output.internal_id)
                if sink is not None:
                    sink.on_output(output)
                elif not output.HasField("finish") and not output.error_status and output.internal_id not in self._aborted:
                    self.abort(output.internal_id, "no such request at this router")
            if frame.HasField("load"):
                self._take_load(frame.load)

    async def _comes_back(self) -> bool:
        """Whether the same incarnation answers again before `reconnect_s` has passed."""
        loop = asyncio.get_running_loop()
        reconnect_s = self._liveness.reconnect_s
        give_up_s = loop.time() + reconnect_s
        while self.lost is None and loop.time() < give_up_s:
            try:
                answer = await self.stub.Describe(worker_pb2.DescribeRequest(), timeout=reconnect_s / 2)
                return answer.incarnation == self.description.incarnation
            except grpc.RpcError:
                await asyncio.sleep(RECONNECT_PAUSE_S)
        return False
