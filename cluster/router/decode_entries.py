"""The decode pools as the choice sees them: what a step takes on the best group of each, and whether there is room. Kept by `board.py`."""

from __future__ import annotations

import math

import numpy as np

from cluster.cost_model import Shape, copy_ms, shares
from cluster.profile import Profile
from cluster.router.books import DecodeBook
from cluster.router.choice import DecodeSide, Exclusion, Out
from cluster.router.freshness import Freshness
from cluster.router.pool import DecodePool
from cluster.stacked import StackedSurfaces

IDLE_ROOM_WAIT_MS = 50.0  # least wait that is expected at a pool without room


class DecodeEntries:
    def __init__(self, pools: list[DecodePool], profile: Profile):
        count = len(pools)
        self._profile = profile
        self._pools = pools
        self._prepared = [pool.prepared for pool in pools]
        self._surfaces = StackedSurfaces([pool.prepared.surface for pool in pools if pool.prepared.surface is not None]) if pools else None
        specs = [pool.spec for pool in pools]
        self._gpus = np.array([float(spec.gpus) for spec in specs])
        self._usd_per_ms = np.array([spec.usd_per_ms for spec in specs])
        self._place = np.array([1.0 / spec.max_batch for spec in specs])
        self._per_token = np.array([1.0 / spec.capacity_tokens if spec.capacity_tokens else 0.0 for spec in specs])  # of the KV
        self._longest = min((pool.spec.longest_tokens for pool in pools), default=0)
        self._versions = [-1] * count
        self._fresh = Freshness(count)
        self._contexts = np.zeros(count)
        self._itl_factors = np.ones(count)
        self._transfer_factors = np.ones(count)
        self._groups = [""] * count
        self._out: dict[int, Exclusion] = {}
        self._blocked: dict[int, DecodePool] = {}  # open pools whose best group takes nobody now, or with somebody at the front
        self._block_size_tokens = [spec.kv.block_size_tokens if spec.kv is not None else 0 for spec in specs]
        self._free_tokens = [0.0] * count  # that the best group has room for
        self._light_tokens = min((spec.capacity_tokens / spec.max_batch if spec.capacity_tokens else math.inf for spec in specs), default=0)
        geometries = {id(spec.kv): spec.kv for spec in specs}
        self._geometries = list(geometries.values())
        self._geometry_of = np.array([list(geometries).index(id(spec.kv)) for spec in specs], int)
        self._last_layer = self._per_pool([1.0 / kv.num_layers if kv is not None else 1.0 for kv in self._geometries]) if pools else 1.0

    def side(self, shape: Shape, now_s: float, avoid: frozenset[int]) -> DecodeSide:
        for i, pool in enumerate(self._pools):
            if self._versions[i] != pool.version:
                self._renew(i, now_s)
        for i in self._fresh.due(now_s):
            self._renew(i, now_s)
        assert self._surfaces is not None
        side = DecodeSide(
            pools=self._prepared,
            groups=self._groups.copy(),
            itl_ms=self._surfaces.at(self._contexts + (shape.prompt + shape.output / 2)) * self._itl_factors,
            wait_ms=None,
            itl_factor=self._itl_factors.copy(),
            transfer_factor=self._transfer_factors.copy(),
            copy_ms=self._per_pool([copy_ms(self._profile, kv, shape.prompt) for kv in self._geometries]),
            last_layer=self._last_layer,
            share=self._place if shape.worst <= self._light_tokens else shares(self._place, self._per_token, shape.worst),
            gpus=self._gpus,
            usd_per_ms=self._usd_per_ms,
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

    def _per_pool(self, by_geometry: list[float]) -> np.ndarray | float:
        """Pools mostly share one geometry."""
        return by_geometry[0] if len(by_geometry) == 1 else np.array(by_geometry)[self._geometry_of]

    def _renew(self, i: int, now_s: float) -> None:
        pool = self._pools[i]
        self._versions[i] = pool.version
        if self._fresh.wants_corrections(i, pool.learnt, now_s):
            self._itl_factors[i] = pool.itl.factor(now_s)
            self._transfer_factors[i] = pool.transfer.factor(now_s)
        self._fresh.renewed(i, now_s)
        self._out.pop(i, None)
        self._blocked.pop(i, None)
        order = pool.order
        if (out := pool.exclusion(len(order))) is not None:
            self._out[i], self._groups[i], self._free_tokens[i] = out, "", math.inf
            return
        best = order.first()
        self._groups[i] = best.name
        self._contexts[i] = self._count_on(i, pool, best.book, len(order))
        if pool.front is not None or not best.book.has_room(0):
            self._blocked[i] = pool

    def _count_on(self, i: int, pool: DecodePool, book: DecodeBook, links: int) -> float:
        """Takes the load of a pool's best group, and its share of those on their way. Returns: tokens of context"""
        assert self._surfaces is not None
        self._surfaces.set_batch(i, book.batch + len(pool.expected) / links + 1)
        block_tokens = self._block_size_tokens[i]
        self._free_tokens[i] = book.free_blocks * block_tokens if book.total_blocks and block_tokens else math.inf
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
                side.groups[i], contexts[i] = links[0].name, self._count_on(i, pool, links[0].book, len(links))
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
