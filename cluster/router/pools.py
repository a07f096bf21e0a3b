"""All pools of the router: reconciles links with what the directory says, and hands waiting requests to free prefill groups (late binding).

One object per router, on one event loop. Tickets come from `dispatch.py`; links tell of changes; `_pump` joins the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from cluster.cost_model import PoolSpec
from cluster.profile import Profile
from cluster.router.decode_link import DecodeLink
from cluster.router.directory import Directory
from cluster.router.groups import GroupLink, Liveness, PrefillLink
from cluster.router.pool import DecodePool, MovedOn, Pool, PoolSet, PrefillPool, spec_of
from cluster.router.queue import QueueLimits
from cluster.router.retry_budget import RetryLimits
from cluster.router.waiter import Waiter
from common.proto import control_pb2, types_pb2
from common.wire import PLAIN, Wire

logger = logging.getLogger(__name__)

ROOM_RETRY_S = 0.25  # a decode pool without room is asked again after this long, and whenever something on it ends


class Pools:
    def __init__(
        self,
        profile: Profile,
        specs: Iterable[tuple[types_pb2.Role, PoolSpec]],
        *,
        router_id: str,
        limits: QueueLimits,
        liveness: Liveness,
        retry: RetryLimits,
        usd_per_gpu_hour: float = 3.0,
        wire: Wire = PLAIN,
    ):
        """`specs`: (role, spec) of the pools in the config; a pool that only the directory knows is priced at `usd_per_gpu_hour`."""
        self.profile = profile
        self.set = PoolSet()
        self.router_id = router_id
        self._limits = limits
        self._wire = wire
        self._liveness = liveness
        self._retry = retry
        self._health_changed = asyncio.Event()
        self._waking: frozenset[types_pb2.Role] = frozenset()
        self._sleepers = 0
        self._has_sleeper = asyncio.Event()
        self._usd_per_gpu_hour = usd_per_gpu_hour
        self._pump_due = False
        self._closing: set[asyncio.Task] = set()
        for role, spec in specs:
            self._add_pool(role, spec)

    # -- groups ------------------------------------------------------------------------------------------------------------------------

    async def follow(self, directory: Directory) -> None:
        """Keeps the links as the directory says. Runs until cancelled."""
        async with contextlib.aclosing(directory.watch()) as sets:
            async for group_set in sets:
                self.apply(group_set)

    def apply(self, group_set: control_pb2.GroupSet) -> None:
        dead = set(group_set.dead_incarnations)
        self._waking = frozenset(group_set.waking)
        listed = {group.group: group for group in group_set.groups if group.incarnation not in dead}
        for pool in self.set.all():
            for name, link in list(pool.links.items()):
                if link.description.incarnation in dead:
                    link.lose("its processes are gone")
                elif name in listed and listed[name].incarnation != link.description.incarnation:
                    link.lose("it was replaced")
                link.is_listed = name in listed
                if link.lost is not None or (link.is_idle and not link.is_listed):
                    pool.remove(link)
                    self._close(link)
                else:
                    pool.refresh(link)
        known = {name for pool in self.set.all() for name in pool.links}
        for description in listed.values():
            if description.group not in known:
                self._add_link(description)
        self.set.settle()

    async def close(self) -> None:
        for pool in self.set.all():
            for link in pool.links.values():
                self._close(link)
        await asyncio.gather(*self._closing)

    def _add_pool(self, role: types_pb2.Role, spec: PoolSpec) -> Pool:
        return self.set.add(role, spec, self.profile, self._limits, self._retry)

    def _add_link(self, description: types_pb2.GroupDescription) -> None:
        named = self.set.find(description.pool)
        spec = spec_of(description, named.spec.usd_per_gpu_hour if named is not None else self._usd_per_gpu_hour)
        role = description.role
        pool = self.set.pool_for(role, spec) or self._add_pool(role, self.set.variant_of(role, spec))
        link: GroupLink

        def on_change() -> None:
            pool.refresh(link)
            self.room_may_be(pool)

        if role == types_pb2.ROLE_PREFILL:
            link = PrefillLink(description, on_change, pool.may_rest, self._liveness, self._wire)
        else:
            link = DecodeLink(description, self.router_id, on_change, pool.may_rest, self._liveness, self._wire)
        if pool.take_spec(replace(spec, name=pool.spec.name), self.profile):
            self.set.changed()
        pool.add(link)
        link.start()
        logger.info("group %s of pool %s at %s", description.group, description.pool, description.address)

    def _close(self, link: GroupLink) -> None:
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # -- pools that sleep --------------------------------------------------------------------------------------------------------------

    def waiting_for(self, role: types_pb2.Role) -> int:
        """Requests that wait because no group of the role can take anything."""
        return self._sleepers if not self._has_group(role) else 0

    def may_wake(self) -> bool:
        """Whether every role without a group gets one as soon as somebody asks."""
        lacking = {role for role in (types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE) if not self._has_group(role)}
        return bool(lacking) and lacking <= self._waking

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """A request waits for a group to appear."""
        self._sleepers += 1
        self._has_sleeper.set()
        try:
            yield
        finally:
            self._sleepers -= 1
            if not self._sleepers:
                self._has_sleeper.clear()

    async def wait_for_sleeper(self) -> None:
        """Until some request waits for a group to appear."""
        await self._has_sleeper.wait()

    def _has_group(self, role: types_pb2.Role) -> bool:
        return any(pool.is_open and pool.order for pool in self.set.of_role(role).values())

    async def wait_for_change(self) -> None:
        """Until the health or load of any group has changed."""
        await self._health_changed.wait()

    def of_other_versions(self, kv_version: str) -> frozenset[int]:
        """Incarnations whose checkpoint or KV format is another; none if the version is empty."""
        links = (link for pool in self.set.all() for link in pool.links.values()) if kv_version else ()
        return frozenset(link.incarnation for link in links if link.description.kv_version != kv_version)

    def longest_tokens(self) -> int:
        """Most tokens of prompt and output that a decode group seen so far can hold; 0 if none was seen."""
        return max((pool.spec.longest_tokens for pool in self.set.decode.values() if pool.spec.capacity_tokens), default=0)

    # -- late binding ------------------------------------------------------------------------------------------------------------------

    def schedule_pump(self) -> None:
        """Soon, and once however often it is asked for."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump_all)

    def room_may_be(self, pool: Pool) -> None:
        """Something changed on a pool: waiting requests may find a place; a decode pool's front request may ask for room again."""
        if isinstance(pool, DecodePool) and pool.front is not None:
            pool.front_may_ask = True
        changed, self._health_changed = self._health_changed, asyncio.Event()
        changed.set()
        self.schedule_pump()

    def no_room(self, pool: DecodePool, key: object) -> None:
        """`key` found no room on any group of the pool."""
        pool.no_room(key)
        asyncio.get_running_loop().call_later(ROOM_RETRY_S, self.room_may_be, pool)

    def leave_front(self, key: object) -> None:
        """`key` has room, or no longer wants any."""
        if any([pool.leave_front(key) for pool in self.set.decode.values()]):
            self.schedule_pump()

    def _pump_all(self) -> None:
        self._pump_due = False
        now_s = asyncio.get_running_loop().time()
        for pool in self.set.prefill.values():
            if pool.queue and not pool.order:
                self._send_elsewhere(pool)
            for ticket, link in pool.bind(now_s, self.set.decode):
                assert isinstance(ticket, Waiter)
                ticket.granted.set_result(link)

    def _send_elsewhere(self, pool: PrefillPool) -> None:
        """No group is left: whoever waits here chooses again."""
        for ticket in pool.queue.drain():
            assert isinstance(ticket, Waiter)
            if not ticket.granted.done():
                ticket.granted.set_exception(MovedOn(f"pool {pool.spec.name} has no healthy group"))
