"""Groups without a process: books that the router's pools rank, moved by hand. For tests and benchmarks of the choice."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.cost_model import PoolSpec
from cluster.profile import Profile
from cluster.router.books import DecodeBook, PrefillBook
from cluster.router.pool import DecodePool, PoolSet, PrefillPool
from cluster.router.queue import QueueLimits
from common.proto import types_pb2


@dataclass(eq=False)
class StillGroup:
    name: str
    incarnation: int
    book: PrefillBook | DecodeBook
    can_take: bool = True
    is_listed: bool = True
    lost: object = None

    @property
    def is_healthy(self) -> bool:
        return self.can_take


def add_prefill(pools: PoolSet, spec: PoolSpec, profile: Profile, groups: int = 1, limits: QueueLimits | None = None) -> PrefillPool:
    pool = pools.add(types_pb2.ROLE_PREFILL, spec, profile, limits or QueueLimits())
    for i in range(groups):
        pool.add(StillGroup(f"{spec.name}-{i}", hash((spec.name, i)) & 0xFFFFFFFF, PrefillBook()))
    assert isinstance(pool, PrefillPool)
    return pool


def add_decode(pools: PoolSet, spec: PoolSpec, profile: Profile, groups: int = 1) -> DecodePool:
    pool = pools.add(types_pb2.ROLE_DECODE, spec, profile, QueueLimits())
    for i in range(groups):
        group = StillGroup(f"{spec.name}-{i}", hash((spec.name, i)) & 0xFFFFFFFF, DecodeBook(spec.max_batch))
        if spec.kv is not None and spec.capacity_tokens:
            blocks = spec.kv.blocks_for(spec.capacity_tokens)
            group.book.take_load(0, 0, blocks, blocks)
        pool.add(group)
    assert isinstance(pool, DecodePool)
    return pool
