"""What a request would take on a pair of pools: queue, prefill, transfer, TTFT, ITL, GPU-seconds and dollars.

Pure: numbers in, numbers out; no clock, no I/O. `predict` takes one pair; `choice.py` feeds arrays of all pairs to the same `combine`.
Times come from the profile, corrected by what finished requests taught (`correction.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
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
    """For one pair, or for all: then each field is an array [prefill pools, decode pools] or broadcasts to one."""

    queue_ms: Number
    prefill_ms: Number
    transfer_ms: Number
    ttft_ms: Number
    itl_ms: Number
    gpu_seconds: Number
    cost_usd: Number
    latency_s: Number


@dataclass(frozen=True)
class PreparedPool:
    """A pool with its part of the profile looked up: `curve` for prefill, `surface` for decode."""

    spec: PoolSpec
    curve: Curve | None = None
    surface: Surface | None = None

    @cached_property
    def constants(self) -> tuple[float, ...]:
        """GPUs, their $ per hour, batch places, KV tokens (inf = not known) and layers, for arrays of many pools."""
        spec = self.spec
        layers = spec.kv.num_layers if spec.kv is not None else 1
        return (spec.gpus, spec.gpus * spec.usd_per_gpu_hour, spec.max_batch, spec.capacity_tokens or math.inf, layers)


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
    return float(occupancies(spec.max_batch, spec.capacity_tokens or math.inf, shape.worst))


def occupancies(max_batch: Number, capacity_tokens: Number, worst_tokens: float) -> Number:
    """`occupancy` of many pools."""
    return np.minimum(1.0, np.maximum(1.0 / max_batch, worst_tokens / capacity_tokens))


def visible_transfer_ms(profile: Profile, num_bytes: Number, ranks: Number, prefill: Number, num_layers: Number) -> Number:
    """Transfer that is left after prefill: layers travel while later ones are computed, so the last layer's share always shows."""
    copy = num_bytes / (profile.transfer.gbytes_per_s * 1e6) / ranks
    return profile.transfer.fixed_ms + np.maximum(copy / num_layers, copy - prefill * ((num_layers - 1) / num_layers))


def combine(*, wait: Number, dispatch: Number, prefill: Number, transfer: Number, itl: Number, prefill_usd: Number, decode_usd: Number,
            prefill_gpus: Number, decode_gpus: Number, output: int) -> Prediction:  # fmt: skip
    """The formulas of a pair. `decode_gpus` and `decode_usd` [per GPU-hour x GPUs] are already multiplied by the occupancy.

    A prefill group belongs to one request at a time and is paid whole. A decode group is paid by the share that the request occupies times
    how long: a slower group is a dearer one, so more load never makes a pool look better.
    """
    steps = output - 1
    ttft = wait + dispatch + prefill
    decode = steps * itl
    handover = transfer if steps else 0.0 * transfer
    return Prediction(
        queue_ms=wait,
        prefill_ms=prefill,
        transfer_ms=handover,
        ttft_ms=ttft,
        itl_ms=itl,
        gpu_seconds=(prefill_gpus * prefill + decode_gpus * decode) / 1e3,
        cost_usd=(prefill_usd * prefill + decode_usd * decode) / 3.6e6,
        latency_s=(ttft + handover + decode) / 1e3,
    )


def predict(
    profile: Profile, prefill: PreparedPool, decode: PreparedPool | None, load: PairLoad, shape: Shape, fix: Corrections = Corrections()
) -> Prediction:  # fmt: skip
    """One pair of pools under the load of this moment. `decode` None: only the first token is wanted."""
    took = prefill_ms(prefill, shape.prompt, fix.prefill)
    common = dict(
        wait=load.wait_ms,
        dispatch=fix.dispatch_ms,
        prefill=took,
        prefill_usd=prefill.spec.gpus * prefill.spec.usd_per_gpu_hour,
        prefill_gpus=prefill.spec.gpus,
    )
    if decode is None:
        return combine(**common, transfer=0.0, itl=0.0, decode_usd=0.0, decode_gpus=0.0, output=1)
    kv = decode.spec.kv
    transfer = 0.0
    if kv is not None:
        ranks = min(prefill.spec.tp, decode.spec.tp)
        transfer = float(visible_transfer_ms(profile, kv.handover_bytes(shape.prompt), ranks, took, kv.num_layers)) * fix.transfer
    share = occupancy(decode.spec, shape)
    return combine(
        **common,
        transfer=transfer,
        itl=itl_ms(decode, load, shape, fix.itl),
        decode_usd=share * decode.spec.gpus * decode.spec.usd_per_gpu_hour,
        decode_gpus=share * decode.spec.gpus,
        output=shape.output,
    )


def score(prediction: Prediction, latency_weight: float) -> Number:
    """`latency_s^w x cost_usd^(1-w)`; least wins."""
    return prediction.latency_s**latency_weight * prediction.cost_usd ** (1 - latency_weight)
