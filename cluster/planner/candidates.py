"""Configurations that could carry a load: layouts of the profile, with the fewest groups that arithmetic allows, and a few more.

Pure. Too optimistic on purpose: what is left out here can't work; what is kept is simulated by `plan.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cluster.cost_model import PoolSpec, prepare_decode, prepare_prefill
from cluster.load.arrivals import Load
from cluster.profile import DecodeTable, PrefillTable, Profile
from cluster.sim.deployment import spec_for
from cluster.sim.simulation import PoolPlan

MORE_GROUPS = 3  # beyond the fewest that could do
FULL = 0.95  # utilisation that nobody can go beyond
SAMPLE = 400  # requests that lengths are judged by


@dataclass(frozen=True)
class Slo:
    """`attainment`: part of the requests that must have a TTFT and a mean ITL within the bounds [ms]."""

    ttft_ms: float
    itl_ms: float
    attainment: float = 0.95


@dataclass(frozen=True)
class Candidate:
    kind: Literal["disaggregated", "aggregated"]
    plans: tuple[PoolPlan, ...]

    @property
    def gpus(self) -> int:
        return sum(plan.groups * plan.spec.gpus for plan in self.plans)

    @property
    def usd_per_hour(self) -> float:
        return sum(plan.groups * plan.spec.gpus * plan.spec.usd_per_gpu_hour for plan in self.plans)

    @property
    def label(self) -> str:
        return " + ".join(
            f"{plan.groups} x {plan.spec.name.partition('-')[2] or plan.spec.name} {plan.role if self.kind == 'disaggregated' else 'both'}"
            for plan in self.plans
        )


def candidates(profile: Profile, load: Load, slo: Slo, gpus: int, usd_per_gpu_hour: float) -> list[Candidate]:
    """Those within `gpus`, cheapest first."""
    prompts, outputs = load.prompt_tokens[:SAMPLE], load.output_tokens[:SAMPLE]
    prefills = [
        (spec, fewest)
        for table in profile.prefill
        if (fewest := _fewest_prefill(profile, spec := _spec(profile, "prefill", table, usd_per_gpu_hour), load.rate, prompts, slo))
    ]
    decodes = [
        (spec, fewest)
        for table in profile.decode
        if (fewest := _fewest_decode(profile, spec := _spec(profile, "decode", table, usd_per_gpu_hour), load.rate, prompts, outputs, slo))
    ]
    found = [*_pairs(prefills, decodes), *_aggregated(profile, load.rate, prompts, outputs, slo, usd_per_gpu_hour)]
    return sorted((c for c in found if c.gpus <= gpus), key=lambda c: (c.usd_per_hour, c.kind, c.label))


def _pairs(prefills: list[tuple[PoolSpec, int]], decodes: list[tuple[PoolSpec, int]]) -> Iterator[Candidate]:
    for (prefill, least_p), (decode, least_d) in itertools.product(prefills, decodes):
        for more_p, more_d in itertools.product(range(MORE_GROUPS), range(MORE_GROUPS)):
            yield Candidate("disaggregated", (PoolPlan("prefill", prefill, least_p + more_p), PoolPlan("decode", decode, least_d + more_d)))


def _aggregated(
    profile: Profile, rate: float, prompts: np.ndarray, outputs: np.ndarray, slo: Slo, usd_per_gpu_hour: float
) -> Iterator[Candidate]:  # fmt: skip
    for table in profile.decode:
        spec = _spec(profile, "both", table, usd_per_gpu_hour)
        decode = _decode_load(profile, spec, rate, prompts, outputs, slo)
        if not spec.capacity_tokens or decode is None or not _fewest_prefill(profile, spec, rate, prompts, slo):
            continue
        least = max(1, math.ceil((_prefill_load(profile, spec, rate, prompts) + decode) / FULL))
        for more in range(2 * MORE_GROUPS):
            yield Candidate("aggregated", (PoolPlan("decode", spec, least + more),))


def _fewest_prefill(profile: Profile, spec: PoolSpec, rate: float, prompts: np.ndarray, slo: Slo) -> int:
    """0: this layout is too slow for the SLO however many there are."""
    curve = prepare_prefill(profile, spec).curve
    assert curve is not None
    within = np.mean([curve.at(int(n)) <= slo.ttft_ms for n in prompts])
    if within < slo.attainment:
        return 0
    return max(1, math.ceil(_prefill_load(profile, spec, rate, prompts) / FULL))


def _prefill_load(profile: Profile, spec: PoolSpec, rate: float, prompts: np.ndarray) -> float:
    """Groups that are busy all the time."""
    curve = prepare_prefill(profile, spec).curve
    assert curve is not None
    return rate * float(np.mean([curve.at(int(n)) for n in prompts])) / 1e3


def _fewest_decode(profile: Profile, spec: PoolSpec, rate: float, prompts: np.ndarray, outputs: np.ndarray, slo: Slo) -> int:
    load = _decode_load(profile, spec, rate, prompts, outputs, slo)
    return 0 if load is None else max(1, math.ceil(load / FULL))


def _decode_load(profile: Profile, spec: PoolSpec, rate: float, prompts: np.ndarray, outputs: np.ndarray, slo: Slo) -> float | None:
    """Groups that are busy with the largest batch that the ITL and the KV memory allow. None: not even one sequence is fast enough."""
    surface = prepare_decode(profile, spec).surface
    assert surface is not None
    context, output = float(np.mean(prompts)) + float(np.mean(outputs)) / 2, float(np.mean(outputs))
    room = spec.capacity_tokens / (context + output / 2) if spec.capacity_tokens else spec.max_batch
    fitting = [b for b in range(1, int(min(spec.max_batch, room)) + 1) if surface.at(b, b * context) <= slo.itl_ms]
    if not fitting:
        return None
    batch = fitting[-1]
    return rate * (output - 1) * surface.at(batch, batch * context) / 1e3 / batch


def _spec(profile: Profile, role: str, table: PrefillTable | DecodeTable, usd_per_gpu_hour: float) -> PoolSpec:
    layout = f"TP{table.tp}{f'EP{table.ep}' if table.ep > 1 else ''} {table.weights}"
    return spec_for(profile, f"{role}-{layout}", table.tp, table.ep, table.weights, usd_per_gpu_hour)
