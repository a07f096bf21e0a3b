"""Which pair of pools takes a request, and why not the others.

Pure and deterministic for a state and a seed. The board (`board.py`) describes each pool by what its best group would offer now; groups of
one pool are alike, so the best group of each pool stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from cluster.cost_model import PoolSpec, Prediction, PreparedPool, Shape, combine, occupancies, score, visible_transfer_ms
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
    `usd`: per hour, of all GPUs of a group; `groups`: who would get it; `out`: pools that can't be chosen."""

    pools: Sequence[PreparedPool]
    groups: list[str]
    wait_ms: np.ndarray
    dispatch_ms: np.ndarray
    prefill_ms: np.ndarray
    gpus: np.ndarray
    usd: np.ndarray
    out: dict[int, Exclusion]


@dataclass(slots=True)
class DecodeSide:
    """All decode pools at this moment. `wait_ms` > 0: no group has room now, None: all have; `itl_ms` is corrected, by `itl_factor`;
    `kv_bytes`: that the prompt hands over. The constants are those of `PreparedPool`."""

    pools: Sequence[PreparedPool]
    groups: list[str]
    itl_ms: np.ndarray
    wait_ms: np.ndarray | None
    itl_factor: np.ndarray
    transfer_factor: np.ndarray
    kv_bytes: np.ndarray
    gpus: np.ndarray
    usd: np.ndarray
    max_batch: np.ndarray
    capacity_tokens: np.ndarray
    layers: np.ndarray
    out: dict[int, Exclusion]


@dataclass(frozen=True)
class Aim:
    """What the request wants. SLOs in ms, None for no bound; `latency_weight` in [0, 1]."""

    latency_weight: float
    ttft_slo_ms: float | None = None
    itl_slo_ms: float | None = None


@dataclass
class Decision:
    """The chosen pair and everything needed to explain it. `decodes` None: a first token only, the second index is 0."""

    prefills: PrefillSide
    decodes: DecodeSide | None
    predictions: Prediction
    scores: np.ndarray
    exclusions: Mapping[tuple[int, int], Exclusion]
    broken_slo: np.ndarray | None
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
        return at_pair(self.predictions, self.chosen)


def choose(
    profile: Profile,
    prefills: PrefillSide,
    decodes: DecodeSide,
    shape: Shape,
    aim: Aim,
    seed: int,
    not_joinable: Mapping[tuple[str, str], str],
) -> Decision:
    """Least score wins; equals are spread by the seed. `not_joinable`: (prefill pool, decode pool) -> reason.

    Raises: ServingError of the kind that fits if no pair is left
    """
    side = decodes if shape.worst > shape.prompt + 1 else None
    dims = (len(prefills.pools), len(side.pools) if side is not None else 1)
    exclusions = _exclusions(prefills, side, not_joinable, dims)
    if len(exclusions) == dims[0] * dims[1]:
        raise _nobody(exclusions.values(), shape)
    predictions = _predict_pairs(profile, prefills, side, shape)
    scores = score(predictions, aim.latency_weight)
    broken = _broken_slo(predictions, aim, dims)
    candidates = _preferred(scores, exclusions, side, broken).ravel()
    best = int(candidates.argmin())
    (equals,) = (candidates <= candidates[best] * (1 + EQUAL)).nonzero()
    row, column = divmod(int(equals[spread(seed, len(equals))]) if len(equals) > 1 else best, dims[1])
    return Decision(prefills, side, predictions, scores, exclusions, broken, (row, column), aim, shape, seed)


def _preferred(scores: np.ndarray, exclusions, side: DecodeSide | None, broken: np.ndarray | None) -> np.ndarray:
    """Scores, infinite where a pair is out: excluded, without room while another has some, or breaking the SLO while another meets it."""
    waiting = side.wait_ms if side is not None else None
    if not exclusions and broken is None and waiting is None:
        return scores
    possible = np.ones(scores.shape, bool)
    for pair in exclusions:
        possible[pair] = False
    for bad in (None if waiting is None else np.broadcast_to(waiting > 0, scores.shape), broken):
        better = possible if bad is None else possible & ~bad
        possible = better if better.any() else possible
    return np.where(possible, scores, np.inf)


def spread(seed: int, count: int) -> int:
    """An index below `count`; consecutive seeds visit all indices evenly (golden-ratio steps)."""
    return ((seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) * count) >> 64


def at_pair(predictions: Prediction, pair: tuple[int, int]) -> Prediction:
    """The scalars of one pair out of the arrays of all."""

    def pick(x) -> float:
        if np.ndim(x) < 2:
            return float(x[pair[1]] if np.ndim(x) else x)
        return float(x[pair[0] if x.shape[0] > 1 else 0, pair[1] if x.shape[1] > 1 else 0])

    return Prediction(**{name: pick(getattr(predictions, name)) for name in Prediction.__dataclass_fields__})


def _exclusions(
    prefills: PrefillSide, decodes: DecodeSide | None, not_joinable: Mapping[tuple[str, str], str], dims: tuple[int, int]
) -> dict[tuple[int, int], Exclusion]:  # fmt: skip
    found: dict[tuple[int, int], Exclusion] = {}
    for i, out in prefills.out.items():
        found.update(((i, j), out) for j in range(dims[1]))
    if decodes is None:
        return found
    for j, out in decodes.out.items():
        found.update(((i, j), out) for i in range(dims[0]))
    if not_joinable:
        for i, prefill in enumerate(prefills.pools):
            for j, decode in enumerate(decodes.pools):
                if reason := not_joinable.get((prefill.spec.name, decode.spec.name)):
                    found[i, j] = Exclusion(Out.NOT_JOINABLE, reason)
    return found


def _predict_pairs(profile: Profile, prefills: PrefillSide, decodes: DecodeSide | None, shape: Shape) -> Prediction:
    """`cost_model.predict` for all pairs at once."""
    wait, dispatch, prefill = prefills.wait_ms[:, None], prefills.dispatch_ms[:, None], prefills.prefill_ms[:, None]
    gpus, usd = prefills.gpus[:, None], prefills.usd[:, None]
    if decodes is None:
        return combine(wait=wait, dispatch=dispatch, prefill=prefill, transfer=0.0, itl=0.0, prefill_usd=usd, decode_usd=0.0,
                       prefill_gpus=gpus, decode_gpus=0.0, output=1)  # fmt: skip
    share = occupancies(decodes.max_batch, decodes.capacity_tokens, shape.worst)
    ranks = np.minimum(gpus, decodes.gpus)
    return combine(
        wait=wait if decodes.wait_ms is None else np.maximum(wait, decodes.wait_ms),
        dispatch=dispatch,
        prefill=prefill,
        transfer=visible_transfer_ms(profile, decodes.kv_bytes, ranks, prefill, decodes.layers) * decodes.transfer_factor,
        itl=decodes.itl_ms,
        prefill_usd=usd,
        decode_usd=share * decodes.usd,
        prefill_gpus=gpus,
        decode_gpus=share * decodes.gpus,
        output=shape.output,
    )


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
        prediction=to_proto(at_pair(decision.predictions, pair), float(decision.scores[pair])),
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
        prediction = at_pair(decision.predictions, pair)
        return f"out: breaks the SLO (ttft {prediction.ttft_ms:.1f} ms, itl {prediction.itl_ms:.2f} ms) and another meets it"
    if own <= best * (1 + EQUAL):
        return "equal: the seed chose another"
    return f"lost: score {own / best:.2f}x the least" if best > 0 else "lost"
