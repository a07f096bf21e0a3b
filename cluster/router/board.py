"""Describes all pools to the choice: how long until a group is free, what a step takes, whether there is room, and why a pool is out.

Kept as arrays with one entry per pool. An entry is worked out anew only when its pool has changed or the entry has aged, so that a choice
among hundreds of groups costs what a choice among their pools does. Reads pools, changes nothing. Called by `chooser.py`.
"""

from __future__ import annotations

import math

import numpy as np

from cluster.correction import KNOTS, place
from cluster.cost_model import Shape
from cluster.router.choice import DecodeSide, Exclusion, Out, PrefillSide
from cluster.router.pool import DecodePool, PoolSet, PrefillPool
from cluster.stacked import StackedCurves, StackedSurfaces

IDLE_ROOM_WAIT_MS = 50.0  # least wait that is expected at a pool without room
AGE_S = 1.0  # corrections fade by less than 0.2% meanwhile
LATE_AGE_S = 0.01  # of an entry with a group that takes longer than predicted: its wait no longer shrinks with time
NEVER = frozenset[int]()


class Board:
    """`prefill` and `decode` describe the pools of the set as they are at `now_s`. `avoid`: incarnations that must not be counted on."""

    def __init__(self, pools: PoolSet):
        self._pools = pools
        self._version = -1
        self._prefill = _PrefillEntries([])
        self._decode = _DecodeEntries([])

    def prefill(self, shape: Shape, now_s: float, priority: int = 0, avoid: frozenset[int] = NEVER) -> PrefillSide:
        self._follow()
        return self._prefill.side(shape, now_s, priority, avoid)

    def decode(self, shape: Shape, now_s: float, avoid: frozenset[int] = NEVER) -> DecodeSide:
        self._follow()
        return self._decode.side(shape, now_s, avoid)

    def _follow(self) -> None:
        if self._version != self._pools.version:
            self._version = self._pools.version
            self._prefill = _PrefillEntries(list(self._pools.prefill.values()))
            self._decode = _DecodeEntries(list(self._pools.decode.values()))


class _PrefillEntries:
    def __init__(self, pools: list[PrefillPool]):
        count = len(pools)
        self._pools = pools
        self._prepared = [pool.prepared for pool in pools]
        self._curves = StackedCurves([pool.prepared.curve for pool in pools if pool.prepared.curve is not None]) if pools else None
        self._gpus = np.array([pool.spec.gpus for pool in pools], float)
        self._usd = np.array([pool.spec.gpus * pool.spec.usd_per_gpu_hour for pool in pools])
        self._longest = min((pool.spec.longest_tokens for pool in pools), default=0)
        self._seen = [(-1, -1, 0)] * count  # versions of pool and queue, priority
        self._until_s = [-math.inf] * count
        self._first_s = -math.inf  # not above the least of them
        self._starts_s = np.zeros(count)
        self._dispatch_ms = np.zeros(count)
        self._logs = np.zeros((KNOTS, count))
        self._groups = [""] * count
        self._out: dict[int, Exclusion] = {}
        self._queued: dict[int, PrefillPool] = {}  # pools in which requests wait
        self._learnt = [-1] * count
        self._fades_s = [-math.inf] * count  # when the corrections are to be read again
        self._max_wait_ms = min((pool.queue.limits.max_wait_s * 1e3 for pool in pools), default=0.0)

    def side(self, shape: Shape, now_s: float, priority: int, avoid: frozenset[int]) -> PrefillSide:
        for i, pool in enumerate(self._pools):
            seen = self._seen[i]
            if seen[0] != pool.version or seen[1] != pool.queue.version or (seen[2] != priority and pool.queue):
                self._renew(i, now_s, priority)
        if self._first_s < now_s:
            for i, until_s in enumerate(self._until_s):
                if until_s < now_s:
                    self._renew(i, now_s, priority)
            self._first_s = min(self._until_s)
        assert self._curves is not None
        knot, part = place(shape.prompt)
        below = self._logs[knot]
        factor = np.exp(below + part * (self._logs[knot + 1] - below))
        side = PrefillSide(
            pools=self._prepared,
            groups=self._groups.copy(),
            wait_ms=np.maximum(self._starts_s - now_s, 0.0) * 1e3,
            dispatch_ms=self._dispatch_ms.copy(),
            prefill_ms=self._curves.at(shape.prompt) * factor,
            gpus=self._gpus,
            usd=self._usd,
            out=self._out.copy(),
        )
        if avoid:
            self._leave_out(side, now_s, priority, avoid)
        self._refuse(side, shape)
        return side

    def _renew(self, i: int, now_s: float, priority: int) -> None:
        pool = self._pools[i]
        self._seen[i] = (pool.version, pool.queue.version, priority)
        if self._learnt[i] != pool.learnt or self._fades_s[i] <= now_s:
            self._learnt[i], self._fades_s[i] = pool.learnt, now_s + AGE_S
            self._dispatch_ms[i] = pool.dispatch.ms
            self._logs[:, i] = pool.correction.logs(now_s)
        self._until_s[i] = now_s + AGE_S
        self._out.pop(i, None)
        self._queued.pop(i, None)
        if pool.queue:
            self._queued[i] = pool
        out = pool.exclusion(len(pool.order))
        if out is not None:
            self._out[i], self._groups[i], self._starts_s[i] = out, "", 0.0
            return
        self._groups[i] = pool.order.first().name
        if pool.is_idle():
            self._starts_s[i] = -math.inf
            return
        self._starts_s[i] = now_s + pool.wait_ms(pool.order, now_s, priority) / 1e3
        late_s = min(link.book.late_at_s for link in pool.order)
        self._until_s[i] = min(now_s + AGE_S, max(late_s, now_s + LATE_AGE_S))
        self._first_s = min(self._first_s, self._until_s[i])

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

    def _refuse(self, side: PrefillSide, shape: Shape) -> None:
        """Pools that can't take this request, though they take others."""
        if shape.prompt > self._longest:
            for i, pool in enumerate(self._pools):
                if shape.prompt > pool.spec.longest_tokens:
                    text = f"{pool.spec.name} takes at most {pool.spec.longest_tokens} tokens"
                    side.out.setdefault(i, Exclusion(Out.TOO_LONG, text))
        is_long = side.wait_ms.max() > self._max_wait_ms
        for i, pool in enumerate(self._pools) if is_long else self._queued.items():
            if refusal := pool.queue.refusal(shape.prompt, float(side.wait_ms[i])):
                side.out.setdefault(i, Exclusion(Out.FULL, f"{pool.spec.name}: {refusal}"))


class _DecodeEntries:
    def __init__(self, pools: list[DecodePool]):
        count = len(pools)
        self._pools = pools
        self._prepared = [pool.prepared for pool in pools]
        self._surfaces = StackedSurfaces([pool.prepared.surface for pool in pools if pool.prepared.surface is not None]) if pools else None
        self._constants = np.array([pool.prepared.constants for pool in pools]).T
        self._longest = min((pool.spec.longest_tokens for pool in pools), default=0)
        self._versions = [-1] * count
        self._learnt = [-1] * count
        self._fades_s = [-math.inf] * count  # when the corrections are to be read again
        self._until_s = [-math.inf] * count
        self._first_s = -math.inf  # not above the least of them
        self._contexts = np.zeros(count)
        self._itl_factors = np.ones(count)
        self._transfer_factors = np.ones(count)
        self._groups = [""] * count
        self._out: dict[int, Exclusion] = {}
        self._blocked: dict[int, DecodePool] = {}  # open pools whose best group takes nobody now, or with somebody at the front
        self._free_tokens = [0.0] * count  # that the best group has room for
        geometries = {id(pool.spec.kv): pool.spec.kv for pool in pools}
        self._geometries = [kv for kv in geometries.values()]
        self._geometry_of = np.array([list(geometries).index(id(pool.spec.kv)) for pool in pools], int)

    def side(self, shape: Shape, now_s: float, avoid: frozenset[int]) -> DecodeSide:
        for i, pool in enumerate(self._pools):
            if self._versions[i] != pool.version:
                self._renew(i, now_s)
        if self._first_s < now_s:
            for i, until_s in enumerate(self._until_s):
                if until_s < now_s:
                    self._renew(i, now_s)
            self._first_s = min(self._until_s)
        assert self._surfaces is not None
        gpus, usd, max_batch, capacity_tokens, layers = self._constants
        side = DecodeSide(
            pools=self._prepared,
            groups=self._groups.copy(),
            itl_ms=self._surfaces.at(self._contexts + (shape.prompt + shape.output / 2)) * self._itl_factors,
            wait_ms=None,
            itl_factor=self._itl_factors.copy(),
            transfer_factor=self._transfer_factors.copy(),
            kv_bytes=self._kv_bytes(shape.prompt),
            gpus=gpus,
            usd=usd,
            max_batch=max_batch,
            capacity_tokens=capacity_tokens,
            layers=layers,
            out=self._out.copy(),
        )
        if avoid:
            self._leave_out(side, shape, avoid)
        if shape.worst > self._longest:
            for i, pool in enumerate(self._pools):
                if shape.worst > pool.spec.longest_tokens:
                    text = f"{pool.spec.name} holds at most {pool.spec.longest_tokens} tokens"
                    side.out.setdefault(i, Exclusion(Out.TOO_LONG, text))
        self._wait(side, shape, avoid)
        return side

    def _kv_bytes(self, prompt_tokens: int) -> np.ndarray:
        """Pools mostly share one geometry."""
        sizes = [float(kv.handover_bytes(prompt_tokens)) if kv is not None else 0.0 for kv in self._geometries]
        return np.full(len(self._pools), sizes[0]) if len(sizes) == 1 else np.array(sizes)[self._geometry_of]

    def _renew(self, i: int, now_s: float) -> None:
        pool = self._pools[i]
        self._versions[i] = pool.version
        if self._learnt[i] != pool.learnt or self._fades_s[i] <= now_s:
            self._learnt[i], self._fades_s[i] = pool.learnt, now_s + AGE_S
            self._itl_factors[i] = pool.itl.factor(now_s)
            self._transfer_factors[i] = pool.transfer.factor(now_s)
        self._until_s[i] = now_s + AGE_S
        self._out.pop(i, None)
        self._blocked.pop(i, None)
        out = pool.exclusion(len(pool.order))
        if out is not None:
            self._out[i], self._groups[i], self._free_tokens[i] = out, "", math.inf
            return
        best = pool.order.first()
        self._groups[i] = best.name
        self._contexts[i] = self._count_on(i, best, len(pool.order))
        self._free_tokens[i] = _free_tokens(pool, best)
        if pool.front is not None or not best.book.has_room(0):
            self._blocked[i] = pool

    def _count_on(self, i: int, best, links: int) -> float:
        """Takes the load of a pool's best group, and its share of those on their way. Returns: tokens of context"""
        pool, book = self._pools[i], best.book
        assert self._surfaces is not None
        self._surfaces.set_batch(i, book.batch + len(pool.expected) / links + 1)
        return book.context_tokens + pool.expected_tokens / links

    def _leave_out(self, side: DecodeSide, shape: Shape, avoid: frozenset[int]) -> None:
        assert self._surfaces is not None
        contexts = self._contexts.copy()
        for i, pool in enumerate(self._pools):
            links = pool.without(avoid)
            if i in side.out or len(links) == len(pool.order):
                continue
            self._versions[i] = -1  # the entry is of other groups than the next choice may count on
            out = pool.exclusion(len(links))
            if out is not None:
                side.out[i], side.groups[i] = out, ""
            else:
                side.groups[i], contexts[i] = links[0].name, self._count_on(i, links[0], len(links))
                self._free_tokens[i] = _free_tokens(pool, links[0])
        side.itl_ms = self._surfaces.at(contexts + (shape.prompt + shape.output / 2)) * self._itl_factors

    def _wait(self, side: DecodeSide, shape: Shape, avoid: frozenset[int]) -> None:
        """Pools without room for this request: a guess of when there is some."""
        worst = shape.worst
        if not self._blocked and min(self._free_tokens) >= worst:
            return
        for i in {*(i for i, tokens in enumerate(self._free_tokens) if tokens < worst), *self._blocked}:
            pool = self._pools[i]
            if i in side.out:
                continue
            blocks = pool.blocks_for(worst)
            links = pool.without(avoid)
            if pool.front is None and any(link.book.has_room(blocks) for link in links):
                continue
            if side.wait_ms is None:
                side.wait_ms = np.zeros(len(self._pools))
            batch = links[0].book.batch
            side.wait_ms[i] = max(IDLE_ROOM_WAIT_MS, side.itl_ms[i] * shape.output * (len(pool.expected) / len(links) + 1) / max(batch, 1))


def _free_tokens(pool: DecodePool, link) -> float:
    kv, book = pool.spec.kv, link.book
    return book.free_blocks * kv.block_size_tokens if kv is not None and book.total_blocks else math.inf
