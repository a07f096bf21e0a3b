"""All pools of the router: reconciles links with what the directory says, and hands waiting requests to free prefill groups (late binding).

One object per router, on one event loop. Tickets come from `dispatch.py`; links tell of changes; `_pump` joins the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable

from cluster.cost_model import PoolSpec
from cluster.profile import Profile
from cluster.router.decode_link import DecodeLink
from cluster.router.directory import Directory
from cluster.router.groups import GroupLink, Liveness, PrefillLink
from cluster.router.pool import DecodePool, MovedOn, Pool, PoolSet, PrefillPool, Waiter, spec_of
from cluster.router.queue import QueueLimits, Ticket
from cluster.router.retry_budget import RetryBudget, RetryLimits
from common.errors import LayoutMismatch
from common.kv_layout import check_join
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
        self.not_joinable: dict[tuple[str, str], str] = {}
        self.router_id = router_id
        self._limits = limits
        self._wire = wire
        self._liveness = liveness
        self._retry = retry
        self._health_changed = asyncio.Event()
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
        listed = {group.group: group for group in group_set.groups if group.incarnation not in dead}
        for pool in self.set.all():
            for name, link in list(pool.links.items()):
                if link.description.incarnation in dead:
                    link.lose("its processes are gone")
                elif name in listed and listed[name].incarnation != link.description.incarnation:
                    link.lose("it was replaced")
                link.is_listed = name in listed
                if link.lost is not None or (link.is_idle and not link.is_listed):
                    del pool.links[name]
                    self._close(link)
            pool.forget_health()
        for description in listed.values():
            known = self.set.of_role(description.role).get(description.pool)
            if known is None or description.group not in known.links:
                self._add_link(description)

    async def close(self) -> None:
        for pool in self.set.all():
            for link in pool.links.values():
                self._close(link)
        await asyncio.gather(*self._closing)

    def _add_pool(self, role: types_pb2.Role, spec: PoolSpec) -> None:
        if role == types_pb2.ROLE_PREFILL:
            self.set.prefill[spec.name] = PrefillPool(spec, self.profile, self._budget(), self._limits)
        else:
            self.set.decode[spec.name] = DecodePool(spec, self.profile, self._budget())

    def _budget(self) -> RetryBudget:
        return RetryBudget(self._retry.ratio, self._retry.burst)

    def _add_link(self, description: types_pb2.GroupDescription) -> None:
        named = self.set.find(description.pool)
        spec = spec_of(description, named.spec.usd_per_gpu_hour if named is not None else self._usd_per_gpu_hour)
        role = description.role
        if self.set.of_role(role).get(spec.name) is None:
            self._add_pool(role, spec)
        pool = self.set.of_role(role)[spec.name]

        def on_change() -> None:
            pool.forget_health()
            self.room_may_be(pool)

        link: GroupLink
        if role == types_pb2.ROLE_PREFILL:
            link = PrefillLink(description, on_change, pool.may_rest, self._liveness, self._wire)
        else:
            link = DecodeLink(description, self.router_id, on_change, pool.may_rest, self._liveness, self._wire)
        pool.take_spec(spec, self.profile)
        pool.links[description.group] = link
        pool.forget_health()
        link.start()
        self._check_joins()
        logger.info("group %s of pool %s at %s", description.group, description.pool, description.address)

    def _check_joins(self) -> None:
        self.not_joinable = {}
        for prefill in self.set.prefill.values():
            for decode in self.set.decode.values():
                src, dst = prefill.spec, decode.spec
                if src.kv is None or dst.kv is None:
                    continue
                try:
                    check_join(src.kv, src.tp, dst.kv, dst.tp)
                except LayoutMismatch as exc:
                    self.not_joinable[src.name, dst.name] = exc.message

    def _close(self, link: GroupLink) -> None:
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def wait_for_change(self) -> None:
        """Until the health or load of any group has changed."""
        await self._health_changed.wait()

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
        if pool.front is None:
            pool.front = key
        pool.front_may_ask = False
        asyncio.get_running_loop().call_later(ROOM_RETRY_S, self.room_may_be, pool)

    def leave_front(self, key: object) -> None:
        """`key` has room, or no longer wants any."""
        for pool in self.set.decode.values():
            if pool.front is key:
                pool.front = None
                self.schedule_pump()

    def _pump_all(self) -> None:
        self._pump_due = False
        now_s = asyncio.get_running_loop().time()
        for pool in self.set.prefill.values():
            if len(pool.queue):
                self._pump(pool, now_s)

    def _pump(self, pool: PrefillPool, now_s: float) -> None:
        if not pool.healthy():
            self._send_elsewhere(pool)
        while free := [link for link in pool.healthy() if link.free_credits > 0]:
            ticket = pool.queue.pop(now_s, functools.partial(self._is_blocked, {link.description.incarnation for link in free}))
            if ticket is None:
                return
            assert isinstance(ticket, Waiter)
            if ticket.granted.done():
                continue  # its owner has gone and will not come back for it
            link = min(
                (x for x in free if x.description.incarnation not in ticket.avoid), key=lambda x: (-x.free_credits, x.busy_ms(now_s))
            )
            link.give(ticket, ticket.service_ms)
            ticket.granted.set_result(link)

    def _is_blocked(self, free: set[int], ticket: Ticket) -> bool:
        """Whether none of the free groups will do, or the decode pool of the ticket has another request at its front."""
        assert isinstance(ticket, Waiter)
        decode = self.set.decode.get(ticket.decode_pool)
        return free <= ticket.avoid or not (decode is None or decode.lets(ticket.owner))

    def _send_elsewhere(self, pool: PrefillPool) -> None:
        """No group is left: whoever waits here chooses again."""
        for ticket in pool.queue.drain():
            assert isinstance(ticket, Waiter)
            if not ticket.granted.done():
                ticket.granted.set_exception(MovedOn(f"pool {pool.spec.name} has no healthy group"))
