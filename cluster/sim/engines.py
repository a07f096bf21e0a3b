"""Groups that compute nothing and take the time that a profile says: a prefill group, one request at a time, and a decode group with
continuous batching. They look to the router's pools as links do.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.cost_model import PreparedPool
from cluster.router.books import DecodeBook, PrefillBook
from cluster.sim.clock import Clock
from cluster.sim.request import SimRequest


@dataclass(frozen=True)
class Truth:
    """How the engines differ from the profile that the router reads: factors on its times, and the part between a grant and the start and
    between the end and the client that no profile has [ms]."""

    prefill: float = 1.0
    itl: float = 1.0
    dispatch_ms: float = 0.0


AS_PROFILED = Truth()


class SimGroup:
    """What both roles share."""

    def __init__(self, name: str, incarnation: int):
        self.name = name
        self.incarnation = incarnation
        self.is_listed = True
        self.is_draining = False
        self.lost = None
        self.started_s = 0.0

    @property
    def is_healthy(self) -> bool:
        return True

    @property
    def can_take(self) -> bool:
        return not self.is_draining


class SimPrefill(SimGroup):
    """`on_first(group, request)`: the first token of a request is there. `noise()`: factor on one prefill."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        prepared: PreparedPool,
        clock: Clock,
        truth: Truth,
        noise: Callable[[], float],
        on_first: Callable[[SimPrefill, SimRequest], None],
    ):
        super().__init__(name, incarnation)
        assert prepared.curve is not None
        self.book = PrefillBook()
        self.busy_s = 0.0
        self._curve = prepared.curve
        self._clock = clock
        self._truth = truth
        self._noise = noise
        self._on_first = on_first
        self._line: deque[SimRequest] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._line and not self.book.given

    def submit(self, request: SimRequest) -> None:
        self._line.append(request)
        if len(self._line) == 1:
            self._start()

    def _start(self) -> None:
        request = self._line[0]
        stamps = request.stamps
        stamps.started_s = self._clock.now_s
        stamps.prefill_ms = self._curve.at(request.prompt) * self._truth.prefill * self._noise()
        took_s = (stamps.prefill_ms + self._truth.dispatch_ms) / 1e3
        self.busy_s += took_s
        self._clock.after(took_s, self._done)

    def _done(self) -> None:
        request = self._line.popleft()
        if self._line:
            self._start()
        self._on_first(self, request)


class SimDecode(SimGroup):
    """All sequences advance by one token a step; how long a step takes follows from their number and contexts. Between two changes of the
    batch the steps are not simulated one by one: their count is a number that grows with time."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        prepared: PreparedPool,
        clock: Clock,
        truth: Truth,
        on_finish: Callable[[SimDecode, SimRequest], None],
    ):
        super().__init__(name, incarnation)
        assert prepared.surface is not None
        spec = prepared.spec
        self.book = DecodeBook(spec.max_batch)
        self.busy_s = 0.0
        self._kv = spec.kv
        self._total = spec.kv.blocks_for(spec.capacity_tokens) if spec.kv is not None and spec.capacity_tokens else 0
        self._free = self._total
        self._surface = prepared.surface
        self._clock = clock
        self._truth = truth
        self._on_finish = on_finish
        self._steps = 0.0
        self._since_s = 0.0
        self._step_s = 0.0
        self._chunk_s = 0.0  # of prefill that each step carries
        self._context = 0.0
        self._running: list[tuple[float, int, SimRequest]] = []  # heap by the step of the last token
        self._places = 0  # reserved or running
        self._plan = 0
        self._tell()

    @property
    def is_idle(self) -> bool:
        return not self._places

    @property
    def used_blocks(self) -> int:
        return self._total - self._free

    @property
    def total_blocks(self) -> int:
        return self._total

    @property
    def step_ms(self) -> float:
        return self._step_s * 1e3

    def reserve(self, request: SimRequest, worst_tokens: int, context_tokens: int) -> bool:
        """Takes a place and blocks. Returns: whether there was room"""
        blocks = self._blocks(worst_tokens)
        if self._places >= self.book.max_batch or (blocks > self._free and self._total):
            return False
        self._places += 1
        self._free -= blocks if self._total else 0
        request.worst_tokens = worst_tokens
        self.book.attach(request, context_tokens)
        self._tell()
        return True

    def join(self, request: SimRequest) -> None:
        """The KV is here; the request has its first token already."""
        self._advance()
        heapq.heappush(self._running, (self._steps + request.output - 1, request.number, request))
        self._context += request.prompt + 1
        self._replan()

    def release(self, request: SimRequest) -> None:
        """Gives the place and the blocks back."""
        self._places -= 1
        self._free += self._blocks(request.worst_tokens) if self._total else 0
        self.book.detach(request)
        self._tell()

    def _finish_due(self, plan: int) -> None:
        if plan != self._plan:
            return  # the batch has changed since
        self._advance()
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            request = heapq.heappop(self._running)[2]
            self._context -= request.prompt + request.output
            self._on_finish(self, request)
        self._replan()

    def _advance(self) -> None:
        now_s = self._clock.now_s
        if self._running:
            passed_s = now_s - self._since_s
            steps = passed_s / self._step_s
            self._steps += steps
            self._context += steps * len(self._running)
            self.busy_s += passed_s
        self._since_s = now_s

    def _replan(self) -> None:
        """Step time for the present batch, at the mean of its contexts until the next sequence ends."""
        self._plan += 1
        batch = len(self._running)
        if not batch:
            self._step_s, self._context = 0.0, 0.0
            return
        left = max(0.0, self._running[0][0] - self._steps)
        self._step_s = self._plain_step_s(batch * left / 2) + self._chunk_s
        self._clock.after(left * self._step_s, self._finish_due, self._plan)

    def _plain_step_s(self, more_context: float = 0.0) -> float:
        """Of the present batch, if it holds that many tokens more."""
        batch = len(self._running)
        return self._surface.at(batch, self._context + more_context) * self._truth.itl / 1e3 if batch else 0.0

    def _tell(self) -> None:
        self.book.take_load(0, 0, self._free, self._total)

    def _blocks(self, tokens: int) -> int:
        return self._kv.blocks_for(tokens) if self._kv is not None else math.ceil(tokens)
