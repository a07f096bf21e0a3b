"""What routers report of their load, joined into one observation per pool for the autoscaler. Pure; the caller gives the time.

Owned by the controller. A router that has not reported for `SILENT_S` counts no more; while none reports, there is no observation, and
pools keep what they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.autoscaler.types import DecodeLoad, Observation, PrefillLoad
from common.proto import control_pb2, types_pb2

SILENT_S = 5.0


@dataclass
class _Router:
    at_s: float
    pools: dict[str, control_pb2.PoolLoad] = field(default_factory=dict)
    groups: frozenset[str] = frozenset()
    arrived_before: dict[str, float] = field(default_factory=dict)  # at the last observation


class Demand:
    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}
        self._observed_s: float | None = None

    def report(self, report: control_pb2.LoadReport, now_s: float) -> bool:
        """Returns: whether somebody waits for a pool that sleeps"""
        known = self._routers.setdefault(report.router_id, _Router(now_s))
        known.at_s = now_s
        known.groups = frozenset(report.groups)
        known.pools = {load.pool: load for load in report.pools}
        for name, load in known.pools.items():
            known.arrived_before.setdefault(name, load.arrived_prefill_s)
        return any(load.waiting for load in report.pools)

    def is_used(self, group: str, now_s: float) -> bool:
        """Whether every router that reports gives the group new requests."""
        return all(group in router.groups for router in self._routers.values() if now_s - router.at_s <= SILENT_S)

    def observe(self, ready: Mapping[str, int], now_s: float) -> dict[str, Observation]:
        """One observation per pool that some router knows. `ready`: groups that serve, by pool. Rates are since the last call."""
        self._routers = {name: router for name, router in self._routers.items() if now_s - router.at_s <= SILENT_S}
        past_s = max(now_s - self._observed_s, 1e-3) if self._observed_s is not None else None
        self._observed_s = now_s
        found: dict[str, Observation] = {}
        for name, count in ready.items():
            loads = [(router, router.pools[name]) for router in self._routers.values() if name in router.pools]
            if loads:
                is_prefill = loads[0][1].role == types_pb2.ROLE_PREFILL
                arrived_s = sum(_arrived_s(router, load) for router, load in loads)
                parts = [load for _, load in loads]
                rate = arrived_s / past_s if past_s is not None else 0.0
                found[name] = Observation(_prefill(parts, rate) if is_prefill else _decode(parts), count)
        return found


def _arrived_s(router: _Router, load: control_pb2.PoolLoad) -> float:
    """Since the last observation. A router that started again counts from zero."""
    before = router.arrived_before.get(load.pool, 0.0)
    router.arrived_before[load.pool] = load.arrived_prefill_s
    return load.arrived_prefill_s - before if load.arrived_prefill_s >= before else load.arrived_prefill_s


def _prefill(loads: list[control_pb2.PoolLoad], rate: float) -> PrefillLoad:
    """Routers share the groups: each sees the other's work there as busy time, but only its own queue."""
    return PrefillLoad(
        arriving_s_per_s=rate,
        backlog_s=sum(load.queued_s for load in loads) + max(load.running_s for load in loads),
        queue_wait_s=max(load.queue_wait_s for load in loads),
        waiting=sum(load.waiting for load in loads),
    )


def _decode(loads: list[control_pb2.PoolLoad]) -> DecodeLoad:
    groups = max(load.groups for load in loads)
    blocks = max(load.kv_blocks_total for load in loads)
    return DecodeLoad(
        sequences=sum(load.sequences for load in loads),
        sequences_per_group=min(load.sequences_per_group for load in loads),
        itl_ms=max(load.itl_ms for load in loads),
        kv_blocks_used=max(load.kv_blocks_used for load in loads),
        kv_blocks_per_group=blocks / groups if groups else 0.0,
        waiting=sum(load.waiting for load in loads),
    )
