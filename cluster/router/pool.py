"""One pool as the router runs it: its links, operator state, queue or front, and what it has learnt.

State with a few rules of its own; `pools.py` keeps it up to date, `offers.py` describes it to the choice.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from cluster.correction import Correction, Delay, SizeCorrection
from cluster.cost_model import PoolSpec, PreparedPool, prepare_decode, prepare_prefill
from cluster.profile import Profile
from cluster.router.choice import Exclusion, Out
from cluster.router.decode_link import DecodeLink
from cluster.router.groups import GroupLink, PrefillLink
from cluster.router.queue import PrefillQueue, QueueLimits, Ticket, wait_until_free_ms
from cluster.router.retry_budget import RetryBudget
from common.kv_layout import KVGeometry
from common.proto import router_pb2, types_pb2

Link = TypeVar("Link", bound=GroupLink)


class MovedOn(Exception):
    """The pool that a request waits for can't take it now: choose anew."""


@dataclass(eq=False, kw_only=True)
class Waiter(Ticket):
    """A ticket with somebody behind it, its `owner`. `granted` gets the group; `avoid`: incarnations that failed this request before."""

    owner: object
    granted: asyncio.Future[PrefillLink]
    avoid: frozenset[int] = frozenset()


class Pool(Generic[Link]):
    """What both roles share. Links are keyed by group name; a replaced incarnation gets a new link."""

    def __init__(self, spec: PoolSpec, role: types_pb2.Role, prepared: PreparedPool, retries: RetryBudget):
        self.retries = retries
        self.spec = spec
        self.role = role
        self.prepared = prepared
        self.state = router_pb2.POOL_STATE_ACTIVE
        self.links: dict[str, Link] = {}
        self._healthy: list[Link] | None = None

    @property
    def is_open(self) -> bool:
        return self.state == router_pb2.POOL_STATE_ACTIVE

    def healthy(self) -> list[Link]:
        """Links that may get new requests; kept until `forget_health`."""
        if self._healthy is None:
            self._healthy = [link for link in self.links.values() if link.can_take]
        return self._healthy

    def forget_health(self) -> None:
        self._healthy = None

    def may_rest(self) -> bool:
        """Whether a group that fails can be spared: at least half of those listed must still take requests without it."""
        listed = [link for link in self.links.values() if link.is_listed and link.lost is None]
        return 2 * (sum(link.can_take for link in listed) - 1) >= len(listed)

    def take_spec(self, spec: PoolSpec, profile: Profile) -> None:
        """A group says what it is. The pool is as large as its smallest group."""
        if self.links and self.spec.capacity_tokens:
            spec = replace(spec, capacity_tokens=min(spec.capacity_tokens, self.spec.capacity_tokens))
        if spec != self.spec:
            self.spec = spec
            self.prepared = prepare(self.role, spec, profile)

    def exclusion(self, links: list[Link]) -> Exclusion | None:
        """Why none of the links can be chosen, if so."""
        if not self.is_open:
            return Exclusion(Out.DRAINING, self.spec.name)
        if not links:
            draining = any(link.is_healthy for link in self.links.values())
            return Exclusion(Out.DRAINING if draining else Out.UNHEALTHY, self.spec.name)
        return None


class PrefillPool(Pool[PrefillLink]):
    def __init__(self, spec: PoolSpec, profile: Profile, retries: RetryBudget, limits: QueueLimits):
        super().__init__(spec, types_pb2.ROLE_PREFILL, prepare_prefill(profile, spec), retries)
        self.queue = PrefillQueue(limits)
        self.correction = SizeCorrection()
        self.dispatch = Delay()

    def wait_ms(self, busy_ms: list[float], priority: int = 0) -> float:
        """Until a newcomer of this priority would start, with groups that are busy for `busy_ms` each."""
        return wait_until_free_ms(busy_ms, self.queue.ahead_ms(priority))


class DecodePool(Pool[DecodeLink]):
    """`expected`: requests that chose this pool and have no group yet. `front`: the request that found no room; until it has some (or is
    gone), nobody else of this router may ask, so that small requests do not starve a big one."""

    def __init__(self, spec: PoolSpec, profile: Profile, retries: RetryBudget):
        super().__init__(spec, types_pb2.ROLE_DECODE, prepare_decode(profile, spec), retries)
        self.itl = Correction()
        self.transfer = Correction()
        self.expected: dict[object, int] = {}
        self.front: object | None = None
        self.front_may_ask = False

    def lets(self, key: object) -> bool:
        """Whether this request may ask for room now."""
        return self.front is None or (self.front is key and self.front_may_ask)


@dataclass
class PoolSet:
    """All pools by name, per role."""

    prefill: dict[str, PrefillPool] = field(default_factory=dict)
    decode: dict[str, DecodePool] = field(default_factory=dict)

    def all(self) -> list[Pool]:
        return [*self.prefill.values(), *self.decode.values()]

    def of_role(self, role: types_pb2.Role) -> Mapping[str, Pool]:
        return self.prefill if role == types_pb2.ROLE_PREFILL else self.decode

    def find(self, name: str) -> Pool | None:
        return self.prefill.get(name) or self.decode.get(name)


def prepare(role: types_pb2.Role, spec: PoolSpec, profile: Profile) -> PreparedPool:
    return prepare_prefill(profile, spec) if role == types_pb2.ROLE_PREFILL else prepare_decode(profile, spec)


def spec_of(description: types_pb2.GroupDescription, usd_per_gpu_hour: float) -> PoolSpec:
    return PoolSpec(
        name=description.pool,
        tp=description.layout.tp or 1,
        ep=description.layout.ep or 1,
        weights=description.weights or "mxfp4",
        usd_per_gpu_hour=usd_per_gpu_hour,
        max_batch=description.max_batch or 1,
        capacity_tokens=description.capacity_tokens,
        max_model_len=description.max_model_len or 131072,
        kv=_geometry(description.kv.SerializeToString(deterministic=True)),
    )


@functools.cache
def _geometry(data: bytes) -> KVGeometry | None:
    """One object per geometry, so that equal ones are found by identity. None: the group has none to tell."""
    kv = types_pb2.KVGeometry.FromString(data)
    if not kv.num_layers:
        return None
    return KVGeometry(kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.block_size_tokens, kv.dtype, kv.window_tokens, tuple(kv.sliding))
