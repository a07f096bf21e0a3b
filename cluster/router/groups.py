"""The router's end of one group: channel, health, load and its requests; prefill groups here, decode groups in `decode_link.py`.

A link belongs to one incarnation. It is healthy while its calls succeed, and *lost* for good when the group is gone, was replaced, or keeps
silent; then every request on it is told at once. Made and dropped by `pools.py`, used by `attempt.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from cluster.router.books import CREDITS, PrefillBook
from cluster.router.directory import CHANNEL_OPTIONS
from cluster.router.status import from_rpc_error, is_client_fault
from common.errors import ServingError, WorkerLost
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.wire import PLAIN, Wire

logger = logging.getLogger(__name__)

UNARY_TIMEOUT_S = 5.0
STRIKES = 3  # failures in a row that are the group's own before it gets a rest
REST_S = (0.5, 16.0)


def is_being_cancelled() -> bool:
    """Whether somebody wants the current task to end; false if only what it waits for was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(frozen=True)
class Liveness:
    """When a group is given up; see `router.liveness` in the config."""

    poll_s: float = 0.2
    poll_timeout_s: float = 2.0
    max_silent_polls: int = 4
    reconnect_s: float = 0.7


DEFAULT_LIVENESS = Liveness()


class Sink(Protocol):
    """One attempt, as a link sees it."""

    def on_output(self, output: worker_pb2.SequenceOutput) -> None: ...
    def on_lost(self, error: ServingError) -> None: ...


class GroupLink:
    """What both roles share. `on_change` is called whenever health or load may have changed what this group can take; `may_rest`
    says whether the pool can spare the group for a while."""

    def __init__(
        self,
        description: types_pb2.GroupDescription,
        on_change: Callable[[], None],
        may_rest: Callable[[], bool] = lambda: True,
        liveness: Liveness = DEFAULT_LIVENESS,
        wire: Wire = PLAIN,
    ):
        self.description = description
        self.load = types_pb2.GroupLoad()
        self.lost: WorkerLost | None = None
        self.is_listed = True  # by the directory; running requests of a group that is not go on, new ones go elsewhere
        self.channel = wire.channel(description.address, CHANNEL_OPTIONS)
        self._on_change = on_change
        self._may_rest = may_rest
        self._liveness = liveness
        self._answers = False
        self._strikes = 0
        self._rests = False
        self._poll_now = asyncio.Event()
        self._sinks: dict[str, Sink] = {}
        self._tasks: set[asyncio.Task] = set()

    @property
    def name(self) -> str:
        return self.description.group

    @property
    def incarnation(self) -> int:
        return self.description.incarnation

    @property
    def is_healthy(self) -> bool:
        return self._answers and self.lost is None and not self._rests

    @property
    def can_take(self) -> bool:
        """Whether new requests may go there. `on_change` is called whenever this changes."""
        return self.is_healthy and self.is_listed and not self.load.draining

    @property
    def is_idle(self) -> bool:
        return not self._sinks

    def start(self) -> None:
        self.spawn(self._poll_forever())

    def spawn(self, work) -> asyncio.Task:
        """Runs a coroutine that ends with the link."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        self.lost = self.lost or WorkerLost(f"group {self.name} left the cluster")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channel.close()

    def lose(self, reason: str) -> None:
        """Gives the incarnation up and tells every request on it."""
        if self.lost is None:
            self.lost = WorkerLost(f"group {self.name} is lost: {reason}")
            logger.warning("%s", self.lost.message)
            for sink in list(self._sinks.values()):
                sink.on_lost(self.lost)
            self._on_change()

    def check_alive(self) -> None:
        """Raises: WorkerLost if the incarnation was given up; its channel may be closed then"""
        if self.lost is not None:
            raise self.lost

    def note_failure(self, error: ServingError) -> None:
        """A call to the group failed. What the client caused does not count against the group."""
        if is_client_fault(error):
            return
        if isinstance(error, WorkerLost):
            self._poll_now.set()  # it may also mean that a peer of the group is gone; the group's own answer tells
            return
        self._strikes += 1
        if self._strikes >= STRIKES and not self._rests and self._may_rest():
            rest_s = min(REST_S[0] * 2 ** (self._strikes - STRIKES), REST_S[1])
            self._rests = True
            asyncio.get_running_loop().call_later(rest_s, self._rested)
            logger.warning("group %s failed %d times in a row, rests %.1f s: %s", self.name, self._strikes, rest_s, error)
            self._on_change()

    def _rested(self) -> None:
        self._rests = False
        self._on_change()

    def note_success(self) -> None:
        self._strikes = 0

    async def call(self, method, request, timeout_s: float):
        """One unary call.

        Raises: WorkerLost if it takes longer than `timeout_s`, which is the router's patience and not the client's deadline; ServingError;
        also noted against the group where it is the group's fault
        """
        self.check_alive()
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as exc:
            if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                error: ServingError = WorkerLost(f"group {self.name} did not answer within {timeout_s:g} s")
            else:
                error = from_rpc_error(exc, f"group {self.name}")
            self.note_failure(error)
            raise error from exc
        except asyncio.CancelledError:
            if self.lost is None or is_being_cancelled():
                raise
            raise self.lost from None  # the link was closed, and its channel cancels what is under way

    def _set_answers(self, answers: bool) -> None:
        if answers != self._answers:
            self._answers = answers
            self._on_change()

    def _take_load(self, load: types_pb2.GroupLoad) -> None:
        before, self.load = self.load, load
        self._set_answers(True)
        if before.draining != load.draining:
            self._on_change()

    async def _poll_forever(self) -> None:
        silent, liveness = 0, self._liveness
        while self.lost is None:
            try:
                if self._wants_poll():
                    self._take_load(await self._get_load())
                    self._on_change()
                silent = 0
            except grpc.RpcError as exc:
                silent = silent + 1 if exc.code() == grpc.StatusCode.DEADLINE_EXCEEDED else 0
                if silent == 0 or silent >= liveness.max_silent_polls / 2:
                    self._set_answers(False)
                if silent >= liveness.max_silent_polls:
                    self.lose(f"silent for {silent * liveness.poll_timeout_s:.0f} s")
            self._poll_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(liveness.poll_s):
                    await self._poll_now.wait()

    def _wants_poll(self) -> bool:
        return True

    async def _get_load(self) -> types_pb2.GroupLoad:
        raise NotImplementedError


class PrefillLink(GroupLink):
    """A prefill group and the requests it was given."""

    def __init__(
        self,
        description: types_pb2.GroupDescription,
        on_change: Callable[[], None],
        may_rest: Callable[[], bool] = lambda: True,
        liveness: Liveness = DEFAULT_LIVENESS,
        wire: Wire = PLAIN,
    ):
        super().__init__(description, on_change, may_rest, liveness, wire)
        self.stub = wire.stub(worker_pb2_grpc.PrefillGroupStub(self.channel))
        self.book = PrefillBook()

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self.book.given

    @property
    def free_credits(self) -> int:
        return CREDITS - len(self.book.given) if self.can_take else 0

    def take_back(self, key: object) -> None:
        """The group has computed the request's first token, or will not get it."""
        if self.book.take_back(key, asyncio.get_running_loop().time()):
            self._on_change()

    def attach(self, internal_id: str, sink: Sink) -> None:
        self._sinks[internal_id] = sink

    def detach(self, internal_id: str) -> None:
        self._sinks.pop(internal_id, None)

    async def _get_load(self) -> types_pb2.GroupLoad:
        own_before = len(self.book.given)
        load = await self.stub.GetLoad(worker_pb2.LoadRequest(), timeout=self._liveness.poll_timeout_s)
        self.book.set_foreign(max(0, load.running + load.waiting - max(own_before, len(self.book.given))))
        return load
