"""Which pair of pools takes a request, and why not the others.

Pure and deterministic for a state and a seed. The caller (`pools.py`) describes each pool by what its best group would offer now; groups of
one pool are alike, so the best group of each pool stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from cluster.cost_model import Prediction, PreparedPool, Shape, combine, occupancies, score, visible_transfer_ms
from cluster.profile import Profile
from common.errors import InvalidRequestError, LayoutMismatch, OverloadedError, ServingError, WorkerLost
from common.proto import router_pb2

EQUAL = 1e-9  # relative difference of scores that counts as none


class Out(Enum):
    """Why a pool or pair can't be taken at all."""

    DRAINING = "draining"
    UNHEALTHY = "no healthy group"
    FULL = "queue is full"
    TOO_LONG = "can't hold the request"
    NOT_JOINABLE = "can't be joined"


@dataclass(frozen=True, slots=True)
class Exclusion:
    kind: Out
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.detail}" if self.detail else self.kind.value


@dataclass(frozen=True, slots=True)
class PrefillOffer:
    """A prefill pool at this moment. `wait_ms`: until a group would start on the request; `prefill_ms`: corrected."""

    pool: PreparedPool
    group: str
    wait_ms: float
    dispatch_ms: float
    prefill_ms: float
    out: Exclusion | None = None


@dataclass(frozen=True, slots=True)
class DecodeOffer:
    """A decode pool at this moment. `wait_ms` > 0: no group has room now. `itl_ms` is corrected, by `itl_factor`."""

    pool: PreparedPool
    group: str
    itl_ms: float
    wait_ms: float = 0.0
    itl_factor: float = 1.0
    transfer_factor: float = 1.0
    out: Exclusion | None = None


@dataclass(frozen=True)
class Aim:
    """What the request wants. SLOs in ms, None for no bound; `latency_weight` in [0, 1]."""

    latency_weight: float
    ttft_slo_ms: float | None = None
    itl_slo_ms: float | None = None


@dataclass(frozen=True)
class Decision:
    """The chosen pair and everything needed to explain it. `decode` None: a first token only."""

    prefill_offers: Sequence[PrefillOffer]
    decode_offers: Sequence[DecodeOffer | None]
    predictions: Prediction
    scores: np.ndarray
    exclusions: Mapping[tuple[int, int], Exclusion]
    broken_slo: np.ndarray | None
    chosen: tuple[int, int]
    aim: Aim
    shape: Shape
    seed: int

    @property
    def prefill(self) -> PrefillOffer:
        return self.prefill_offers[self.chosen[0]]

    @property
    def decode(self) -> DecodeOffer | None:
        return self.decode_offers[self.chosen[1]]

    @property
    def prediction(self) -> Prediction:
        return at_pair(self.predictions, self.chosen)


def choose(
    profile: Profile,
    prefills: Sequence[PrefillOffer],
    decodes: Sequence[DecodeOffer],
    shape: Shape,
    aim: Aim,
    seed: int,
    not_joinable: Mapping[tuple[str, str], str],
) -> Decision:
    """Least score wins; equals are spread by the seed. `not_joinable`: (prefill pool, decode pool) -> reason.

    Raises: ServingError of the kind that fits if no pair is left
    """
    columns: Sequence[DecodeOffer | None] = decodes if shape.worst > shape.prompt + 1 else [None]
    exclusions = _exclusions(prefills, columns, not_joinable)
    if len(exclusions) == len(prefills) * len(columns):
        raise _nobody(exclusions.values(), shape)
    predictions = _predict_pairs(profile, prefills, columns, shape)
    scores = score(predictions, aim.latency_weight)
    broken = _broken_slo(predictions, aim, scores.shape)
    candidates = _preferred(scores, exclusions, columns, broken).ravel()
    equals = np.flatnonzero(candidates <= candidates.min() * (1 + EQUAL))
    row, column = divmod(int(equals[spread(seed, len(equals))]), len(columns))
    return Decision(prefills, columns, predictions, scores, exclusions, broken, (row, column), aim, shape, seed)


def _preferred(scores: np.ndarray, exclusions, columns, broken: np.ndarray | None) -> np.ndarray:
    """Scores, infinite where a pair is out: excluded, without room while another has some, or breaking the SLO while another meets it."""
    waiting = [offer is not None and offer.wait_ms > 0 for offer in columns]
    if not exclusions and broken is None and not any(waiting):
        return scores
    possible = np.ones(scores.shape, bool)
    for pair in exclusions:
        possible[pair] = False
    for bad in (np.broadcast_to(waiting, scores.shape), broken):
        better = possible if bad is None else possible & ~bad
        possible = better if better.any() else possible
    return np.where(possible, scores, np.inf)


def spread(seed: int, count: int) -> int:
    """An index below `count`; consecutive seeds visit all indices evenly (golden-ratio steps)."""
    return ((seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) * count) >> 64


def at_pair(predictions: Prediction, pair: tuple[int, int]) -> Prediction:
    """The scalars of one pair out of the arrays of all."""

    def pick(x) -> float:
        if np.ndim(x) == 0:
            return float(x)
        return float(x[pair[0] if x.shape[0] > 1 else 0, pair[1] if x.shape[1] > 1 else 0])

    return Prediction(**{name: pick(getattr(predictions, name)) for name in Prediction.__dataclass_fields__})


def _exclusions(prefills, decodes, not_joinable) -> dict[tuple[int, int], Exclusion]:
    found: dict[tuple[int, int], Exclusion] = {}
    for i, prefill in enumerate(prefills):
        if prefill.out is not None:
            found.update(((i, j), prefill.out) for j in range(len(decodes)))
    for j, decode in enumerate(decodes):
        if decode is not None and decode.out is not None:
            found.update(((i, j), decode.out) for i in range(len(prefills)))
    if not_joinable:
        for i, prefill in enumerate(prefills):
            for j, decode in enumerate(decodes):
                reason = not_joinable.get((prefill.pool.spec.name, decode.pool.spec.name)) if decode is not None else None
                if reason:
                    found[i, j] = Exclusion(Out.NOT_JOINABLE, reason)
    return found


def _predict_pairs(profile: Profile, prefills: Sequence[PrefillOffer], decodes: Sequence[DecodeOffer | None], shape: Shape) -> Prediction:
    """`cost_model.predict` for all pairs at once."""
    rows = np.array([(p.wait_ms, p.dispatch_ms, p.prefill_ms, *p.pool.constants[:2]) for p in prefills]).T[:, :, None]
    wait, dispatch, prefill, prefill_gpus, prefill_price = rows
    kv_bytes_of: dict[int, int] = {}
    columns = np.array([_decode_column(d, shape, kv_bytes_of) for d in decodes]).T[:, None, :]
    itl, decode_wait, factor, kv_bytes, gpus, price, max_batch, capacity, layers = columns
    share_gpus = gpus * occupancies(max_batch, capacity, shape.worst)
    return combine(
        wait=np.maximum(wait, decode_wait),
        dispatch=dispatch,
        prefill=prefill,
        transfer=visible_transfer_ms(profile, kv_bytes, np.minimum(prefill_gpus, gpus), prefill, layers) * factor,
        itl=itl,
        prefill_usd=prefill_gpus * prefill_price,
        decode_usd=share_gpus * price,
        prefill_gpus=prefill_gpus,
        decode_gpus=share_gpus,
        output=shape.output if decodes[0] is not None else 1,
    )


_NO_DECODE = (0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0)


def _decode_column(offer: DecodeOffer | None, shape: Shape, kv_bytes_of: dict[int, int]) -> tuple[float, ...]:
    """`kv_bytes_of`: bytes to hand over by identity of the geometry; pools mostly share one."""
    if offer is None:
        return _NO_DECODE
    kv = offer.pool.spec.kv
    kv_bytes = kv_bytes_of.get(id(kv))
    if kv_bytes is None:
        kv_bytes = kv_bytes_of[id(kv)] = kv.handover_bytes(shape.prompt) if kv is not None else 0
    return (offer.itl_ms, offer.wait_ms, offer.transfer_factor, kv_bytes, *offer.pool.constants)


def _broken_slo(predictions: Prediction, aim: Aim, dims: tuple[int, ...]) -> np.ndarray | None:
    if aim.ttft_slo_ms is None and aim.itl_slo_ms is None:
        return None
    broken = np.zeros(dims, bool)
    if aim.ttft_slo_ms is not None:
        broken |= predictions.ttft_ms > aim.ttft_slo_ms
    if aim.itl_slo_ms is not None:
        broken |= predictions.itl_ms > aim.itl_slo_ms
    return broken


def _nobody(exclusions, shape: Shape) -> ServingError:
    kinds = {e.kind for e in exclusions}
    text = "; ".join(sorted({str(e) for e in exclusions})) or "no pools"
    if Out.FULL in kinds:
        return OverloadedError(f"no pair of pools takes the request now: {text}")
    if not kinds or kinds & {Out.UNHEALTHY, Out.DRAINING}:
        return WorkerLost(f"no pair of pools can serve now: {text}")
    if Out.TOO_LONG in kinds:
        return InvalidRequestError("sampling_params.max_tokens", f"prompt and max_tokens make {shape.worst} tokens: {text}")
    return LayoutMismatch(f"no pair of pools can be joined: {text}")


def explain(decision: Decision) -> router_pb2.RouteDecision:
    """Every candidate with its prediction and the reason it won, lost or was out."""
    best = decision.scores[decision.chosen]
    candidates = []
    for i, prefill in enumerate(decision.prefill_offers):
        for j, decode in enumerate(decision.decode_offers):
            candidates.append(
                router_pb2.Candidate(
                    prefill_pool=prefill.pool.spec.name,
                    decode_pool=decode.pool.spec.name if decode else "",
                    prefill_group=prefill.group,
                    decode_group=decode.group if decode else "",
                    prediction=to_proto(at_pair(decision.predictions, (i, j)), float(decision.scores[i, j])),
                    chosen=(i, j) == decision.chosen,
                    reason=_reason(decision, (i, j), best),
                )
            )
    return router_pb2.RouteDecision(
        candidates=candidates, latency_weight=decision.aim.latency_weight, expected_output_tokens=decision.shape.output, seed=decision.seed
    )


def to_proto(prediction: Prediction, score_value: float) -> router_pb2.Prediction:
    return router_pb2.Prediction(**{name: getattr(prediction, name) for name in Prediction.__dataclass_fields__}, score=score_value)


def _reason(decision: Decision, pair: tuple[int, int], best: float) -> str:
    own = float(decision.scores[pair])
    if pair == decision.chosen:
        return f"chosen: score {own:.4g}"
    if pair in decision.exclusions:
        return f"out: {decision.exclusions[pair]}"
    decode = decision.decode_offers[pair[1]]
    if decode is not None and decode.wait_ms > 0 and not (decision.decode is not None and decision.decode.wait_ms > 0):
        return "out: no decode group has room now, others have"
    broken = decision.broken_slo
    if broken is not None and broken[pair] and not broken[decision.chosen]:
        prediction = at_pair(decision.predictions, pair)
        return f"out: breaks the SLO (ttft {prediction.ttft_ms:.1f} ms, itl {prediction.itl_ms:.2f} ms) and another meets it"
    if own <= best * (1 + EQUAL):
        return "equal: the seed chose another"
    return f"lost: score {own / best:.2f}x the least" if best > 0 else "lost"
