"""Sides of a choice, one pool at a time: what the router's board would say of pools in a given state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.cost_model import PreparedPool, Shape, copy_ms, occupancy
from cluster.profile import Profile
from cluster.router.choice import DecodeSide, Exclusion, Pairs, PrefillSide, pairs_of


@dataclass(frozen=True)
class PrefillOffer:
    pool: PreparedPool
    wait_ms: float
    prefill_ms: float
    out: Exclusion | None = None


@dataclass(frozen=True)
class DecodeOffer:
    pool: PreparedPool
    itl_ms: float
    wait_ms: float = 0.0
    out: Exclusion | None = None


def prefill_side(offers: Sequence[PrefillOffer]) -> PrefillSide:
    return PrefillSide(
        pools=[offer.pool for offer in offers],
        groups=[f"{offer.pool.spec.name}-0" for offer in offers],
        wait_ms=np.array([offer.wait_ms for offer in offers], float),
        dispatch_ms=np.zeros(len(offers)),
        prefill_ms=np.array([offer.prefill_ms for offer in offers], float),
        gpus=np.array([offer.pool.spec.gpus for offer in offers], float),
        usd_per_ms=np.array([offer.pool.spec.usd_per_ms for offer in offers]),
        out={i: offer.out for i, offer in enumerate(offers) if offer.out is not None},
    )


def decode_side(offers: Sequence[DecodeOffer], shape: Shape, profile: Profile) -> DecodeSide:
    specs = [offer.pool.spec for offer in offers]
    waits = np.array([offer.wait_ms for offer in offers], float)
    return DecodeSide(
        pools=[offer.pool for offer in offers],
        groups=[f"{spec.name}-0" for spec in specs],
        itl_ms=np.array([offer.itl_ms for offer in offers], float),
        wait_ms=waits if waits.any() else None,
        itl_factor=np.ones(len(offers)),
        transfer_factor=np.ones(len(offers)),
        copy_ms=np.array([copy_ms(profile, spec.kv, shape.prompt) for spec in specs]),
        last_layer=np.array([1 / spec.kv.num_layers if spec.kv is not None else 1.0 for spec in specs]),
        share=np.array([occupancy(spec, shape) for spec in specs]),
        gpus=np.array([spec.gpus for spec in specs], float),
        usd_per_ms=np.array([spec.usd_per_ms for spec in specs]),
        out={j: offer.out for j, offer in enumerate(offers) if offer.out is not None},
    )


def pairs(prefills: Sequence[PrefillOffer], decodes: Sequence[DecodeOffer], not_joinable: Mapping[tuple[str, str], str]) -> Pairs:
    return pairs_of([offer.pool.spec for offer in prefills], [offer.pool.spec for offer in decodes], not_joinable)
