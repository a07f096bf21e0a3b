"""What a request would take on a pair of pools: queue, prefill, transfer, TTFT, ITL, GPU-seconds and dollars.

Pure: numbers in, numbers out; no clock, no I/O. `predict` takes one pair; `choice.py` feeds arrays of all pairs to the same `Terms`.
Times come from the profile, corrected by what finished requests taught (`correction.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.profile import Curve, Profile, Surface, decode_surface, prefill_curve
from common.kv_layout import KVGeometry

Number = Any  # a float, or an array that broadcasts


@dataclass(frozen=True)
class PoolSpec:
    """What all groups of a pool share. Decode pools: `max_batch` sequences and `capacity_tokens` of KV per group, 0 = not known yet."""

    name: str
    tp: int = 1
    ep: int = 1
    weights: str = "mxfp4"
    usd_per_gpu_hour: float = 3.0
    max_batch: int = 128
    capacity_tokens: int = 0
    max_model_len: int = 131072
    kv: KVGeometry | None = None
    kv_version: str = ""  # of checkpoint and KV format: only equal ones exchange KV

    @property
    def gpus(self) -> int:
        return self.tp

    @property
    def usd_per_ms(self) -> float:
        """Of all GPUs of a group."""
        return self.gpus * self.usd_per_gpu_hour / 3.6e6

    @property
    def longest_tokens(self) -> int:
        """Most tokens of one sequence that a group can hold."""
        return min(self.max_model_len, self.capacity_tokens) if self.capacity_tokens else self.max_model_len


@dataclass(frozen=True)
class Shape:
    """The request as the model sees it [tokens]. `prompt`: to prefill; `output`: expected, at least 1; `worst`: prompt + most output."""

    prompt: int
    output: int
    worst: int


@dataclass(frozen=True)
class PairLoad:
    """Load of the moment. `wait_ms`: until a prefill group is free; `batch`, `context_tokens`: running sequences of the decode group and
    the sum of their contexts, own requests on the way included."""

    wait_ms: float = 0.0
    batch: float = 0.0
    context_tokens: float = 0.0


@dataclass(frozen=True)
class Corrections:
    """Factors from `Correction`, and ms between the grant of a group and the first token that are neither queue nor prefill."""

    prefill: float = 1.0
    itl: float = 1.0
    transfer: float = 1.0
    dispatch_ms: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What one pair would take, or what it took."""

    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    ttft_ms: float
    itl_ms: float
    gpu_seconds: float
    cost_usd: float
    latency_s: float


@dataclass(slots=True)
class Terms:
    """What the figures of a pair are made of; the formulas are the properties, worked out only when they are asked for.

    One pair: numbers. All pairs: arrays that broadcast to [prefill pools, decode pools]. `*_usd_per_ms`: of all GPUs of a group. A prefill
    group belongs to one request at a time and is paid whole. Of a decode group the request pays for its `share`, the part that it keeps
    from others, for as long as it takes: a slower group is a dearer one, so more load never makes a pool look better.
    """

    queue_ms: Number
    dispatch_ms: Number
    prefill_ms: Number
    transfer_ms: Number
    itl_ms: Number
    decode_ms: Number
    share: Number
    prefill_usd_per_ms: Number
    decode_usd_per_ms: Number
    prefill_gpus: Number
    decode_gpus: Number

    @property
    def ttft_ms(self) -> Number:
        return self.queue_ms + self.dispatch_ms + self.prefill_ms

    @property
    def latency_s(self) -> Number:
        return (self.ttft_ms + self.decode_ms + self.transfer_ms) / 1e3

    @property
    def gpu_seconds(self) -> Number:
        return (self.prefill_gpus * self.prefill_ms + self.decode_gpus * self.share * self.decode_ms) / 1e3

    @property
    def cost_usd(self) -> Number:
        return self.prefill_usd_per_ms * self.prefill_ms + self.decode_usd_per_ms * self.share * self.decode_ms

    def prediction(self) -> Prediction:
        return Prediction(
            self.queue_ms, self.prefill_ms, self.transfer_ms, self.ttft_ms, self.itl_ms, self.gpu_seconds, self.cost_usd, self.latency_s
        )

    def of_pair(self, row: int, column: int) -> Terms:
        """The numbers of one pair out of the arrays of all."""
        return Terms(*(_at(getattr(self, name), row, column) for name in Terms.__slots__))


@dataclass(frozen=True)
class PreparedPool:
    """A pool with its part of the profile looked up: `curve` for prefill, `surface` for decode."""

    spec: PoolSpec
    curve: Curve | None = None
    surface: Surface | None = None


def prepare_prefill(profile: Profile, spec: PoolSpec) -> PreparedPool:
    return PreparedPool(spec, curve=prefill_curve(profile, spec.tp, spec.ep, spec.weights))


def prepare_decode(profile: Profile, spec: PoolSpec) -> PreparedPool:
    return PreparedPool(spec, surface=decode_surface(profile, spec.tp, spec.ep, spec.weights))


def prefill_ms(pool: PreparedPool, tokens: int, factor: float = 1.0) -> float:
    assert pool.curve is not None
    return pool.curve.at(tokens) * factor


def itl_ms(pool: PreparedPool, load: PairLoad, shape: Shape, factor: float = 1.0) -> float:
    """Step time once the request has joined: batch + 1 sequences, half of its output behind it."""
    assert pool.surface is not None
    return pool.surface.at(load.batch + 1, load.context_tokens + shape.prompt + shape.output / 2) * factor


def occupancy(spec: PoolSpec, shape: Shape) -> float:
    """Share of a decode group that the request keeps from others: a batch place or its worst-case KV, whichever is the larger part."""
    return float(shares(1 / spec.max_batch, 1 / spec.capacity_tokens if spec.capacity_tokens else 0.0, shape.worst))


def shares(place: Number, per_token: Number, worst_tokens: int) -> Number:
    """`occupancy` of many pools. `place`: one of a group's batch places as a part of all; `per_token`: the same of its KV memory."""
    return np.minimum(np.maximum(place, worst_tokens * per_token), 1.0)


def copy_ms(profile: Profile, kv: KVGeometry | None, prompt_tokens: int) -> float:
    """Time in which one rank alone would hand over the KV of a prompt."""
    return kv.handover_bytes(prompt_tokens) / (profile.transfer.gbytes_per_s * 1e6) if kv is not None else 0.0


def visible_transfer_ms(fixed_ms: float, copy: Number, prefill: Number, last_layer: Number) -> Number:
    """Transfer that is left after prefill: layers travel while later ones are computed, so the last layer's part of `copy` always shows."""
    return fixed_ms + np.maximum(copy * last_layer, copy - prefill * (1.0 - last_layer))


def predict(
    profile: Profile, prefill: PreparedPool, decode: PreparedPool | None, load: PairLoad, shape: Shape, fix: Corrections = Corrections()
) -> Prediction:  # fmt: skip
    """One pair of pools under the load of this moment. `decode` None: only the first token is wanted."""
    took, spec = prefill_ms(prefill, shape.prompt, fix.prefill), prefill.spec
    terms = Terms(load.wait_ms, fix.dispatch_ms, took, 0.0, 0.0, 0.0, 0.0, spec.usd_per_ms, 0.0, spec.gpus, 0.0)
    if decode is not None:
        kv = decode.spec.kv
        if kv is not None and shape.output > 1:
            copy = copy_ms(profile, kv, shape.prompt) / min(spec.tp, decode.spec.tp)
            terms.transfer_ms = float(visible_transfer_ms(profile.transfer.fixed_ms, copy, took, 1 / kv.num_layers)) * fix.transfer
        terms.itl_ms = itl_ms(decode, load, shape, fix.itl)
        terms.decode_ms = (shape.output - 1) * terms.itl_ms
        terms.share = occupancy(decode.spec, shape)
        terms.decode_usd_per_ms, terms.decode_gpus = decode.spec.usd_per_ms, decode.spec.gpus
    return terms.prediction()


def score(of: Prediction | Terms, latency_weight: float) -> Number:
    """`latency_s^w x cost_usd^(1-w)`; least wins."""
    return of.latency_s**latency_weight * of.cost_usd ** (1 - latency_weight)


def _at(values: Number, row: int, column: int) -> float:
    if not isinstance(values, np.ndarray):
        return values
    if values.ndim == 1:
        return values.item(column)
    rows, columns = values.shape
    return values.item(row if rows > 1 else 0, column if columns > 1 else 0)
