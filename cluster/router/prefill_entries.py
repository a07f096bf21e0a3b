"""The prefill pools as the choice sees them: when a group of each is free, and what the prompt takes there. Kept by `board.py`."""

from __future__ import annotations

import itertools
import math

import numpy as np

from cluster.correction import KNOTS, place
from cluster.cost_model import Shape
from cluster.router.choice import Exclusion, Out, PrefillSide
from cluster.router.freshness import Freshness
from cluster.router.pool import PrefillPool
from cluster.stacked import StackedCurves

LATE_AGE_S = 0.01  # of an entry with a group that takes longer than predicted: its wait no longer shrinks with time


class PrefillEntries:
    def __init__(self, pools: list[PrefillPool]):
        count = len(pools)
        self._pools = pools
        self._prepared = [pool.prepared for pool in pools]
        self._curves = StackedCurves([pool.prepared.curve for pool in pools if pool.prepared.curve is not None]) if pools else None
        self._gpus = np.array([pool.spec.gpus for pool in pools], float)
        self._usd_per_ms = np.array([pool.spec.usd_per_ms for pool in pools])
        self._longest = min((pool.spec.longest_tokens for pool in pools), default=0)
        self._fresh = Freshness(count)
        self._seen = [-1] * count  # versions of pool and queue, summed
        self._priority = 0
        self._starts_ms = np.zeros(count)
        self._dispatch_ms = np.zeros(count)
        self._logs = np.zeros((KNOTS, count))  # of the corrections, by size
        self._log_steps = np.zeros((KNOTS - 1, count))  # from each knot to the next
        self._groups = [""] * count
        self._out: dict[int, Exclusion] = {}
        self._queued: dict[int, PrefillPool] = {}  # pools in which requests wait
        self._latest_ms = -math.inf  # no start is later
        self._max_wait_ms = min((pool.queue.limits.max_wait_s * 1e3 for pool in pools), default=0.0)

    def side(self, shape: Shape, now_s: float, priority: int, avoid: frozenset[int]) -> PrefillSide:
        if priority != self._priority:
            self._priority = priority
            for i in list(self._queued):
                self._renew(i, now_s)
        for i, pool in enumerate(self._pools):
            if self._seen[i] != pool.version + pool.queue.version:
                self._renew(i, now_s)
        for i in self._fresh.due(now_s):
            self._renew(i, now_s)
        assert self._curves is not None
        knot, part = place(shape.prompt)
        factor = np.exp(self._logs[knot] + part * self._log_steps[knot])
        side = PrefillSide(
            pools=self._prepared,
            groups=self._groups.copy(),
            wait_ms=np.maximum(self._starts_ms - now_s * 1e3, 0.0),
            dispatch_ms=self._dispatch_ms.copy(),
            prefill_ms=self._curves.at(shape.prompt) * factor,
            gpus=self._gpus,
            usd_per_ms=self._usd_per_ms,
            out=self._out.copy(),
        )
        if avoid:
            self._leave_out(side, now_s, priority, avoid)
        self._refuse(side, shape, now_s, bool(avoid))
        return side

    def _renew(self, i: int, now_s: float) -> None:
        pool = self._pools[i]
        self._seen[i] = pool.version + pool.queue.version
        if self._fresh.wants_corrections(i, pool.learnt, now_s):
            self._dispatch_ms[i] = pool.dispatch.ms
            self._logs[:, i] = logs = pool.correction.logs(now_s)
            self._log_steps[:, i] = [after - before for before, after in itertools.pairwise(logs)]
        self._out.pop(i, None)
        self._queued.pop(i, None)
        order, now_ms = pool.order, now_s * 1e3
        if (out := pool.exclusion(len(order))) is not None:
            self._out[i], self._groups[i], self._starts_ms[i] = out, "", 0.0
            self._fresh.renewed(i, now_s)
            return
        first = order.first()
        if first.book.given and first.book.late_at_s <= now_s:  # it ranks by when it should have been free
            first = min(order, key=lambda link: link.book.busy_ms(now_s))
        self._groups[i] = first.name
        if pool.queue:
            self._queued[i] = pool
            start_ms = now_ms + pool.wait_ms(order, now_s, self._priority)
        elif first.book.is_idle:
            start_ms = -math.inf
        else:
            start_ms = now_ms + first.book.busy_ms(now_s)
        self._starts_ms[i] = start_ms
        if start_ms > self._latest_ms:
            self._latest_ms = start_ms
        is_late_s = first.book.late_at_s if start_ms > now_ms else math.inf
        self._fresh.renewed(i, now_s, max(is_late_s, now_s + LATE_AGE_S))

    def _leave_out(self, side: PrefillSide, now_s: float, priority: int, avoid: frozenset[int]) -> None:
        for i, pool in enumerate(self._pools):
            links = pool.without(avoid)
            if i in side.out or len(links) == len(pool.order):
                continue
            out = pool.exclusion(len(links))
            if out is not None:
                side.out[i], side.groups[i], side.wait_ms[i] = out, "", 0.0
            else:
                side.groups[i], side.wait_ms[i] = links[0].name, pool.wait_ms(links, now_s, priority)

    def _refuse(self, side: PrefillSide, shape: Shape, now_s: float, has_left_out: bool) -> None:
        """Pools that can't take this request, though they take others."""
        if shape.prompt > self._longest:
            for i, pool in enumerate(self._pools):
                if shape.prompt > pool.spec.longest_tokens:
                    text = f"{pool.spec.name} takes at most {pool.spec.longest_tokens} tokens"
                    side.out.setdefault(i, Exclusion(Out.TOO_LONG, text))
        is_long = has_left_out or self._latest_ms - now_s * 1e3 > self._max_wait_ms
        for i, pool in enumerate(self._pools) if is_long else self._queued.items():
            if refusal := pool.queue.refusal(shape.prompt, float(side.wait_ms[i])):
                side.out.setdefault(i, Exclusion(Out.FULL, f"{pool.spec.name}: {refusal}"))
