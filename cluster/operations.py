"""What routers and operators may ask of the controller: `tandem.control.v1.Directory`.

Translates between messages and goals; `controller.py` makes them come true. Made by it, on its event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter

from cluster.changes import Changes
from cluster.check import check_pools
from cluster.controller_metrics import ControllerMetrics, Target, group_target
from cluster.fleet import Fleet
from cluster.goals import Goals
from cluster.nodes import close_nodes, find_nodes, groups_on
from cluster.reconcile import Phase
from cluster.scaling import Scaling
from common.access import Role
from common.config import Config, parse_config
from common.errors import ConfigError, ServingError
from common.proto import control_pb2, control_pb2_grpc, types_pb2
from common.server_thread import abort_with

logger = logging.getLogger(__name__)
WATCH_S = 1.0
BY_HAND = "by hand"
NODE_DRAINS = "its node drains"
NEEDS = {"Status": Role.OPERATOR, "Scale": Role.OPERATOR, "Drain": Role.OPERATOR, "Rollout": Role.OPERATOR}
FIXED_KEYS = ("ray_address", "controller_listen", "device", "key_file")  # of `cluster`: a running cluster can't change them


class Operations(control_pb2_grpc.DirectoryServicer):
    """`metrics_address`: of the controller's own metrics, set once they are served."""

    def __init__(self, goals: Goals, fleet: Fleet, scaling: Scaling, changes: Changes, metrics: ControllerMetrics):
        self.metrics_address = ""
        self._goals = goals
        self._fleet = fleet
        self._scaling = scaling
        self._changes = changes
        self._metrics = metrics
        self._routers: dict[str, str] = {}  # router id -> host:port of its metrics, while it watches
        self._waits_for = ""
        self._is_closed = False

    def say_waits_for(self, reason: str) -> None:
        """Why something that is wanted is not done now; empty if nothing is held up."""
        if reason and reason != self._waits_for:
            logger.info("held up: %s", reason)
        self._waits_for = reason

    def close(self) -> None:
        """Every watcher's stream ends."""
        self._is_closed = True
        self._changes.note()

    def targets(self) -> list[Target]:
        """Every process of the cluster that serves metrics and is known here."""
        own = Target(self.metrics_address, {"process": "controller"})
        routers = [Target(address, {"process": "router"}) for address in self._routers.values()]
        return [own, *routers, *(group_target(g.description) for g in self._fleet.groups.values() if g.description)]

    # -- RPCs --------------------------------------------------------------------------------------------------------------------------

    async def Watch(self, request, context):
        """The whole set at once, at each change, and every second."""
        if request.metrics_address:
            self._routers[request.router_id] = request.metrics_address
        try:
            while not self._is_closed:
                seen = self._changes.version
                group_set = self._fleet.listed()
                group_set.version = seen
                group_set.waking.extend(self._scaling.waking())
                yield group_set
                await self._changes.wait(seen, WATCH_S)
        finally:
            self._routers.pop(request.router_id, None)

    async def Status(self, request, context):
        goals, fleet = self._goals, self._fleet
        stale = set(self._stale())
        return control_pb2.StatusReply(
            pools=[self._pool_status(name) for name in goals.pools],
            groups=[
                control_pb2.GroupStatus(
                    pool=group.spec.pool,
                    group=name,
                    state=group.state.value,
                    tp=group.spec.tp,
                    detail=group.detail,
                    stale=name in stale,
                    load=group.load,
                )
                for name, group in fleet.groups.items()
            ],
            changes=self._scaling.changes,
            gpus_held=sum(group.spec.tp for group in fleet.groups.values()),
            gpu_budget=goals.config.autoscale.gpu_budget,
            waits_for=self._waits_for,
        )

    async def Scale(self, request, context):
        before = self._goals.wanted.get(request.pool, 0)
        try:
            if request.automatic:
                replicas = self._goals.unpin(request.pool)
            else:
                self._goals.pin(request.pool, request.replicas)
                replicas = request.replicas
        except ServingError as exc:
            await abort_with(context, exc)
        self._metrics.scaled(request.pool, before, replicas, BY_HAND)
        logger.info("pool %s is set to %s by hand", request.pool, "automatic" if request.automatic else replicas)
        self._changes.note()
        return control_pb2.ScaleReply(replicas=replicas)

    async def Drain(self, request, context):
        target, groups = request.target, self._fleet.groups
        if target in groups:
            if request.now or groups[target].phase is not Phase.READY:
                groups[target].leave("drained by hand")
            groups[target].is_condemned = True
            self._changes.note()
            return control_pb2.DrainReply(groups=[target])
        try:
            if target not in self._goals.pools:
                return control_pb2.DrainReply(groups=await self._drain_node(target))
            before = self._goals.wanted[target]
            self._goals.pin(target, 0)
        except ServingError as exc:
            await abort_with(context, exc)
        self._metrics.scaled(target, before, 0, BY_HAND)
        self._changes.note()
        return control_pb2.DrainReply(groups=[name for name, group in groups.items() if group.spec.pool == target])

    async def Rollout(self, request, context):
        try:
            config = self._checked(request.config_json)
            self._goals.replace_config(config, allow_gap=request.allow_gap)
        except ServingError as exc:
            await abort_with(context, exc)
        stale = self._stale()
        logger.info("rollout: %d of %d groups are to be replaced", len(stale), len(self._fleet.groups))
        self._changes.note()
        return control_pb2.RolloutReply(groups=stale)

    async def Report(self, request, context):
        self._scaling.report(request)
        return control_pb2.LoadReportReply()

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    async def _drain_node(self, name: str) -> list[str]:
        """Its groups leave at once, whether others can take over or not: the node goes. Asked again, it tells which are still there.

        Returns: groups on it. Raises: ConfigError if there is no such node, or it is the head's
        """
        nodes = await asyncio.to_thread(find_nodes, name)
        if not nodes:
            raise ConfigError(f"no pool, group or node {name!r}; there are {sorted([*self._goals.pools, *self._fleet.groups])}")
        await asyncio.to_thread(close_nodes, nodes, NODE_DRAINS)
        here = await asyncio.to_thread(groups_on, self._goals.namespace, nodes)
        leaving = [group for name, group in self._fleet.groups.items() if name in here]
        for group in leaving:
            group.leave(NODE_DRAINS)
        return [group.name for group in leaving]

    def _checked(self, config_json: str) -> Config:
        """Raises: ConfigError if it can't be served, or differs where a running cluster can't"""
        config, now = parse_config(json.loads(config_json)), self._goals.config.cluster
        changed = [key for key in FIXED_KEYS if getattr(config.cluster, key) != getattr(now, key)]
        if changed:
            raise ConfigError(f"cluster.{changed[0]} can't change while the cluster runs; `tandem down` and `up` again")
        check_pools(config)
        return config

    def _stale(self) -> list[str]:
        goals = self._goals
        return self._fleet.stale(self._fleet.fingerprints(goals.config, goals.kv_version))

    def _pool_status(self, name: str) -> control_pb2.PoolStatus:
        goals, pool = self._goals, self._goals.pools[name]
        phases = Counter(group.phase for group in self._fleet.groups.values() if group.spec.pool == name)
        return control_pb2.PoolStatus(
            pool=name,
            role=types_pb2.ROLE_PREFILL if pool.role == "prefill" else types_pb2.ROLE_DECODE,
            wanted=goals.wanted[name],
            ready=phases[Phase.READY],
            starting=phases[Phase.STARTING],
            draining=phases[Phase.LEAVING],
            min=pool.replicas.min,
            max=pool.replicas.max,
            pinned=name in goals.pinned,
            error=self._fleet.errors.get(name, ""),
        )
