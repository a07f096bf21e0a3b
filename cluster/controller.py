"""Keeps as many groups of each pool running as wanted, and tells routers which there are.

A detached Ray actor; one per cluster. Owns the set of groups; routers read it through `tandem.control.v1.Directory`. Requests never
pass through it, so that they go on while it is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

import grpc

from cluster.controller_metrics import ControllerMetrics, Target, group_target, targets_page
from cluster.death_news import DeathNews
from cluster.group import Group, GroupState
from cluster.specs import plan_group, security_of
from common.access import Role
from common.config import Config, PoolNode
from common.errors import ConfigError, ServingError
from common.kv_layout import check_join
from common.metrics_server import MetricsServer, Page, own_host
from common.proto import control_pb2, control_pb2_grpc
from common.wire import Wire
from model.config import check_layout, load_model_config

logger = logging.getLogger(__name__)
RETRY_S = 2.0
KEPT_DEAD = 256


class Controller(control_pb2_grpc.DirectoryServicer):
    """Reconciles `wanted[pool]` with the groups that run. All methods run on one event loop."""

    def __init__(self, config_json: str, key: bytes, device: str):
        logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._config = Config.model_validate_json(config_json)
        self._wire = Wire(security_of(self._config), key)
        self._device = device
        self._pools = {pool.name: pool for pool in self._config.pools}
        self._wanted = {pool.name: pool.replicas.min for pool in self._config.pools}
        self._groups: dict[str, Group] = {}
        self._tasks: dict[str, asyncio.Task] = {}
        self._dead: deque[int] = deque(maxlen=KEPT_DEAD)
        self._death_news = DeathNews(self._wire)
        self._last_error: dict[str, str] = {}
        self._not_before: dict[str, float] = {}
        self._version = 0
        self._metrics = ControllerMetrics(self._config)
        self._routers: dict[str, str] = {}  # router id -> host:port of its metrics, while it watches
        self.metrics_address = ""
        self._changed = asyncio.Event()
        self._closing = False

    async def start(self) -> dict[str, str]:
        """Checks the whole configuration against the model, then starts the groups.

        Returns: host:port of the directory (`controller_address`) and of the metrics (`metrics_address`)

        Raises: ConfigError with every reason, before any process is started
        """
        check_pools(self._config)
        self._server = grpc.aio.server(interceptors=self._wire.guards({"Scale": Role.OPERATOR}, Role.INTERNAL))
        control_pb2_grpc.add_DirectoryServicer_to_server(self, self._server)
        host, _, _ = self._config.cluster.controller_listen.rpartition(":")
        port = self._wire.bind(self._server, self._config.cluster.controller_listen, internal=True)
        await self._server.start()
        self.metrics_address = await self._export(host)
        self._loop_task = asyncio.create_task(self._reconcile_forever())
        return {"controller_address": f"{host}:{port}", "metrics_address": self.metrics_address}

    async def _export(self, host: str) -> str:
        pages = {"/targets": Page("application/json", lambda: targets_page(self._targets()))}
        self._exporter = MetricsServer(self._metrics.metrics, lambda: self._metrics.refresh(self._groups.values(), self._wanted), pages)
        node = self._config.metrics
        return await self._exporter.start(node.host, node.controller_port, own_host(host))

    def _targets(self) -> list[Target]:
        """Every process of the cluster that serves metrics and is known here."""
        own = Target(self.metrics_address, {"process": "controller"})
        routers = [Target(address, {"process": "router"}) for address in self._routers.values()]
        return [own, *routers, *(group_target(g.description) for g in self._groups.values() if g.description)]

    async def status(self) -> list[dict]:
        """One row per group and per pool that can't start: {pool, group, state, error}."""
        rows = [
            {"pool": g.spec.pool, "group": name, "state": g.state.value, "error": g.error, "tp": g.spec.tp}
            for name, g in self._groups.items()
        ]
        for pool, error in self._last_error.items():
            rows.append({"pool": pool, "group": "", "state": "failed", "error": error, "tp": 0})
        return rows

    async def processes(self) -> list[int]:
        """Pids of all ready groups' ranks, for tests that kill them."""
        return [p.pid for g in self._groups.values() if g.description for p in g.description.ranks]

    async def shutdown(self) -> None:
        """Stops every group and returns when all are gone."""
        self._closing = True
        self._touch()
        for group in self._groups.values():
            await group.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=20)
        for group in self._groups.values():
            group.kill()
        await self._death_news.close()
        await self._exporter.close()
        await self._server.stop(0.2)

    async def Scale(self, request, context):
        """Sets a pool's number of groups by hand, within its bounds and the GPU budget."""
        pool = self._pools.get(request.pool)
        if pool is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no pool {request.pool!r}; there are {sorted(self._pools)}")
        assert pool is not None  # abort raises
        if not pool.replicas.min <= request.replicas <= pool.replicas.max:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"replicas {request.replicas} of {pool.name} must lie in [{pool.replicas.min}, {pool.replicas.max}]",
            )
        wanted = {**self._wanted, pool.name: request.replicas}
        gpus = sum(count * self._pools[name].layout.tp for name, count in wanted.items())
        if gpus > self._config.autoscale.gpu_budget:
            message = f"that would take {gpus} GPUs; autoscale.gpu_budget is {self._config.autoscale.gpu_budget}"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._metrics.scaled(pool.name, self._wanted[pool.name], request.replicas, "by hand")
        self._wanted = wanted
        self._touch()
        return control_pb2.ScaleReply(replicas=request.replicas)

    async def Watch(self, request, context):
        """The whole set at once, at each change, and every second."""
        if request.metrics_address:
            self._routers[request.router_id] = request.metrics_address
        try:
            while not self._closing:
                changed = self._changed
                yield self._group_set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), 1.0)
        finally:
            self._routers.pop(request.router_id, None)

    def _group_set(self) -> control_pb2.GroupSet:
        ready = [g.description for g in self._groups.values() if g.state is GroupState.READY and g.description]
        return control_pb2.GroupSet(version=self._version, groups=ready, dead_incarnations=self._dead)

    def _touch(self) -> None:
        """Wakes the reconciler and every watcher."""
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _reconcile_forever(self) -> None:
        while not self._closing:
            for pool in self._pools.values():
                await self._reconcile(pool)
            self._death_news.tell(self._group_set().groups)
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), 0.25)
            except TimeoutError:
                continue

    async def _reconcile(self, pool: PoolNode) -> None:
        mine = [g for g in self._groups.values() if g.spec.pool == pool.name and not g.is_stopping]
        if len(mine) > self._wanted[pool.name]:
            order = sorted(mine, key=lambda g: g.state is GroupState.READY)  # those that still start go first
            for group in order[: len(mine) - self._wanted[pool.name]]:
                await group.stop()
        elif len(mine) < self._wanted[pool.name] and time.monotonic() >= self._not_before.get(pool.name, 0.0):
            for _ in range(self._wanted[pool.name] - len(mine)):
                self._launch(pool)

    def _launch(self, pool: PoolNode) -> None:
        group = Group(plan_group(self._config, pool, self._wire.keys.current(), device=self._device), self._touch)
        self._groups[group.name] = group
        self._metrics.launched(pool.name)
        self._tasks[group.name] = asyncio.create_task(self._supervise(group))
        self._touch()

    async def _supervise(self, group: Group) -> None:
        await group.run(self._config.cluster.start_timeout_s)
        if group.is_proved_dead:
            self._dead.append(group.spec.incarnation)
            self._death_news.died(group.spec.incarnation)
        del self._groups[group.name], self._tasks[group.name]
        if group.error is not None:
            self._metrics.failed(group.spec.pool, group.failed_in)
            self._last_error[group.spec.pool] = group.error
            self._not_before[group.spec.pool] = time.monotonic() + RETRY_S
        self._touch()


def check_pools(config: Config) -> None:
    """Everything about the pools that can be known from the config and the checkpoint's own config file.

    Raises: ConfigError, with every pool that can't run and every pair that can't be joined
    """
    model = load_model_config(config.model.path)
    geometry = model.kv_geometry(config.kv.block_size, config.kv.dtype)
    reasons = []
    for pool in config.pools:
        try:
            check_layout(model, pool.layout.tp, pool.layout.ep)
            check_join(geometry, pool.layout.tp, geometry, pool.layout.tp)
        except ServingError as exc:
            reasons.append(f"pool {pool.name}: {exc}")
    if config.model.max_model_len > model.max_position:
        reasons.append(f"model.max_model_len {config.model.max_model_len} is past the model's {model.max_position}")
    if reasons:
        raise ConfigError("; ".join(reasons))
