"""What a finished job took beside what was predicted, and what the pools learn from it. Called once per finished job by `dispatch.py`."""

from __future__ import annotations

import logging

from cluster.cost_model import Prediction, occupancy, prefill_ms, score
from cluster.router.choice import Decision, explain, to_proto
from cluster.router.job import Job, Stamps
from cluster.router.metrics import RouterMetrics
from cluster.router.pool import DecodePool, PrefillPool
from common.proto import router_pb2, types_pb2

logger = logging.getLogger(__name__)


def complete(
    job: Job, finish: types_pb2.Finish, decision: Decision, groups: tuple[str, str], metrics: RouterMetrics
) -> router_pb2.GenerateComplete:
    """`groups`: names of the prefill and decode group that served, "" for none."""
    actual = actual_of(job, decision)
    route = explain(decision, everybody=job.request.explain)
    for candidate in route.candidates:
        if candidate.chosen:
            candidate.prefill_group, candidate.decode_group = groups
    usage = types_pb2.Usage(prompt_tokens=len(job.request.prompt_ids), completion_tokens=len(job.tokens))
    log_finished(job, decision.prediction, actual, groups)
    metrics.finished(job, decision, actual, prefill_and_decode_usd(job.stamps, decision))
    report = router_pb2.RouteReport(
        decision=route, actual=to_proto(actual, float(score(actual, decision.aim.latency_weight))), attempts=job.attempts
    )
    return router_pb2.GenerateComplete(index=job.index, finish_reason=finish, usage=usage, route=report)


def actual_of(job: Job, decision: Decision) -> Prediction:
    """Measured at the router: queue until the prefill group started, TTFT until the first token was in the client's buffer."""
    stamps = job.stamps
    started_s = stamps.started_s or stamps.granted_s
    decode_ms = _decode_ms(stamps)
    prefill_s, decode_s = _gpu_seconds(stamps, decision)
    return Prediction(
        queue_ms=max(0.0, (started_s - stamps.arrived_s) * 1e3),
        prefill_ms=stamps.prefill_ms,
        transfer_ms=stamps.transfer_ms,
        ttft_ms=(stamps.first_token_s - stamps.arrived_s) * 1e3,
        itl_ms=decode_ms / (len(job.tokens) - 1) if len(job.tokens) > 1 else 0.0,
        gpu_seconds=prefill_s + decode_s,
        cost_usd=sum(prefill_and_decode_usd(stamps, decision)),
        latency_s=stamps.last_token_s - stamps.arrived_s,
    )


def prefill_and_decode_usd(stamps: Stamps, decision: Decision) -> tuple[float, float]:
    """What a finished job cost in either pool [dollars]."""
    prefill_s, decode_s = _gpu_seconds(stamps, decision)
    decode_price = decision.decode_pool.usd_per_gpu_hour if decision.decode_pool else 0.0
    return prefill_s * decision.prefill_pool.usd_per_gpu_hour / 3600, decode_s * decode_price / 3600


def _gpu_seconds(stamps: Stamps, decision: Decision) -> tuple[float, float]:
    """In the prefill and the decode pool; of a decode group the job's share of the batch counts."""
    decode = decision.decode_pool
    share = occupancy(decode, decision.shape) * decode.gpus if decode else 0.0
    return decision.prefill_pool.gpus * stamps.prefill_ms / 1e3, share * _decode_ms(stamps) / 1e3


def learn(stamps: Stamps, tokens: int, decision: Decision, prefill: PrefillPool, decode: DecodePool | None, now_s: float) -> None:
    """Feeds the corrections with a request that finished after `tokens` at its first attempt: the stamps of others mix two groups."""
    predicted, size = decision.prediction, decision.shape.prompt
    prefill.correction.observe(size, prefill_ms(prefill.prepared, size), stamps.prefill_ms, now_s)
    if stamps.started_s and predicted.queue_ms == 0.0:
        prefill.dispatch.observe((stamps.first_token_s - stamps.arrived_s) * 1e3 - stamps.prefill_ms)
    prefill.has_learnt()
    if decode is None or decision.decodes is None or tokens < 3:
        return
    side, column = decision.decodes, decision.chosen[1]
    decode.transfer.observe(predicted.transfer_ms / float(side.transfer_factor[column]), stamps.transfer_ms, now_s)
    decode.itl.observe(float(side.itl_ms[column] / side.itl_factor[column]), _decode_ms(stamps) / (tokens - 1), now_s)
    decode.has_learnt()


def _decode_ms(stamps: Stamps) -> float:
    """From the first token to the last, without the hand-over between them."""
    return max(0.0, (stamps.last_token_s - stamps.first_token_s) * 1e3 - stamps.transfer_ms)


def log_finished(job: Job, predicted: Prediction, actual: Prediction, groups: tuple[str, str]) -> None:
    logger.info(
        "finished request=%s choice=%d prefill=%s decode=%s tokens=%d+%d attempts=%d ttft_ms=%.1f/%.1f itl_ms=%.2f/%.2f cost_usd=%.3g/%.3g",
        job.request.label,
        job.index,
        *groups,
        len(job.request.prompt_ids),
        len(job.tokens),
        job.attempts,
        predicted.ttft_ms,
        actual.ttft_ms,
        predicted.itl_ms,
        actual.itl_ms,
        predicted.cost_usd,
        actual.cost_usd,
    )
