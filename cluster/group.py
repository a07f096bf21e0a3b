"""One running group: from its demand for resources to the moment it ends. What it consists of is in `placement.py`.

Owned by the controller, one object per incarnation; a group that died is never revived, another takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from ray.exceptions import RayError

from cluster.placement import Place, Ranks
from cluster.rank_actor import TERMINATED, Found, RankActor
from cluster.reconcile import Phase
from cluster.specs import for_rank
from common.errors import ServingError, WorkerLost
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.rank_spec import RankSpec
from common.wire import Wire

logger = logging.getLogger(__name__)
WATCH_S = 5.0
POLL_S = 0.5
POLL_TIMEOUT_S = 2.0
DRAIN_POLL_S = 0.1
LAST_WORDS_S = 5.0  # a rank that was told to stop ends within this time by itself


class GroupState(enum.Enum):
    PLACING = "waiting for resources"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


_PHASES = {GroupState.PLACING: Phase.STARTING, GroupState.LOADING: Phase.STARTING, GroupState.READY: Phase.READY}


class Group:
    """PLACING -> LOADING -> READY -> DRAINING -> DEAD; from each state straight to DEAD if something fails or if it is stopped.

    `description` is set from READY on. `error` says why it is DEAD, None after a wanted end; `leaves_for`: why it was asked to go.
    `load`: as last seen.
    """

    def __init__(self, spec: RankSpec, place: Place, fingerprint: str, wire: Wire, grace_s: float, on_change: Callable[[], None]):
        """`grace_s`: running requests have so long to finish once the group is asked to go."""
        self.spec = spec
        self.fingerprint = fingerprint
        self.state = GroupState.PLACING
        self.description: types_pb2.GroupDescription | None = None
        self.load = types_pb2.GroupLoad()
        self.error: str | None = None
        self.failed_in = GroupState.PLACING  # the state that `error` ended
        self.leaves_for = ""
        self.is_proved_dead = False
        self.is_condemned = False  # to be replaced, though its configuration is the one that is wanted
        self.ready_since_s = 0.0  # of the monotonic clock
        self._on_change = on_change
        self._wire = wire
        self._place = place
        self._ranks = Ranks(place)
        self._leave = asyncio.Event()
        self._grace_s = grace_s
        self._doing = ""  # of rank 0, while it starts

    @classmethod
    def adopt(cls, found: Found, place: Place, actors: list[Any], wire: Wire, grace_s: float, on_change: Callable[[], None]) -> Group:
        """A group that an earlier controller has started and that is complete."""
        group = cls(found.spec, place, found.fingerprint, wire, grace_s, on_change)
        group._ranks = Ranks(place, actors)
        group.description = types_pb2.GroupDescription.FromString(found.description)
        group.state = GroupState.READY
        return group

    @property
    def name(self) -> str:
        return self.spec.group

    @property
    def phase(self) -> Phase:
        return Phase.LEAVING if self._leave.is_set() else _PHASES.get(self.state, Phase.LEAVING)

    @property
    def detail(self) -> str:
        """What it waits for, or why it goes; for people."""
        if self.leaves_for:
            return f"{self.leaves_for}; {self.load.running} running" if self.state is GroupState.DRAINING else self.leaves_for
        return {GroupState.PLACING: self._ranks.lacks, GroupState.LOADING: lambda: self._doing}.get(self.state, str)()

    async def run(self, place_timeout_s: float, start_timeout_s: float, health_timeout_s: float, actor_class: type = RankActor) -> None:
        """Starts the group if it was not adopted, and returns when it has ended for good: processes gone, resources given back."""
        life = asyncio.create_task(self._live(place_timeout_s, start_timeout_s, health_timeout_s, actor_class))
        leave = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait((life, leave), return_when=asyncio.FIRST_COMPLETED)
            if not life.done() and self.state is GroupState.READY:
                await self._drain(life)
            if not life.done():
                life.cancel()
            await life
        except (asyncio.CancelledError, RayError, ServingError) as exc:
            self.error = None if self._leave.is_set() else _cause(exc)
        finally:
            leave.cancel()
            self.failed_in = self.state
            self._enter(GroupState.DEAD)
            if self.error:
                logger.error("group %s ended: %s", self.name, self.error)
            else:
                logger.info("group %s ended: %s", self.name, self.leaves_for)
            self.is_proved_dead = await self._ranks.remove()

    def leave(self, reason: str) -> None:
        """No new work from now on; what runs has the grace time to finish. A group that still starts ends at once. Then `run` returns."""
        if not self._leave.is_set():
            self.leaves_for = reason
            self._leave.set()
            self._on_change()

    def hurry(self) -> None:
        """Whatever it is at, it has no time left."""
        self._grace_s = 0.0

    # -- life --------------------------------------------------------------------------------------------------------------------------

    async def _live(self, place_timeout_s: float, start_timeout_s: float, health_timeout_s: float, actor_class: type) -> None:
        """Raises: ServingError, RayError when the group has failed; returns after a wanted end"""
        if self.state is GroupState.PLACING:
            self._ranks.ask_for_place()
            await self._ranks.placed(place_timeout_s)
            self._enter(GroupState.LOADING)
            try:
                await asyncio.wait_for(self._load(actor_class), start_timeout_s)
            except TimeoutError:
                raise WorkerLost(f"not ready within {start_timeout_s:.0f} s") from None
        else:
            await self._ranks.identify()
        watches = [asyncio.create_task(self._watch(actor)) for actor in self._ranks.actors]
        watches.append(asyncio.create_task(self._follow_load(health_timeout_s)))
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            await done.pop()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _load(self, actor_class: type) -> None:
        spec, ranks = self.spec, self._ranks
        await ranks.start(actor_class)
        rendezvous = await ranks.actors[0].reserve_rendezvous.remote()
        host = rendezvous.rpartition(":")[0]
        specs = [for_rank(spec, rank, rendezvous, host) for rank in range(spec.tp)]
        follow = asyncio.create_task(self._follow_start(ranks.actors[0]))
        try:
            answers = await asyncio.gather(*(actor.start.remote(s) for actor, s in zip(ranks.actors, specs, strict=True)))
        finally:
            follow.cancel()
        description = types_pb2.GroupDescription.FromString(answers[0])
        del description.ranks[:]
        description.ranks.extend(await ranks.identify())
        found = [Found(s, b"" if s.rank else description.SerializeToString(), self.fingerprint) for s in specs]
        await asyncio.gather(*(actor.serve.remote(f) for actor, f in zip(ranks.actors, found, strict=True)))
        self.description = description
        self.ready_since_s = time.monotonic()
        self._enter(GroupState.READY)
        logger.info("group %s is ready at %s", self.name, description.address)

    async def _follow_start(self, actor: Any) -> None:
        """What rank 0 is at, for whoever asks what the group waits for; ends with its caller."""
        with contextlib.suppress(RayError):
            while True:
                self._doing = await actor.doing.remote()
                await asyncio.sleep(POLL_S)

    async def _watch(self, actor: Any) -> None:
        """Returns when the rank has ended as it was told; raises WorkerLost, RayError when it died."""
        while True:
            news, why = await actor.watch.remote(WATCH_S)
            if news == "ended":
                if self._leave.is_set() and not why:
                    return
                raise WorkerLost(f"a rank ended by itself: {why or 'no reason given'}")
            if news == TERMINATED and not self._leave.is_set():
                logger.info("group %s was sent SIGTERM", self.name)
                self.leave(TERMINATED)

    async def _follow_load(self, health_timeout_s: float) -> None:
        """Keeps `load` fresh. Raises: WorkerLost if the leader is silent for too long"""
        assert self.description is not None
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        async with self._wire.channel(self.description.address) as channel:
            stub = self._stub(channel)
            while True:
                with contextlib.suppress(grpc.RpcError):
                    self.load = await stub.GetLoad(worker_pb2.LoadRequest(), timeout=min(POLL_TIMEOUT_S, health_timeout_s))
                    answered_s = loop.time()
                if loop.time() - answered_s > health_timeout_s:
                    raise WorkerLost(f"its leader was silent for {health_timeout_s:g} s")
                await asyncio.sleep(DRAIN_POLL_S if self._leave.is_set() else POLL_S)

    # -- end ---------------------------------------------------------------------------------------------------------------------------

    async def _drain(self, life: asyncio.Task) -> None:
        """Until nothing runs or the grace is over; then the ranks are told to stop, and what still runs goes on elsewhere."""
        self._enter(GroupState.DRAINING)
        assert self.description is not None
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        async with self._wire.channel(self.description.address) as channel:
            while not life.done() and loop.time() - started_s < self._grace_s:
                with contextlib.suppress(grpc.RpcError):
                    stub = self._stub(channel)
                    await stub.Drain(worker_pb2.DrainRequest(drain=True), timeout=POLL_TIMEOUT_S)
                    if is_idle(await stub.GetLoad(worker_pb2.LoadRequest(), timeout=POLL_TIMEOUT_S)):
                        break
                await asyncio.wait((life,), timeout=DRAIN_POLL_S)
        for actor in self._ranks.actors:
            actor.stop.remote()
        await asyncio.wait((life,), timeout=LAST_WORDS_S)

    def _stub(self, channel: grpc.aio.Channel) -> Any:
        is_prefill = self.spec.role == "prefill"
        return self._wire.stub((worker_pb2_grpc.PrefillGroupStub if is_prefill else worker_pb2_grpc.DecodeGroupStub)(channel))

    def _enter(self, state: GroupState) -> None:
        self.state = state
        self._on_change()


def is_idle(load: types_pb2.GroupLoad) -> bool:
    """Whether a group that takes nothing new has nothing left either."""
    return load.draining and not (load.running or load.waiting or load.transfers)


def _cause(exc: BaseException) -> str:
    inner = getattr(exc, "cause", None) or exc
    return " ".join(str(inner).split())[:500] or type(exc).__name__
