"""What the controller exports, and the list of everything there is to scrape (`/targets`, for Prometheus' `http_sd_configs`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.group import Group, GroupState
from cluster.reconcile import Phase
from common import metric_catalog as catalog
from common.config import Config
from common.metrics import Metrics
from common.proto import types_pb2

_STATES = {
    GroupState.PLACING: "placing",
    GroupState.LOADING: "loading",
    GroupState.READY: "ready",
    GroupState.DRAINING: "stopping",
    GroupState.DEAD: "stopping",
}


@dataclass(frozen=True)
class Target:
    """One process to scrape. `labels` are added to all that is scraped there."""

    address: str
    labels: Mapping[str, str]


class ControllerMetrics:
    def __init__(self, config: Config):
        self.metrics = m = Metrics(catalog.CONTROLLER)
        self._starts = m.counter(catalog.GROUP_STARTS)
        self._failures = m.counter(catalog.GROUP_FAILURES)
        self._scaling = m.counter(catalog.SCALING)
        for pool in config.pools:
            self._starts.labels(pool.name)
            self._failures.labels(pool.name, "ready")
            for direction in ("up", "down"):
                self._scaling.labels(pool.name, direction, "by hand")

    def launched(self, pool: str) -> None:
        self._starts.labels(pool).inc()

    def failed(self, pool: str, state: GroupState) -> None:
        """A group ended that was not asked to. `state`: the one it was in."""
        self._failures.labels(pool, _STATES[state]).inc()

    def scaled(self, pool: str, before: int, after: int, reason: str) -> None:
        """`reason`: one of a small set, such as "by hand"."""
        if before != after:
            self._scaling.labels(pool, "up" if after > before else "down", reason).inc()

    def refresh(self, config: Config, groups: Iterable[Group], wanted: Mapping[str, int]) -> None:
        m = self.metrics
        states = Counter((g.spec.pool, "stopping" if g.phase is Phase.LEAVING else _STATES[g.state]) for g in groups)
        m.counter(catalog.GROUPS).replace(
            {(pool.name, pool.role, state): float(states[pool.name, state]) for pool in config.pools for state in _STATES.values()}
        )
        m.counter(catalog.WANTED_GROUPS).replace({(pool.name,): float(wanted[pool.name]) for pool in config.pools})
        gpus, prices = {}, {}
        for pool in config.pools:
            held = pool.layout.tp * sum(states[pool.name, s] for s in ("loading", "ready", "stopping"))
            gpus[pool.name, pool.role] = float(held)
            prices[pool.name, pool.role] = held * config.usd_per_gpu_hour(pool)
        m.counter(catalog.POOL_GPUS).replace(gpus)
        m.counter(catalog.POOL_PRICE).replace(prices)


def group_target(description: types_pb2.GroupDescription) -> Target:
    process = "prefill" if description.role == types_pb2.ROLE_PREFILL else "decode"
    return Target(description.metrics_address, {"process": process, "group": description.group})


def targets_page(targets: Iterable[Target]) -> bytes:
    """JSON as Prometheus' HTTP service discovery reads it."""
    return json.dumps([{"targets": [t.address], "labels": dict(t.labels)} for t in targets if t.address]).encode()
