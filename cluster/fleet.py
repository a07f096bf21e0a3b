"""All groups that run: starts, adopts and supervises them, and remembers who died and what failed.

Owned by `controller.py`, on its event loop. Decides nothing: `reconcile.py` says what to start and what to drain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from cluster.controller_metrics import ControllerMetrics
from cluster.death_news import DeathNews
from cluster.group import Group, GroupState
from cluster.placement import Place, find_ranks, remove_leftovers
from cluster.reconcile import GroupView, Phase
from cluster.specs import fingerprint_of, plan_group, security_of
from common.config import Config, PoolNode
from common.proto import control_pb2, types_pb2
from common.wire import Wire

logger = logging.getLogger(__name__)
RETRY_S = (2.0, 30.0)  # pause after a group failed to start: the first time, and at most
KEPT_DEAD = 256
TAKEOVER_S = 30.0  # a router that has not found a ready group by then does not hold up the others


class Fleet:
    """`actor_class`: of the rank actors; `on_change` is called whenever a group enters another state."""

    wire: Wire  # from `adopt` on

    def __init__(self, namespace: str, device: str, actor_class: type, metrics: ControllerMetrics, on_change: Callable[[], None]):
        self.groups: dict[str, Group] = {}
        self.errors: dict[str, str] = {}  # by pool: why its last group ended, until one is ready again
        self._namespace = namespace
        self._device = device
        self._actor_class = actor_class
        self._metrics = metrics
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task] = {}
        self._dead: deque[int] = deque(maxlen=KEPT_DEAD)
        self._news: DeathNews | None = None
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    async def adopt(self, config: Config, key: bytes) -> None:
        """Takes over the whole groups of the namespace and removes what is left of others.

        `key`: to sign with, unless the configuration names a file or groups that run sign with another
        Raises: ConfigError if a file of the configuration can't be read
        """
        pools = {pool.name: pool for pool in config.pools}
        whole = {name: (found, actors) for name, (found, actors) in (await find_ranks(self._namespace)).items() if found is not None}
        for found, _ in whole.values():
            key = found.spec.key
        self.wire = Wire(security_of(config), key)
        for name, (found, actors) in whole.items():
            labels = pools[found.spec.pool].node_labels if found.spec.pool in pools else {}
            place = Place(self._namespace, name, found.spec.tp, found.spec.device, labels)
            self._supervise(Group.adopt(found, place, actors, self.wire, config.cluster.drain_grace_s, self._on_change), config)
        if self.groups:
            logger.info("adopted %d groups: %s", len(self.groups), ", ".join(self.groups))
        removed = await asyncio.to_thread(remove_leftovers, self._namespace, set(self.groups))
        if removed:
            logger.warning("removed what was left of %d groups", removed)
        self._news = DeathNews(self.wire)

    def start(self, config: Config, pool: PoolNode, kv_version: str) -> Group:
        spec = plan_group(config, pool, self.wire.keys.current(), device=self._device, kv_version=kv_version)
        place = Place(self._namespace, spec.group, spec.tp, spec.device, pool.node_labels)
        group = Group(spec, place, fingerprint_of(spec, pool), self.wire, config.cluster.drain_grace_s, self._on_change)
        self._metrics.launched(pool.name)
        self._supervise(group, config)
        return group

    def fingerprints(self, config: Config, kv_version: str) -> dict[str, str]:
        """By pool: what a group that is started now would have."""
        return {
            pool.name: fingerprint_of(plan_group(config, pool, b"", device=self._device, kv_version=kv_version), pool)
            for pool in config.pools
        }

    def views(self, fingerprints: Mapping[str, str], is_used: Callable[[str], bool]) -> list[GroupView]:
        """`is_used`: whether routers have found a group. A newer one that they have not still starts, as far as it is to stand in for an
        older one; see `TAKEOVER_S`."""
        return [self._view(group, fingerprints.get(group.spec.pool), is_used) for group in self.groups.values()]

    def _view(self, group: Group, fingerprint: str | None, is_used: Callable[[str], bool]) -> GroupView:
        is_stale = group.is_condemned or group.fingerprint != fingerprint
        is_new = group.phase is Phase.READY and not is_stale and time.monotonic() - group.ready_since_s < TAKEOVER_S
        return GroupView(
            name=group.name,
            pool=group.spec.pool,
            phase=Phase.STARTING if is_new and not is_used(group.name) else group.phase,
            gpus=group.spec.tp,
            version=group.spec.kv_version,
            is_stale=is_stale,
            running=group.load.running + group.load.waiting + group.load.transfers,
        )

    def stale(self, fingerprints: Mapping[str, str]) -> list[str]:
        """Names of groups that are to be replaced."""
        return [view.name for view in self.views(fingerprints, lambda group: True) if view.is_stale]

    def ready(self) -> Counter[str]:
        """Groups that serve, by pool."""
        return Counter(group.spec.pool for group in self.groups.values() if group.phase is Phase.READY)

    def may_start(self, pool: str) -> bool:
        return time.monotonic() >= self._not_before.get(pool, 0.0)

    def listed(self) -> control_pb2.GroupSet:
        """What routers are told: groups that take new work."""
        ready = [g.description for g in self.groups.values() if g.phase is Phase.READY and g.description]
        return control_pb2.GroupSet(groups=ready, dead_incarnations=self._dead)

    def tell_deaths(self) -> None:
        """To every decode group that runs, also one that drains."""
        assert self._news is not None
        serving: list[types_pb2.GroupDescription] = [g.description for g in self.groups.values() if g.description is not None]
        self._news.tell(serving)

    async def close(self, timeout_s: float) -> None:
        """Ends every group, the last ones without mercy."""
        for group in self.groups.values():
            group.hurry()
            group.leave("the cluster goes down")
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)
        if self._news is not None:
            await self._news.close()
        await asyncio.to_thread(remove_leftovers, self._namespace, set())

    def _supervise(self, group: Group, config: Config) -> None:
        self.groups[group.name] = group
        self._tasks[group.name] = asyncio.create_task(self._see_through(group, config))
        self._on_change()

    async def _see_through(self, group: Group, config: Config) -> None:
        node, pool = config.cluster, group.spec.pool
        await group.run(node.place_timeout_s, node.start_timeout_s, node.health_timeout_s, self._actor_class)
        if group.is_proved_dead:
            self._dead.append(group.spec.incarnation)
            if self._news is not None:
                self._news.died(group.spec.incarnation)
        del self.groups[group.name], self._tasks[group.name]
        if group.error is not None:
            self.errors[pool] = group.error
            self._metrics.failed(pool, group.failed_in)
            if group.failed_in is not GroupState.READY:
                self._failures[pool] = self._failures.get(pool, 0) + 1
                self._not_before[pool] = time.monotonic() + min(RETRY_S[0] * 2 ** (self._failures[pool] - 1), RETRY_S[1])
        self._on_change()

    def note_ready(self) -> None:
        """A pool with a group that serves has no error to show any more."""
        for group in self.groups.values():
            if group.state is GroupState.READY:
                self.errors.pop(group.spec.pool, None)
                self._failures.pop(group.spec.pool, None)
