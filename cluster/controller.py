"""Keeps as many groups of each pool running as wanted, and tells routers which there are.

A detached Ray actor; one per cluster. Joins what is wanted (`goals.py`) with what runs (`fleet.py`) as `reconcile.py` plans it. Requests
never pass through it, so that they go on while it is away; Ray starts it again when it dies, and it takes its groups over.
"""

from __future__ import annotations

import asyncio
import logging
import os

import grpc
import ray

from cluster.changes import Changes
from cluster.check import check_pools
from cluster.controller_metrics import ControllerMetrics, targets_page
from cluster.fleet import Fleet
from cluster.goals import Goals
from cluster.operations import NEEDS, Operations
from cluster.rank_actor import RankActor
from cluster.reconcile import Drain, PoolGoal, plan_next
from cluster.scaling import Scaling
from common.access import Role
from common.config import Config
from common.errors import ConfigError
from common.metrics_server import MetricsServer, Page, own_host
from common.proto import control_pb2_grpc

logger = logging.getLogger(__name__)
TURN_S = 0.25
BIND_RETRY_S = 0.2
BIND_TIMEOUT_S = 20.0  # an earlier controller's port may still be its own for a moment
CLOSE_S = 20.0


class Controller:
    """All methods run on one event loop."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config_json: str, key: bytes, device: str, namespace: str, actor_class: type = RankActor
    ):
        """`key`: signs transfer messages, if no group is there to take over. `actor_class`: of the rank actors."""
        logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._is_again = ray.get_runtime_context().was_current_actor_reconstructed
        self._goals = Goals.load(namespace, Config.model_validate_json(config_json), own_config=self._is_again)
        self._changes = Changes()
        self._metrics = ControllerMetrics(self._goals.config)
        self._fleet = Fleet(namespace, device, actor_class, self._metrics, self._changes.note)
        self._key = key
        self._scaling = Scaling(self._goals, self._fleet, self._metrics, self._changes.note)
        self._operations = Operations(self._goals, self._fleet, self._scaling, self._changes, self._metrics)
        self._started: asyncio.Task[dict[str, str]] | None = None
        if self._is_again:
            logger.warning("the controller was started again")
            self._started = asyncio.create_task(self._start())

    async def start(self) -> dict[str, str]:
        """Checks the whole configuration against the model, takes over the groups there are, and starts the others.

        Returns: host:port of the directory (`controller_address`) and of the metrics (`metrics_address`)
        Raises: ConfigError with every reason, before any process is started
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        return await asyncio.shield(self._started)

    async def status(self) -> list[dict]:
        """One row per group and per pool that can't start: {pool, group, state, error, tp}."""
        rows = [
            {"pool": g.spec.pool, "group": name, "state": g.state.value, "error": g.error or g.detail, "tp": g.spec.tp}
            for name, g in self._fleet.groups.items()
        ]
        for pool, error in self._fleet.errors.items():
            rows.append({"pool": pool, "group": "", "state": "failed", "error": error, "tp": 0})
        return rows

    async def wanted(self) -> dict[str, int]:
        """Groups by pool."""
        return dict(self._goals.wanted)

    async def pid(self) -> int:
        """Of this process, for tests that kill it."""
        return os.getpid()

    async def processes(self) -> list[int]:
        """Pids of all ready groups' ranks, for tests that kill them."""
        return [p.pid for g in self._fleet.groups.values() if g.description for p in g.description.ranks]

    async def shutdown(self) -> None:
        """Stops every group and returns when all are gone."""
        self._loop_task.cancel()
        self._operations.close()
        await self._fleet.close(CLOSE_S)
        Goals.forget_all(self._goals.namespace)
        await self._exporter.close()
        await self._server.stop(0.2)

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    async def _start(self) -> dict[str, str]:
        config = self._goals.config
        check_pools(config)
        self._goals.replace_config(config, allow_gap=self._goals.allow_gap)
        await self._fleet.adopt(config, self._key)
        self._server = await self._listen(config.cluster.controller_listen)
        self._goals.save()
        self._operations.metrics_address = await self._export()
        self._loop_task = asyncio.create_task(self._reconcile_forever())
        return {"controller_address": self._goals.address, "metrics_address": self._operations.metrics_address}

    async def _export(self) -> str:
        pages = {"/targets": Page("application/json", lambda: targets_page(self._operations.targets()))}

        def refresh() -> None:
            self._metrics.refresh(self._goals.config, self._fleet.groups.values(), self._goals.wanted)

        self._exporter = MetricsServer(self._metrics.metrics, refresh, pages)
        node = self._goals.config.metrics
        return await self._exporter.start(node.host, node.controller_port, own_host(self._goals.address.rpartition(":")[0]))

    async def _listen(self, wanted: str) -> grpc.aio.Server:
        """Where an earlier controller listened, so that routers find this one."""
        address, wire = self._goals.address or wanted, self._fleet.wire
        deadline_s = asyncio.get_running_loop().time() + BIND_TIMEOUT_S
        while True:
            server = grpc.aio.server(options=(("grpc.so_reuseport", 0),), interceptors=wire.guards(NEEDS, Role.INTERNAL))
            control_pb2_grpc.add_DirectoryServicer_to_server(self._operations, server)
            try:
                port = wire.bind(server, address, internal=True)
                break
            except RuntimeError as exc:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise ConfigError(f"cluster.controller_listen: can't listen on {address}: {exc}") from exc
                await asyncio.sleep(BIND_RETRY_S)
        await server.start()
        self._goals.address = f"{address.rpartition(':')[0]}:{port}"
        return server

    async def _reconcile_forever(self) -> None:
        while True:
            seen = self._changes.version
            self._scaling.turn(asyncio.get_running_loop().time())
            self._reconcile()
            await self._changes.wait(seen, TURN_S)

    def _reconcile(self) -> None:
        goals, fleet = self._goals, self._fleet
        fleet.note_ready()
        fleet.tell_deaths()
        config = goals.config
        wanted = {
            pool.name: PoolGoal(pool.name, pool.role, goals.wanted[pool.name], pool.layout.tp, goals.kv_version, fleet.may_start(pool.name))
            for pool in config.pools
        }
        views = fleet.views(fleet.fingerprints(config, goals.kv_version), self._scaling.is_used)
        plan = plan_next(wanted, views, config.autoscale.gpu_budget, allow_gap=goals.allow_gap)
        self._operations.say_waits_for(plan.waits_for)
        for action in plan.actions:
            if isinstance(action, Drain):
                logger.info("group %s drains: %s", action.group, action.reason)
                fleet.groups[action.group].leave(action.reason)
            else:
                fleet.start(config, goals.pools[action.pool], goals.kv_version)
