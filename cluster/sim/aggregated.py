"""Groups that prefill and decode on the same GPUs, as serving without disaggregation does: what the planner compares with.

A prompt is computed in chunks, one with each decode step, so every chunk makes the step of all running sequences longer. Requests go to the
group with the least work ahead.
"""

from __future__ import annotations

import math
from collections import deque

from cluster.cost_model import PoolSpec, PreparedPool, prepare_decode, prepare_prefill
from cluster.load.arrivals import Load
from cluster.profile import Profile
from cluster.sim.clock import Clock
from cluster.sim.engines import AS_PROFILED, SimDecode
from cluster.sim.record import Record
from cluster.sim.request import SimRequest

CHUNK_TOKENS = 2048


class SimAggregated(SimDecode):
    """Decodes as `SimDecode` does; while it prefills, each step carries a chunk and takes that much longer."""

    def __init__(self, name: str, number: int, prefill: PreparedPool, decode: PreparedPool, clock: Clock, record: Record):
        super().__init__(name, number, decode, clock, AS_PROFILED, self._ended)
        assert prefill.curve is not None
        self._curve = prefill.curve
        self._record = record
        self._line: deque[SimRequest] = deque()
        self._is_prefilling = False
        self.ahead_ms = 0.0

    def submit(self, request: SimRequest) -> None:
        self._line.append(request)
        self.ahead_ms += self._curve.at(request.prompt)
        self._next()

    def _next(self) -> None:
        if self._is_prefilling or not self._line:
            return
        request = self._line[0]
        if not self.reserve(request, request.prompt + request.output, request.prompt):
            return  # until a sequence ends
        self._line.popleft()
        took_ms = self._curve.at(request.prompt)
        chunks = math.ceil(request.prompt / CHUNK_TOKENS)
        self._is_prefilling = True
        self._advance()
        self._chunk_s = took_ms / chunks / 1e3
        self._replan()
        if not self._running:
            self._since_s = self._clock.now_s
        self._clock.after(chunks * (self._chunk_s + self._plain_step_s()), self._prefilled, request)

    def _prefilled(self, request: SimRequest) -> None:
        self._advance()
        self._is_prefilling, self._chunk_s = False, 0.0
        request.stamps.saw_first(self._clock.now_s)
        self.ahead_ms -= self._curve.at(request.prompt)
        if request.output > 1:
            self.join(request)
        else:
            self._ended(self, request)
            self._replan()
        self._next()

    def _ended(self, group: SimDecode, request: SimRequest) -> None:
        request.stamps.last_token_s = self._clock.now_s
        self.release(request)
        self._record.note(request, 0.0)
        self._next()


def run_aggregated(profile: Profile, spec: PoolSpec, groups: int, load: Load) -> Record:
    """Until the last request has ended. Cost of single requests is not told: they share all GPUs."""
    clock, record = Clock(), Record(len(load))
    prefill, decode = prepare_prefill(profile, spec), prepare_decode(profile, spec)
    pool = [SimAggregated(f"{spec.name}-{i}", i, prefill, decode, clock, record) for i in range(groups)]
    arrivals = zip(load.at_s.tolist(), load.prompt_tokens.tolist(), load.output_tokens.tolist(), strict=True)
    for number, (at_s, prompt, output) in enumerate(arrivals):
        while clock.next_s() <= at_s:
            clock.step()
        clock.now_s = at_s
        min(pool, key=lambda group: (group.ahead_ms, group.book.batch)).submit(SimRequest(number, prompt, output, at_s))
    while record.ended < len(load):
        clock.step()
    record.end_s = clock.now_s
    for group in pool:
        record.group_left(spec, group, clock.now_s)
    return record
