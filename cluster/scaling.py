"""Runs the autoscaler: from what routers report to the groups that are wanted, every `autoscale.interval_s`, and keeps what it decided.

Owned by `controller.py`, on its event loop. The decision itself is pure (`autoscaler/decide.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from cluster.autoscaler.decide import decide
from cluster.autoscaler.from_config import policy_of
from cluster.autoscaler.types import PoolState, State
from cluster.controller_metrics import ControllerMetrics
from cluster.demand import Demand
from cluster.fleet import Fleet
from cluster.goals import Goals
from common.config import PoolNode
from common.proto import control_pb2, types_pb2

logger = logging.getLogger(__name__)
KEPT_CHANGES = 64
BY_LOAD = "load"
_ROLES = {"prefill": types_pb2.ROLE_PREFILL, "decode": types_pb2.ROLE_DECODE}


class Scaling:
    """`changes`: the latest, oldest first."""

    def __init__(self, goals: Goals, fleet: Fleet, metrics: ControllerMetrics, on_change: Callable[[], None]):
        self.changes: deque[control_pb2.ScaleChange] = deque(maxlen=KEPT_CHANGES)
        self._goals = goals
        self._fleet = fleet
        self._metrics = metrics
        self._on_change = on_change
        self._demand = Demand()
        self._state: State = {}
        self._next_s = 0.0

    def report(self, report: control_pb2.LoadReport) -> None:
        """One router's load. A request that waits for a pool that sleeps does not wait for the next turn."""
        if self._demand.report(report, asyncio.get_running_loop().time()) and self.waking():
            self._next_s = 0.0
            self._on_change()

    def is_used(self, group: str) -> bool:
        """Whether routers have found the group, so that it can stand in for another."""
        return self._demand.is_used(group, asyncio.get_running_loop().time())

    def waking(self) -> list[types_pb2.Role]:
        """Roles that have no ready group and get one as soon as somebody asks."""
        config, ready = self._goals.config, self._fleet.ready()
        if config.autoscale.mode != "on":
            return []
        asleep = {_ROLES[pool.role] for pool in config.pools if self._may_wake(pool)}
        return sorted(asleep - {_ROLES[pool.role] for pool in config.pools if ready[pool.name]})

    def turn(self, now_s: float) -> None:
        """Decides, if it is time to."""
        goals = self._goals
        config = goals.config
        if config.autoscale.mode == "off" or now_s < self._next_s:
            return
        self._next_s = now_s + config.autoscale.interval_s
        is_dry = config.autoscale.mode == "dry_run"
        state = self._state if is_dry and self._state else self._at(goals.wanted)
        ready = self._fleet.ready()
        seen = self._demand.observe({pool.name: ready[pool.name] for pool in config.pools}, now_s)
        decision = decide(policy_of(config, goals.pinned), state, seen, now_s)
        self._state = decision.state
        for change in decision.changes:
            words = "would change" if is_dry else "changes"
            logger.info("pool %s %s from %d to %d groups: %s", change.pool, words, change.before, change.after, change.reason)
            self.changes.append(
                control_pb2.ScaleChange(
                    pool=change.pool,
                    before=change.before,
                    after=change.after,
                    reason=change.reason,
                    unix_s=time.time(),
                    dry_run=is_dry,
                )
            )
            if not is_dry:
                self._metrics.scaled(change.pool, change.before, change.after, BY_LOAD)
        if decision.changes and not is_dry:
            goals.want(dict(decision.wanted))
            self._on_change()

    def _at(self, wanted: dict[str, int]) -> State:
        """The state with what is wanted now: an operator may have set it."""
        return {name: replace(self._state.get(name, PoolState(count)), wanted=count) for name, count in wanted.items()}

    def _may_wake(self, pool: PoolNode) -> bool:
        return pool.replicas.min == 0 and self._goals.pinned.get(pool.name, 1) > 0
