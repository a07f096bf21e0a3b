"""One pool as the router sees it: its groups in order, operator state, queue or front, and what it has learnt.

State with a few rules of its own and no I/O: `pools.py` keeps it up to date over gRPC, the simulator by its own clock; `board.py` describes
it to the choice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from cluster.correction import Correction, Delay, SizeCorrection
from cluster.cost_model import PoolSpec, PreparedPool, prepare_decode, prepare_prefill
from cluster.profile import Profile
from cluster.router.books import CREDITS, DecodeBook, PrefillBook
from cluster.router.choice import Exclusion, Out, spread
from cluster.router.queue import PrefillQueue, QueueLimits, Ticket, wait_until_free_ms
from cluster.router.ranking import Ranking
from cluster.router.retry_budget import RetryBudget, RetryLimits
from common.errors import LayoutMismatch
from common.kv_layout import KVGeometry, check_join
from common.proto import router_pb2, types_pb2

DEFAULT_RETRY = RetryLimits()


class MovedOn(Exception):
    """The pool that a request waits for can't take it now: choose anew."""


class Group(Protocol):
    """One replica, as far as a pool cares. `can_take`: whether new requests may go there."""

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def is_listed(self) -> bool: ...
    @property
    def lost(self) -> object: ...
    @property
    def is_healthy(self) -> bool: ...
    @property
    def can_take(self) -> bool: ...


class PrefillGroup(Group, Protocol):
    book: PrefillBook


class DecodeGroup(Group, Protocol):
    book: DecodeBook


Link = TypeVar("Link", bound=Group)
PrefillT = TypeVar("PrefillT", bound=PrefillGroup)
DecodeT = TypeVar("DecodeT", bound=DecodeGroup)


class Pool(Generic[Link]):
    """What both roles share. `links`: all groups by name; `order`: those that may get new requests, the next to get one first.

    Whoever changes a group calls `refresh`; `version` counts all changes that an offer of the pool depends on, but those of its queue.
    """

    def __init__(self, spec: PoolSpec, role: types_pb2.Role, prepared: PreparedPool, retries: RetryBudget):
        self.retries = retries
        self.spec = spec
        self.role = role
        self.prepared = prepared
        self.state = router_pb2.POOL_STATE_ACTIVE
        self.links: dict[str, Link] = {}
        self.order: Ranking[Link] = Ranking()
        self.version = 0
        self.learnt = 0

    @property
    def is_open(self) -> bool:
        return self.state == router_pb2.POOL_STATE_ACTIVE

    def set_state(self, state: router_pb2.PoolState) -> None:
        self.state = state
        self.version += 1

    def has_learnt(self) -> None:
        """A correction has moved."""
        self.learnt += 1
        self.version += 1

    def may_rest(self) -> bool:
        """Whether a group that fails can be spared: at least half of those listed must still take requests without it."""
        listed = [link for link in self.links.values() if link.is_listed and link.lost is None]
        return 2 * (sum(link.can_take for link in listed) - 1) >= len(listed)

    def add(self, link: Link) -> None:
        self.links[link.name] = link
        self.refresh(link)

    def remove(self, link: Link) -> None:
        del self.links[link.name]
        self.order.discard(link)
        self.version += 1

    def refresh(self, link: Link) -> None:
        """Health or load of a group may have changed."""
        if link.can_take and self.links.get(link.name) is link:
            self.order.put(link, self._rank(link))
        else:
            self.order.discard(link)
        self.version += 1

    def without(self, avoid: frozenset[int]) -> list[Link]:
        """Those that may get new requests, in order, but for these incarnations."""
        return [link for link in self.order if link.incarnation not in avoid]

    def take_spec(self, spec: PoolSpec, profile: Profile) -> bool:
        """A group says what it is. The pool is as large as its smallest group. Returns: whether that is news"""
        if self.links and self.spec.capacity_tokens:
            spec = replace(spec, capacity_tokens=min(spec.capacity_tokens, self.spec.capacity_tokens))
        if spec == self.spec:
            return False
        self.spec = spec
        self.prepared = self._prepare(profile, spec)
        return True

    def rename(self, name: str) -> None:
        self.spec = replace(self.spec, name=name)
        self.prepared = replace(self.prepared, spec=self.spec)

    def exclusion(self, num_links: int) -> Exclusion | None:
        """Why none of the groups that are left can be chosen, if so."""
        if num_links and self.is_open:
            return None
        draining = not self.is_open or any(link.is_healthy for link in self.links.values())
        return Exclusion(Out.DRAINING if draining else Out.UNHEALTHY, self.spec.name)

    def _rank(self, link: Link) -> tuple:
        raise NotImplementedError

    @staticmethod
    def _prepare(profile: Profile, spec: PoolSpec) -> PreparedPool:
        raise NotImplementedError


class PrefillPool(Pool[PrefillT]):
    def __init__(self, spec: PoolSpec, profile: Profile, retries: RetryBudget, limits: QueueLimits):
        super().__init__(spec, types_pb2.ROLE_PREFILL, prepare_prefill(profile, spec), retries)
        self.queue = PrefillQueue(limits)
        self.correction = SizeCorrection()
        self.dispatch = Delay()
        self.arrived_ms = 0.0  # predicted prefill time of all that chose this pool

    _prepare = staticmethod(prepare_prefill)

    def _rank(self, link: PrefillT) -> tuple:
        return link.book.rank()

    def is_idle(self) -> bool:
        """Whether nobody waits and a group has nothing to do."""
        return not self.queue and bool(self.order) and self.order.first().book.is_idle

    def wait_ms(self, links: Iterable[PrefillT], now_s: float, priority: int = 0) -> float:
        """Until a newcomer of this priority would start, if only these groups are there."""
        return wait_until_free_ms(sorted(link.book.busy_ms(now_s) for link in links), self.queue.ahead_ms(priority))

    def bind(self, now_s: float, decode: Mapping[str, DecodePool]) -> Iterator[tuple[Ticket, PrefillT]]:
        """Late binding: gives waiting tickets to groups with a free place until one or the other runs out. Tickets that need a decode pool
        with somebody else at its front stay in line."""

        def is_blocked(ticket: Ticket) -> bool:
            pool = decode.get(ticket.decode_pool)
            return self._next(ticket.avoid) is None or not (pool is None or pool.lets(ticket.owner))

        while self.queue and self._next() is not None:
            ticket = self.queue.pop(now_s, is_blocked)
            if ticket is None:
                return
            if ticket.is_given_up:
                continue  # its owner has gone and will not come back for it
            link = self._next(ticket.avoid)
            assert link is not None
            link.book.give(ticket, ticket.service_ms, now_s)
            self.refresh(link)
            yield ticket, link

    def _next(self, avoid: frozenset[int] = frozenset()) -> PrefillT | None:
        """The best group with a free place."""
        for link in self.order:
            if len(link.book.given) < CREDITS and link.incarnation not in avoid:
                return link
        return None


class DecodePool(Pool[DecodeT]):
    """`expected`: prompt tokens of requests that chose this pool and have no group yet. `front`: the request that found no room; until it
    has some (or is gone), nobody else of this router may ask, so that small requests do not starve a big one."""

    def __init__(self, spec: PoolSpec, profile: Profile, retries: RetryBudget):
        super().__init__(spec, types_pb2.ROLE_DECODE, prepare_decode(profile, spec), retries)
        self.itl = Correction()
        self.transfer = Correction()
        self.expected: dict[object, int] = {}
        self.expected_tokens = 0
        self.front: object | None = None
        self.front_may_ask = False

    _prepare = staticmethod(prepare_decode)

    def _rank(self, link: DecodeT) -> tuple:
        return link.book.rank()

    def expect(self, key: object, prompt_tokens: int) -> None:
        self.forget(key)
        self.expected[key] = prompt_tokens
        self.expected_tokens += prompt_tokens
        self.version += 1

    def forget(self, key: object) -> None:
        tokens = self.expected.pop(key, None)
        if tokens is not None:
            self.expected_tokens -= tokens
            self.version += 1

    def lets(self, key: object) -> bool:
        """Whether this request may ask for room now."""
        return self.front is None or (self.front is key and self.front_may_ask)

    def no_room(self, key: object) -> None:
        """`key` found no room on any group of the pool."""
        if self.front is None:
            self.front = key
        self.front_may_ask = False
        self.version += 1

    def leave_front(self, key: object) -> bool:
        """`key` has room, or no longer wants any. Returns: whether the front is free for another now"""
        if self.front is not key:
            return False
        self.front = None
        self.version += 1
        return True

    def blocks_for(self, tokens: int) -> int:
        return self.spec.kv.blocks_for(tokens) if self.spec.kv is not None else 0

    def by_room(self, worst_tokens: int, seed: int, avoid: frozenset[int] = frozenset()) -> Iterator[DecodeT]:
        """Groups with room first, then the least loaded; the equal best ones turned by the seed so that they take turns."""
        links = self.order.items()
        if links:
            equal = self.order.num_equal()
            shift = spread(seed, equal)
            links[:equal] = links[shift:equal] + links[:shift]
        blocks = self.blocks_for(worst_tokens)
        full = []
        for link in links:
            if link.incarnation in avoid:
                continue
            if link.book.has_room(blocks):
                yield link
            else:
                full.append(link)
        yield from full


@dataclass
class PoolSet:
    """All pools by name, per role. `version` counts pools that came or changed what they are made of; see `changed`."""

    prefill: dict[str, PrefillPool] = field(default_factory=dict)
    decode: dict[str, DecodePool] = field(default_factory=dict)
    not_joinable: dict[tuple[str, str], str] = field(default_factory=dict)  # (prefill pool, decode pool) -> reason
    version: int = 0

    def all(self) -> list[Pool]:
        return [*self.prefill.values(), *self.decode.values()]

    def of_role(self, role: types_pb2.Role) -> Mapping[str, Pool]:
        return self.prefill if role == types_pb2.ROLE_PREFILL else self.decode

    def find(self, name: str) -> Pool | None:
        return self.prefill.get(name) or self.decode.get(name)

    def pool_for(self, role: types_pb2.Role, spec: PoolSpec) -> Pool | None:
        """The pool of this name whose groups can be alike: same KV version, or no group yet."""
        mine = [pool for name, pool in self.of_role(role).items() if base_name(name) == spec.name]
        alike = [pool for pool in mine if pool.links and pool.spec.kv_version == spec.kv_version]
        return next(iter([*alike, *(pool for pool in mine if not pool.links)]), None)

    def variant_of(self, role: types_pb2.Role, spec: PoolSpec) -> PoolSpec:
        """The spec under a name that is free: NAME, or NAME@VERSION beside groups of another KV version, while one replaces the other."""
        return replace(spec, name=f"{spec.name}@{spec.kv_version}") if spec.name in self.of_role(role) else spec

    def settle(self) -> None:
        """Once one of two versions of a pool has no group any more, the other bears the name alone."""
        self._settle(self.prefill)
        self._settle(self.decode)

    def _settle(self, pools: dict[str, Any]) -> None:
        for name in [name for name in pools if name != base_name(name)]:
            base, variant = pools[base_name(name)], pools[name]
            stays, goes = (base, variant) if base.links else (variant, base)
            if goes.links or (isinstance(goes, PrefillPool) and goes.queue):
                continue
            if isinstance(goes, PrefillPool):
                stays.arrived_ms += goes.arrived_ms
            stays.rename(base.spec.name)
            stays.set_state(base.state)
            del pools[name]
            pools[base_name(name)] = stays
            self.changed()

    def add(self, role: types_pb2.Role, spec: PoolSpec, profile: Profile, limits: QueueLimits, retry: RetryLimits = DEFAULT_RETRY) -> Pool:
        pool: Pool
        retries = RetryBudget(retry.ratio, retry.burst)
        if role == types_pb2.ROLE_PREFILL:
            pool = self.prefill[spec.name] = PrefillPool(spec, profile, retries, limits)
        else:
            pool = self.decode[spec.name] = DecodePool(spec, profile, retries)
        self.changed()
        return pool

    def changed(self) -> None:
        """To be called when a pool's spec has changed."""
        self.version += 1
        self.not_joinable = {}
        for prefill in self.prefill.values():
            for decode in self.decode.values():
                src, dst = prefill.spec, decode.spec
                if src.kv_version != dst.kv_version and src.kv_version and dst.kv_version:
                    self.not_joinable[src.name, dst.name] = f"KV versions differ: {src.kv_version}, {dst.kv_version}"
                    continue
                if src.kv is None or dst.kv is None:
                    continue
                try:
                    check_join(src.kv, src.tp, dst.kv, dst.tp)
                except LayoutMismatch as exc:
                    self.not_joinable[src.name, dst.name] = exc.message


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
        kv_version=description.kv_version,
    )


def base_name(name: str) -> str:
    """Of a pool, without the version that `variant_of` adds. Names in a configuration are DNS labels, so they have no `@`."""
    return name.partition("@")[0]


@functools.cache
def _geometry(data: bytes) -> KVGeometry | None:
    """One object per geometry, so that equal ones are found by identity. None: the group has none to tell."""
    kv = types_pb2.KVGeometry.FromString(data)
    if not kv.num_layers:
        return None
    return KVGeometry(kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.block_size_tokens, kv.dtype, kv.window_tokens, tuple(kv.sliding))
