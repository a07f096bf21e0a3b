"""What a router exports.

`generate.py` counts how calls end, `report.py` tells what finished choices took, `job.py` counts tokens; gauges are read from the pools
when a scrape asks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common import metric_catalog as catalog
from common.errors import DeadlineError, InvalidRequestError, NotSupportedError, OverloadedError, ServingError
from common.metrics import Metrics
from common.proto import router_pb2, types_pb2

if TYPE_CHECKING:
    from cluster.cost_model import Prediction
    from cluster.router.choice import Decision
    from cluster.router.groups import GroupLink
    from cluster.router.job import Job
    from cluster.router.pool import PoolSet

_COMPARED = ("queue", "prefill", "transfer", "ttft", "itl")
_LEAST_MS = 0.05  # predictions below this say nothing about a ratio


class RouterMetrics:
    """`output_tokens` is added to once per delivery; everything else once per request."""

    def __init__(self) -> None:
        self.metrics = Metrics(catalog.ROUTER)
        m = self.metrics
        self.output_tokens = m.counter(catalog.OUTPUT_TOKENS).labels()
        self._requests = m.counter(catalog.REQUESTS)
        self._ttft = m.histogram(catalog.TTFT)
        self._tpot = m.histogram(catalog.TPOT)
        self._e2e = m.histogram(catalog.E2E)
        self._queue_wait = m.histogram(catalog.QUEUE_WAIT)
        self._prompt_tokens = m.counter(catalog.PROMPT_TOKENS)
        self._attempts = m.counter(catalog.ATTEMPTS)
        self._choices = m.counter(catalog.CHOICES)
        self._ratio = m.histogram(catalog.PREDICTION_RATIO)
        self._cost = m.counter(catalog.COST)
        for name in ("ok", "refused", "failed", "cancelled"):  # so that rates of what has not happened yet are 0, not absent
            self._requests.labels(name, {"ok": "stop", "refused": "resource_exhausted", "failed": "unavailable"}.get(name, "cancelled"))

    # -- once per request --------------------------------------------------------------------------------------------------------------

    def ended_well(self, reason: types_pb2.FinishReason) -> None:
        self._requests.labels("ok", types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()).inc()

    def ended_badly(self, error: ServingError) -> None:
        self._requests.labels(_outcome(error), error.grpc_status.lower()).inc()

    def cancelled(self) -> None:
        """The client went away."""
        self._requests.labels("cancelled", "cancelled").inc()

    def finished(self, job: Job, decision: Decision, actual: Prediction, usd: tuple[float, float]) -> None:
        """`usd`: dollars earned by the prefill and the decode pool."""
        prefill = decision.prefill_pool.name
        decode = decision.decode_pool.name if decision.decode_pool is not None else ""
        self._choices.labels(prefill, decode).inc()
        self._attempts.inc(job.attempts)
        self._prompt_tokens.labels(prefill).inc(len(job.request.prompt_ids))
        self._ttft.labels(prefill).observe(actual.ttft_ms / 1e3)
        self._queue_wait.labels(prefill).observe(actual.queue_ms / 1e3)
        self._e2e.labels(prefill, decode).observe(actual.latency_s)
        self._cost.labels(prefill, "prefill").inc(usd[0])
        if decode:
            self._cost.labels(decode, "decode").inc(usd[1])
            if actual.itl_ms:
                self._tpot.labels(decode).observe(actual.itl_ms / 1e3)
        if job.attempts == 1:
            self._compare(prefill, decode, decision.prediction, actual)

    def _compare(self, prefill: str, decode: str, predicted: Prediction, actual: Prediction) -> None:
        for quantity in _COMPARED:
            pool = decode if quantity in ("transfer", "itl") else prefill
            expected, took = getattr(predicted, f"{quantity}_ms"), getattr(actual, f"{quantity}_ms")
            if pool and expected > _LEAST_MS and took > 0:
                self._ratio.labels(pool, quantity).observe(took / expected)
        if predicted.cost_usd > 0:
            self._ratio.labels(prefill, "cost").observe(actual.cost_usd / predicted.cost_usd)

    # -- once per scrape ---------------------------------------------------------------------------------------------------------------

    def refresh(self, pools: PoolSet, running: int) -> None:
        """Sets the gauges. Called on the router's loop."""
        m, now_s = self.metrics, asyncio.get_running_loop().time()
        m.counter(catalog.RUNNING).set(running)
        queued, tokens, waits = {}, {}, {}
        for pool in pools.prefill.values():
            key = (pool.spec.name,)
            queued[key], tokens[key] = float(len(pool.queue)), float(pool.queue.prompt_tokens)
            waits[key] = pool.wait_ms(pool.order, now_s) / 1e3 if pool.order else 0.0
        m.counter(catalog.QUEUED).replace(queued)
        m.counter(catalog.QUEUED_TOKENS).replace(tokens)
        m.counter(catalog.PREDICTED_WAIT).replace(waits)
        groups = {
            (pool.spec.name, role_name(pool.role), state): float(sum(state_of(link) == state for link in pool.links.values()))
            for pool in pools.all()
            for state in ("ready", "draining", "unreachable")
        }
        m.counter(catalog.ROUTER_GROUPS).replace(groups)
        m.counter(catalog.POOL_OPEN).replace({(pool.spec.name,): float(pool.state == router_pb2.POOL_STATE_ACTIVE) for pool in pools.all()})


def role_name(role: types_pb2.Role) -> str:
    return "prefill" if role == types_pb2.ROLE_PREFILL else "decode"


def state_of(link: GroupLink) -> str:
    if not link.is_healthy:
        return "unreachable"
    return "draining" if link.load.draining else "ready"


def _outcome(error: ServingError) -> str:
    if error.grpc_status == "CANCELLED":
        return "cancelled"
    if isinstance(error, InvalidRequestError | NotSupportedError | OverloadedError) or error.grpc_status == "RESOURCE_EXHAUSTED":
        return "refused"
    return "cancelled" if isinstance(error, DeadlineError) else "failed"
