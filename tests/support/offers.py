"""Sides of a choice, one pool at a time: what the router's board would say of pools in a given state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.cost_model import PreparedPool, Shape
from cluster.router.choice import DecodeSide, Exclusion, PrefillSide


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
        gpus=np.array([offer.pool.constants[0] for offer in offers], float),
        usd=np.array([offer.pool.constants[1] for offer in offers], float),
        out={i: offer.out for i, offer in enumerate(offers) if offer.out is not None},
    )


def decode_side(offers: Sequence[DecodeOffer], shape: Shape) -> DecodeSide:
    gpus, usd, max_batch, capacity_tokens, layers = np.array([offer.pool.constants for offer in offers], float).T
    geometries = [offer.pool.spec.kv for offer in offers]
    waits = np.array([offer.wait_ms for offer in offers], float)
    return DecodeSide(
        pools=[offer.pool for offer in offers],
        groups=[f"{offer.pool.spec.name}-0" for offer in offers],
        itl_ms=np.array([offer.itl_ms for offer in offers], float),
        wait_ms=waits if waits.any() else None,
        itl_factor=np.ones(len(offers)),
        transfer_factor=np.ones(len(offers)),
        kv_bytes=np.array([float(kv.handover_bytes(shape.prompt)) if kv is not None else 0.0 for kv in geometries]),
        gpus=gpus,
        usd=usd,
        max_batch=max_batch,
        capacity_tokens=capacity_tokens,
        layers=layers,
        out={j: offer.out for j, offer in enumerate(offers) if offer.out is not None},
    )
