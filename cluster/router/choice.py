"""Which pair of pools takes a request, and why not the others.

Pure and deterministic for a state and a seed. The board (`board.py`) describes each pool by what its best group would offer now; groups of
one pool are alike, so the best group of each pool stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from cluster.cost_model import PoolSpec, Prediction, PreparedPool, Shape, Terms, score, visible_transfer_ms
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


@dataclass(slots=True)
class PrefillSide:
    """All prefill pools at this moment, one entry each. `wait_ms`: until a group would start on the request; `prefill_ms`: corrected;
    `usd_per_ms`: of all GPUs of a group; `groups`: who would get it; `out`: pools that can't be chosen."""

    pools: Sequence[PreparedPool]
    groups: list[str]
    wait_ms: np.ndarray
    dispatch_ms: np.ndarray
    prefill_ms: np.ndarray
    gpus: np.ndarray
    usd_per_ms: np.ndarray
    out: dict[int, Exclusion]


@dataclass(slots=True)
class DecodeSide:
    """All decode pools at this moment. `wait_ms` > 0: no group has room now, None: all have; `itl_ms` is corrected, by `itl_factor`;
    `share`: of a group, that the request would keep from others; `copy_ms`: in which one rank alone would hand over the prompt's KV, and
    `last_layer`: the part of it that is one layer's; both are one number where all pools share a geometry."""

    pools: Sequence[PreparedPool]
    groups: list[str]
    itl_ms: np.ndarray
    wait_ms: np.ndarray | None
    itl_factor: np.ndarray
    transfer_factor: np.ndarray
    copy_ms: np.ndarray | float
    last_layer: np.ndarray | float
    share: np.ndarray
    gpus: np.ndarray
    usd_per_ms: np.ndarray
    out: dict[int, Exclusion]


@dataclass(frozen=True)
class Pairs:
    """What holds whatever the load. `ranks` [P, D]: that copy side by side; `unjoined`: pairs that can't exchange KV."""

    ranks: np.ndarray
    unjoined: dict[tuple[int, int], Exclusion]


def pairs_of(prefills: Sequence[PoolSpec], decodes: Sequence[PoolSpec], not_joinable: Mapping[tuple[str, str], str]) -> Pairs:
    """`not_joinable`: (prefill pool, decode pool) -> reason."""
    ranks = np.array([[float(min(p.tp, d.tp)) for d in decodes] for p in prefills])
    reasons = {(i, j): not_joinable.get((p.name, d.name)) for i, p in enumerate(prefills) for j, d in enumerate(decodes)}
    return Pairs(ranks, {pair: Exclusion(Out.NOT_JOINABLE, reason) for pair, reason in reasons.items() if reason})


@dataclass(frozen=True)
class Aim:
    """What the request wants. SLOs in ms, None for no bound; `latency_weight` in [0, 1]."""

    latency_weight: float
    ttft_slo_ms: float | None = None
    itl_slo_ms: float | None = None


@dataclass
class Decision:
    """The chosen pair and everything needed to explain it. `decodes` None: a first token only, the second index is 0. What only an
    explanation needs is worked out when it is asked for."""

    prefills: PrefillSide
    decodes: DecodeSide | None
    terms: Terms
    scores: np.ndarray
    broken_slo: np.ndarray | None
    pairs: Pairs
    chosen: tuple[int, int]
    aim: Aim
    shape: Shape
    seed: int

    @property
    def prefill_pool(self) -> PoolSpec:
        return self.prefills.pools[self.chosen[0]].spec

    @property
    def decode_pool(self) -> PoolSpec | None:
        return self.decodes.pools[self.chosen[1]].spec if self.decodes is not None else None

    @property
    def wait_ms(self) -> float:
        """Of the prefill queue alone."""
        return float(self.prefills.wait_ms[self.chosen[0]])

    @property
    def prefill_ms(self) -> float:
        return float(self.prefills.prefill_ms[self.chosen[0]])

    @cached_property
    def prediction(self) -> Prediction:
        """Of the chosen pair."""
        return self.prediction_of(self.chosen)

    def prediction_of(self, pair: tuple[int, int]) -> Prediction:
        return self.terms.of_pair(*pair).prediction()

    @cached_property
    def exclusions(self) -> Mapping[tuple[int, int], Exclusion]:
        """Pairs that can't be taken at all."""
        return _exclusions(self.prefills, self.decodes, self.pairs)


def choose(
    profile: Profile, prefills: PrefillSide, decodes: DecodeSide, pairs: Pairs, shape: Shape, aim: Aim, seed: int
) -> Decision:  # fmt: skip
    """Least score wins; equals are spread by the seed.

    Raises: ServingError of the kind that fits if no pair is left
    """
    side = decodes if shape.worst > shape.prompt + 1 else None
    terms = _terms(profile.transfer.fixed_ms, prefills, side, pairs, shape)
    scores = score(terms, aim.latency_weight)
    broken = _broken_slo(terms, aim, scores.shape)
    candidates = _candidates(scores, prefills, side, pairs, broken).ravel()
    best = int(candidates.argmin())
    least = candidates.item(best)
    if least == math.inf:
        raise _nobody(_exclusions(prefills, side, pairs).values(), shape)
    is_equal = candidates <= least * (1 + EQUAL)
    if (count := int(np.count_nonzero(is_equal))) > 1:
        best = is_equal.nonzero()[0].item(spread(seed, count))
    return Decision(prefills, side, terms, scores, broken, pairs, divmod(best, scores.shape[1]), aim, shape, seed)


def _candidates(
    scores: np.ndarray, prefills: PrefillSide, side: DecodeSide | None, pairs: Pairs, broken: np.ndarray | None
) -> np.ndarray:  # fmt: skip
    """Scores, infinite where a pair is out: excluded, without room while another has some, or breaking the SLO while another meets it."""
    full = None if side is None or side.wait_ms is None else np.broadcast_to(side.wait_ms > 0, scores.shape)
    exclusions = _exclusions(prefills, side, pairs)
    if not exclusions and broken is None and full is None:
        return scores
    possible = np.ones(scores.shape, bool)
    for pair in exclusions:
        possible[pair] = False
    for bad in (full, broken):
        better = possible if bad is None else possible & ~bad
        possible = better if better.any() else possible
    return np.where(possible, scores, math.inf)


def spread(seed: int, count: int) -> int:
    """An index below `count`; consecutive seeds visit all indices evenly (golden-ratio steps)."""
    return ((seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) * count) >> 64


def _exclusions(prefills: PrefillSide, decodes: DecodeSide | None, pairs: Pairs) -> Mapping[tuple[int, int], Exclusion]:
    """Pairs that can't be taken at all."""
    found: dict[tuple[int, int], Exclusion] = {}
    if prefills.out:
        columns = len(decodes.pools) if decodes is not None else 1
        found |= {(i, j): out for i, out in prefills.out.items() for j in range(columns)}
    if decodes is None:
        return found
    if decodes.out:
        found |= {(i, j): out for j, out in decodes.out.items() for i in range(len(prefills.pools))}
    return found | pairs.unjoined if found else pairs.unjoined


def _terms(fixed_ms: float, prefills: PrefillSide, decodes: DecodeSide | None, pairs: Pairs, shape: Shape) -> Terms:
    """What `cost_model.predict` says of one pair, for all. `fixed_ms`: of any transfer."""
    queue, dispatch, prefill = prefills.wait_ms[:, None], prefills.dispatch_ms[:, None], prefills.prefill_ms[:, None]
    usd, gpus = prefills.usd_per_ms[:, None], prefills.gpus[:, None]
    if decodes is None:
        return Terms(queue, dispatch, prefill, 0.0, 0.0, 0.0, 0.0, usd, 0.0, gpus, 0.0)
    transfer: np.ndarray | float = 0.0
    if shape.output > 1:
        transfer = visible_transfer_ms(fixed_ms, decodes.copy_ms / pairs.ranks, prefill, decodes.last_layer) * decodes.transfer_factor
    return Terms(
        queue if decodes.wait_ms is None else np.maximum(queue, decodes.wait_ms),
        dispatch,
        prefill,
        transfer,
        decodes.itl_ms,
        (shape.output - 1) * decodes.itl_ms,
        decodes.share,
        usd,
        decodes.usd_per_ms,
        gpus,
        decodes.gpus,
    )


def _broken_slo(terms: Terms, aim: Aim, dims: tuple[int, ...]) -> np.ndarray | None:
    if aim.ttft_slo_ms is None and aim.itl_slo_ms is None:
        return None
    broken = np.zeros(dims, bool)
    if aim.ttft_slo_ms is not None:
        broken |= terms.ttft_ms > aim.ttft_slo_ms
    if aim.itl_slo_ms is not None:
        broken |= terms.itl_ms > aim.itl_slo_ms
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


def explain(decision: Decision, *, everybody: bool = True) -> router_pb2.RouteDecision:
    """Every candidate with its prediction and the reason it won, lost or was out; or the chosen one alone, which costs far less."""
    rows, columns = decision.scores.shape
    pairs = [(i, j) for i in range(rows) for j in range(columns)] if everybody else [decision.chosen]
    return router_pb2.RouteDecision(
        candidates=[_candidate(decision, pair) for pair in pairs],
        latency_weight=decision.aim.latency_weight,
        expected_output_tokens=decision.shape.output,
        seed=decision.seed,
    )


def _candidate(decision: Decision, pair: tuple[int, int]) -> router_pb2.Candidate:
    prefills, decodes = decision.prefills, decision.decodes
    return router_pb2.Candidate(
        prefill_pool=prefills.pools[pair[0]].spec.name,
        decode_pool=decodes.pools[pair[1]].spec.name if decodes else "",
        prefill_group=prefills.groups[pair[0]],
        decode_group=decodes.groups[pair[1]] if decodes else "",
        prediction=to_proto(decision.prediction_of(pair), float(decision.scores[pair])),
        chosen=pair == decision.chosen,
        reason=_reason(decision, pair),
    )


def to_proto(prediction: Prediction, score_value: float) -> router_pb2.Prediction:
    return router_pb2.Prediction(**{name: getattr(prediction, name) for name in Prediction.__dataclass_fields__}, score=score_value)


def _reason(decision: Decision, pair: tuple[int, int]) -> str:
    own, best = float(decision.scores[pair]), float(decision.scores[decision.chosen])
    if pair == decision.chosen:
        return f"chosen: score {own:.4g}"
    if pair in decision.exclusions:
        return f"out: {decision.exclusions[pair]}"
    waits = decision.decodes.wait_ms if decision.decodes is not None else None
    if waits is not None and waits[pair[1]] > 0 and not waits[decision.chosen[1]] > 0:
        return "out: no decode group has room now, others have"
    broken = decision.broken_slo
    if broken is not None and broken[pair] and not broken[decision.chosen]:
        prediction = decision.prediction_of(pair)
        return f"out: breaks the SLO (ttft {prediction.ttft_ms:.1f} ms, itl {prediction.itl_ms:.2f} ms) and another meets it"
    if own <= best * (1 + EQUAL):
        return "equal: the seed chose another"
    return f"lost: score {own / best:.2f}x the least" if best > 0 else "lost"
