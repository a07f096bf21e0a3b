"""What a simulated run came to: latencies, cost and endings of all requests, use of all groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from cluster.cost_model import PoolSpec
from cluster.router.pool import PoolSet
from cluster.sim.request import SimRequest
from common.errors import ServingError

PERCENTILES = (50, 90, 99)


@dataclass
class PoolUse:
    """Of one pool: `group_s`: seconds that groups existed, `busy_s`: that they computed; `gpu_usd`: all of it paid."""

    group_s: float = 0.0
    busy_s: float = 0.0
    gpu_usd: float = 0.0
    requests: int = 0


class Record:
    """`ttft_ms`, `itl_ms` (mean gap of a request), `latency_s`, `usd` [n]; NaN for requests that did not finish."""

    def __init__(self, count: int):
        self.ttft_ms = np.full(count, np.nan)
        self.itl_ms = np.full(count, np.nan)
        self.latency_s = np.full(count, np.nan)
        self.usd = np.full(count, np.nan)
        self.tokens = 0
        self.ended = 0
        self.end_s = 0.0
        self.refusals: Counter[str] = Counter()
        self.use: dict[str, PoolUse] = {}

    def note(self, request: SimRequest, usd: float) -> None:
        """A request has finished; `usd`: what it cost by itself."""
        stamps, i = request.stamps, request.number
        self.ended += 1
        self.tokens += request.output
        self.ttft_ms[i] = (stamps.first_token_s - stamps.arrived_s) * 1e3
        self.latency_s[i] = stamps.last_token_s - stamps.arrived_s
        self.usd[i] = usd
        if request.output > 1:
            self.itl_ms[i] = ((stamps.last_token_s - stamps.first_token_s) * 1e3 - stamps.transfer_ms) / (request.output - 1)

    def finished(self, request: SimRequest, usd: float) -> None:
        """`note`, and counted for the pools that served it."""
        self.note(request, usd)
        decision = request.decision
        assert decision is not None
        self.use_of(decision.prefill_pool).requests += 1
        if decision.decode_pool is not None:
            self.use_of(decision.decode_pool).requests += 1

    def refused(self, request: SimRequest, error: ServingError) -> None:
        self.ended += 1
        self.refusals[error.grpc_status] += 1

    def expired(self, request: SimRequest) -> None:
        self.ended += 1
        self.refusals["DEADLINE_EXCEEDED"] += 1

    def use_of(self, spec: PoolSpec) -> PoolUse:
        return self.use.setdefault(spec.name, PoolUse())

    def group_left(self, spec: PoolSpec, group, now_s: float) -> None:
        use = self.use_of(spec)
        lived_s = now_s - group.started_s
        use.group_s += lived_s
        use.busy_s += group.busy_s
        use.gpu_usd += lived_s / 3600 * spec.gpus * spec.usd_per_gpu_hour

    def take_groups(self, pools: PoolSet, now_s: float) -> None:
        for pool in pools.all():
            for group in pool.links.values():
                self.group_left(pool.spec, group, now_s)

    def summary(self, ttft_slo_ms: float | None = None, itl_slo_ms: float | None = None) -> Summary:
        done = ~np.isnan(self.ttft_ms)
        good = done.copy()
        if ttft_slo_ms is not None:
            good &= self.ttft_ms <= ttft_slo_ms
        if itl_slo_ms is not None:
            good &= np.isnan(self.itl_ms) | (self.itl_ms <= itl_slo_ms)
        span_s = max(self.end_s, 1e-9)
        return Summary(
            requests=len(self.ttft_ms),
            finished=int(done.sum()),
            refused=dict(self.refusals),
            attainment=float(good.sum() / max(len(good), 1)),
            goodput_per_s=float(good.sum() / span_s),
            ttft_ms=_percentiles(self.ttft_ms),
            itl_ms=_percentiles(self.itl_ms),
            latency_s=_percentiles(self.latency_s),
            usd_per_request=float(np.nanmean(self.usd)) if done.any() else 0.0,
            usd_per_1m_tokens=float(np.nansum(self.usd) / max(self.tokens, 1) * 1e6),
            fleet_usd_per_hour=sum(use.gpu_usd for use in self.use.values()) / span_s * 3600,
            fleet_usd_per_1m_tokens=sum(use.gpu_usd for use in self.use.values()) / max(self.tokens, 1) * 1e6,
            utilisation={name: use.busy_s / use.group_s if use.group_s else 0.0 for name, use in self.use.items()},
            shares={name: use.requests for name, use in self.use.items()},
        )


@dataclass(frozen=True)
class Summary:
    """`attainment`: part of all requests that finished within the SLO; `usd_per_*`: by the cost model, what requests occupied;
    `fleet_usd_*`: every GPU paid for the whole time. Percentiles by name."""

    requests: int
    finished: int
    refused: dict[str, int]
    attainment: float
    goodput_per_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    latency_s: dict[str, float]
    usd_per_request: float
    usd_per_1m_tokens: float
    fleet_usd_per_hour: float
    fleet_usd_per_1m_tokens: float
    utilisation: dict[str, float] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)


def _percentiles(values: np.ndarray) -> dict[str, float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {"mean": 0.0} | {f"p{p}": 0.0 for p in PERCENTILES}
    return {"mean": float(values.mean())} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
