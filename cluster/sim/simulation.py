"""The life of simulated requests: arrive, be chosen for and admitted, wait, reserve, prefill, hand over, decode, finish.

The steps are those of `router/dispatch.py`, and every decision in them is the router's own code: chooser, queue, late binding, order of
groups, corrections. What is simulated is the time that engines take.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from cluster.cost_model import PoolSpec, Shape
from cluster.load.arrivals import Load
from cluster.profile import Profile
from cluster.router import report
from cluster.router.choice import Aim, Decision
from cluster.router.chooser import Chooser, Objective
from cluster.router.pool import DecodePool, PoolSet, PrefillPool
from cluster.router.queue import QueueLimits, Ticket
from cluster.sim.clock import Clock
from cluster.sim.engines import AS_PROFILED, SimDecode, SimPrefill, Truth
from cluster.sim.record import Record
from cluster.sim.request import SimRequest
from common.errors import ServingError
from common.proto import types_pb2

EXPIRE_EVERY_S = 0.1
ROOM_RETRY_S = 0.25
NOISE_BLOCK = 4096


class Policy(Protocol):
    """Who picks the pair of pools; the router's chooser, or what it is compared with."""

    def plan(self, shape: Shape, aim: Aim, now_s: float, *, number: int) -> Decision: ...


@dataclass(frozen=True)
class PoolPlan:
    """A pool of a deployment with its number of groups."""

    role: Literal["prefill", "decode"]
    spec: PoolSpec
    groups: int = 1


@dataclass(frozen=True)
class SimSettings:
    """`aim`: what every request wants; `deadline_s`: of each, from its arrival; `noise`: sigma of the log of a prefill's time; `truth`: by
    pool, how engines differ from the profile; `learns`: whether finished requests correct the predictions."""

    aim: Aim = field(default_factory=lambda: Aim(0.5))
    limits: QueueLimits = field(default_factory=QueueLimits)
    deadline_s: float = 600.0
    noise: float = 0.0
    truth: dict[str, Truth] = field(default_factory=dict)
    learns: bool = True
    seed: int = 0


class Simulation:
    """One run. `policy` None: the router's own choice."""

    def __init__(self, profile: Profile, plans: Sequence[PoolPlan], settings: SimSettings):
        self.clock = Clock()
        self.pools = PoolSet()
        self.profile = profile
        self.settings = settings
        self.chooser = Chooser(self.pools, profile, Objective(settings.aim.latency_weight), settings.seed)
        self.policy: Policy = self.chooser
        self.arriving_ms: dict[str, float] = {}  # predicted prefill time that arrived, by pool; the autoscaler reads and clears it
        self._rng = np.random.default_rng(settings.seed)
        self._noises: list[float] = []
        self._incarnations = itertools.count(1)
        for plan in plans:
            pool = self.pools.add(_ROLES[plan.role], plan.spec, profile, settings.limits)
            assert isinstance(pool, PrefillPool | DecodePool)
            for _ in range(plan.groups):
                self.add_group(pool)

    # -- groups ------------------------------------------------------------------------------------------------------------------------

    def add_group(self, pool: PrefillPool | DecodePool) -> None:
        number = next(self._incarnations)
        name, truth = f"{pool.spec.name}-{number}", self.settings.truth.get(pool.spec.name, AS_PROFILED)
        if isinstance(pool, PrefillPool):
            group = SimPrefill(name, number, pool.prepared, self.clock, truth, self._noise, self._first_token)
            group.started_s = self.clock.now_s
            pool.add(group)
        else:
            decode = SimDecode(name, number, pool.prepared, self.clock, truth, self._finished)
            decode.started_s = self.clock.now_s
            pool.add(decode)
        self._pump_all()

    # -- requests ----------------------------------------------------------------------------------------------------------------------

    def run(self, load: Load, on_progress: Callable[[int], None] = lambda done: None) -> Record:
        """Until the last request has ended. `on_progress` gets the number of requests that have arrived, now and then."""
        record = self.record = Record(len(load))
        clock = self.clock
        arrivals = zip(load.at_s.tolist(), load.prompt_tokens.tolist(), load.output_tokens.tolist(), strict=True)
        self._expire()
        for number, (at_s, prompt, output) in enumerate(arrivals):
            while clock.next_s() <= at_s:
                clock.step()
            clock.now_s = at_s
            self._arrive(SimRequest(number, prompt, output, at_s))
            if number % 1000 == 0:
                on_progress(number)
        while record.ended < len(load):
            clock.step()
        record.end_s = clock.now_s
        record.take_groups(self.pools, clock.now_s)
        return record

    def _arrive(self, request: SimRequest) -> None:
        try:
            self._choose(request, again=False)
        except ServingError as error:
            self.record.refused(request, error)

    def _choose(self, request: SimRequest, *, again: bool) -> None:
        """Raises: ServingError if nobody takes it"""
        settings, now_s = self.settings, self.clock.now_s
        shape = self.chooser.shape_of(request.prompt, request.output)
        decision = self.policy.plan(shape, settings.aim, now_s, number=request.number)
        pool = self.pools.prefill[decision.prefill_pool.name]
        needed = decision.decode_pool.name if decision.decode_pool is not None else ""
        ticket = Ticket(
            prompt_tokens=request.prompt,
            service_ms=decision.prefill_ms,
            deadline_s=request.stamps.arrived_s + settings.deadline_s,
            enqueued_s=request.stamps.arrived_s,
            decode_pool=needed,
            owner=request,
        )
        pool.queue.push(ticket, decision.wait_ms, accepted_before=again)
        self.arriving_ms[pool.spec.name] = self.arriving_ms.get(pool.spec.name, 0.0) + decision.prefill_ms
        request.decision, request.ticket = decision, ticket
        if needed:
            self.pools.decode[needed].expect(request, request.prompt)
        self._pump(pool)

    def _pump_all(self) -> None:
        for pool in self.pools.prefill.values():
            if pool.queue:
                self._pump(pool)

    def _pump(self, pool: PrefillPool) -> None:
        homeless = []
        for ticket, group in pool.bind(self.clock.now_s, self.pools.decode):
            request = ticket.owner
            assert isinstance(request, SimRequest)
            request.stamps.granted_s = self.clock.now_s
            if self._reserve(request):
                group.submit(request)
            else:
                group.book.take_back(ticket, self.clock.now_s)
                pool.refresh(group)
                homeless.append(request)
        for request in homeless:
            self._choose_anew(request)

    def _reserve(self, request: SimRequest) -> bool:
        """Returns: whether the chosen decode pool has room; where none is needed, it has"""
        decision = request.decision
        assert decision is not None
        if decision.decode_pool is None:
            return True
        pool, shape = self.pools.decode[decision.decode_pool.name], decision.shape
        for group in pool.by_room(shape.worst, decision.seed):
            if group.reserve(request, shape.worst, shape.prompt + shape.output // 2):
                pool.refresh(group)
                pool.forget(request)
                self._leave_front(request)
                request.decode = group
                return True
        pool.no_room(request)
        self.clock.after(ROOM_RETRY_S, self._room_may_be, pool)
        return False

    def _choose_anew(self, request: SimRequest) -> None:
        self._forget(request)
        try:
            self._choose(request, again=True)
        except ServingError as error:
            self._leave_front(request)
            self.record.refused(request, error)

    def _forget(self, request: SimRequest) -> None:
        decision = request.decision
        if decision is not None and decision.decode_pool is not None:
            self.pools.decode[decision.decode_pool.name].forget(request)

    def _leave_front(self, request: SimRequest) -> None:
        if any([pool.leave_front(request) for pool in self.pools.decode.values()]):
            self.clock.after(0.0, self._pump_all)

    def _room_may_be(self, pool: DecodePool) -> None:
        if pool.front is not None:
            pool.front_may_ask = True
        self._pump_all()

    def _first_token(self, group: SimPrefill, request: SimRequest) -> None:
        decision, now_s = request.decision, self.clock.now_s
        assert decision is not None
        request.stamps.saw_first(now_s)
        pool = self.pools.prefill[decision.prefill_pool.name]
        group.book.take_back(request.ticket, now_s)
        pool.refresh(group)
        if group.is_draining and group.is_idle:
            pool.remove(group)
            self.record.group_left(pool.spec, group, now_s)
        if request.decode is None:
            self._end(request)
        elif request.output < 2:
            self._leave_decode(request.decode, request)
            self._end(request)
        else:
            request.stamps.transfer_ms = decision.prediction.transfer_ms
            self.clock.after(request.stamps.transfer_ms / 1e3, request.decode.join, request)
        self._pump(pool)

    def _finished(self, group: SimDecode, request: SimRequest) -> None:
        request.stamps.last_token_s = self.clock.now_s
        self._leave_decode(group, request)
        self._end(request)

    def _leave_decode(self, group: SimDecode, request: SimRequest) -> None:
        decision = request.decision
        assert decision is not None
        assert decision.decode_pool is not None
        pool = self.pools.decode[decision.decode_pool.name]
        group.release(request)
        pool.refresh(group)
        if group.is_draining and group.is_idle:
            pool.remove(group)
            self.record.group_left(pool.spec, group, self.clock.now_s)
        if pool.front is not None:
            self._room_may_be(pool)

    def _end(self, request: SimRequest) -> None:
        decision = request.decision
        assert decision is not None
        self.record.finished(request, sum(report.prefill_and_decode_usd(request.stamps, decision)))
        self.chooser.output_length.observe(request.output)
        if self.settings.learns:
            prefill = self.pools.prefill[decision.prefill_pool.name]
            decode = self.pools.decode[decision.decode_pool.name] if decision.decode_pool is not None else None
            report.learn(request.stamps, request.output, decision, prefill, decode, self.clock.now_s)

    def _expire(self) -> None:
        """Requests that wait past their deadline end; nobody is given work that has expired."""
        for pool in self.pools.prefill.values():
            for ticket in pool.queue.expire(self.clock.now_s):
                request = ticket.owner
                assert isinstance(request, SimRequest)
                self._forget(request)
                self._leave_front(request)
                self.record.expired(request)
        self.clock.after(EXPIRE_EVERY_S, self._expire)

    def _noise(self) -> float:
        if self.settings.noise == 0.0:
            return 1.0
        if not self._noises:
            self._noises = self._rng.lognormal(0.0, self.settings.noise, NOISE_BLOCK).tolist()
        return self._noises.pop()


_ROLES = {"prefill": types_pb2.ROLE_PREFILL, "decode": types_pb2.ROLE_DECODE}
