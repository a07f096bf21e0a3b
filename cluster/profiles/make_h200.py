"""Makes the shipped H200 profiles: what the benchmarks measured on one H200, and between and beyond it what kernel rates say.

`python -m cluster.profiles.make_h200` rewrites the two files beside this one from the newest records in `benchmarks/results/`. A cell that
has a record is the record's. Every other one is derived from rates of single kernels (DeepGEMM, FlashInfer with sinks, NCCL and
symmetric-memory all-reduce; uniform routing), times what the records of its table's kind say of such cells: measured / derived, between
records by the logarithm of tokens or batch; what ranks spend on each other is not scaled. Its note has the terms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.profile import DecodeCell, DecodeTable, PrefillCell, PrefillTable, Profile, TransferCell, save_profile

HIDDEN, INTERMEDIATE, QKV, HEADS_OUT, VOCAB, TOP_K, HEAD_DIM, QO_HEADS, KV_HEADS, WINDOW = 2880, 2880, 5120, 4096, 201088, 4, 64, 64, 8, 128
COPY_BYTES_PER_MS = 4.3e9
DECODE_EFFICIENCY = 0.85  # assumed share of the copy bandwidth that a whole decode step reaches
DECODE_LAYER_FIXED_MS = 0.030  # assumed kernels of one layer inside a CUDA graph
PREFILL_LAYER_FIXED_MS = 0.10  # assumed launches of one layer
EXPERT_PARAMS = 3 * HIDDEN * INTERMEDIATE
BYTES_PER_PARAM = {"fp8": 1.03, "mxfp4": 4.25 / 8}
PREFILL_TOKENS = (1, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (1024, 8192, 32768)
SWEPT_CONTEXT = 8192
FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "benchmarks" / "results"

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    name: str
    num_layers: int
    num_experts: int


MODELS = (Shape("gpt-oss-120b", 36, 128), Shape("gpt-oss-20b", 24, 32))


def experts_hit(shape: Shape, tokens: int) -> float:
    return shape.num_experts * (1 - (1 - TOP_K / shape.num_experts) ** tokens)


def expert_prefill_ms(shape: Shape, tokens: int, weights: str, tp: int) -> float:
    """Both expert GEMMs of one layer on one of `tp` ranks: compute-bound or weight-bound, whichever is longer."""
    flops = 2 * EXPERT_PARAMS * TOP_K * tokens / tp
    read_bytes = experts_hit(shape, tokens) * EXPERT_PARAMS * BYTES_PER_PARAM[weights] / tp
    if weights == "mxfp4":
        return max(flops / 557e9, read_bytes / 2.9e9)  # W4A16: 557 TFLOP/s, 2.9 TB/s
    rows = TOP_K * tokens / shape.num_experts
    tflops = 1183 + min(max((rows - 256) / 768, 0.0), 1.0) * 187  # 1,183 at 256 rows per expert, 1,370 at 1,024
    return max(flops / (tflops * 1e9), read_bytes / 3.3e9)


def allreduce_ms(tokens: int, tp: int) -> float:
    """One sum over `tp` ranks of `[tokens, hidden]` bf16: latency (8 us in a graph) plus bytes over NVLink (302 GB/s)."""
    return 0.0 if tp == 1 else 0.008 + 2 * (tp - 1) / tp * tokens * HIDDEN * 2 / 302e6


@dataclass(frozen=True)
class Estimate:
    """`own_ms`: what a rank computes and reads; `comm_ms`: what ranks spend on each other."""

    own_ms: float
    comm_ms: float
    note: str


def prefill_estimate(shape: Shape, tokens: int, weights: str, tp: int) -> Estimate:
    layers = shape.num_layers
    experts = layers * expert_prefill_ms(shape, tokens, weights, tp)
    full = layers / 2 * (2 * tokens**2 * QO_HEADS * HEAD_DIM / 432e9 + 0.02) / tp  # FA3, causal, 432 TFLOP/s
    sliding = layers / 2 * (tokens * 24.4e-6 + 0.02) / tp  # FA2: 0.20 ms at 8,192 tokens
    dense = layers * max(tokens * 0.0407e-3, HIDDEN * (QKV + HEADS_OUT) / 3.3e9) / tp  # 12 ms for 8,192 x 36
    rest = layers * (tokens * 0.0339e-3 + PREFILL_LAYER_FIXED_MS)  # norms, routing, permutation: 10 ms for 8,192 x 36
    comm = 2 * layers * allreduce_ms(tokens, tp)
    parts = {"experts": experts, "full_attention": full, "sliding_attention": sliding, "dense": dense, "rest": rest, "all_reduce": comm}
    return Estimate(sum(parts.values()) - comm, comm, " + ".join(f"{name} {ms:.2f}" for name, ms in parts.items()))


def decode_estimate(shape: Shape, batch: int, context: int, weights: str, tp: int) -> Estimate:
    layers = shape.num_layers
    imbalance = 1.0 if tp == 1 else 1.15
    experts = layers * experts_hit(shape, batch) * EXPERT_PARAMS * BYTES_PER_PARAM[weights] / tp * imbalance
    dense = (layers * HIDDEN * (QKV + HEADS_OUT) + VOCAB * HIDDEN) * 2 / tp
    row = 2 * KV_HEADS * HEAD_DIM * 2
    kv = layers / 2 * batch * (context + min(context, WINDOW)) * row / tp
    read = (experts + dense + kv) / (DECODE_EFFICIENCY * COPY_BYTES_PER_MS)
    fixed = layers * DECODE_LAYER_FIXED_MS
    comm = 2 * layers * allreduce_ms(batch, tp)
    total_gb = (experts + dense + kv) / 1e9
    note = f"bytes {total_gb:.2f} GB / ({DECODE_EFFICIENCY} x 4.3 TB/s) {read:.2f} + layers {fixed:.2f} + all_reduce {comm:.2f}"
    return Estimate(read + fixed, comm, note)


def newest(records: Sequence[Record], shape: Shape, weights: str, *key: str) -> dict[tuple[int, ...], Record]:
    """The last record of each point that one GPU was measured at. Returns: by the values of `key`"""
    mine = [r for r in records if (r["model"], r["layout"], r["weights"]) == (shape.name, "tp1", weights)]
    return {tuple(r[name] for name in key): r for r in mine}


class Correction:
    """Measured over derived, along one axis: between two points by the logarithm, beyond them that of the last. Without points: 1."""

    def __init__(self, points: Mapping[int, float]):
        self._points = sorted(points.items())

    def at(self, x: int) -> float:
        if not self._points:
            return 1.0
        after = next((i for i, (known, _) in enumerate(self._points) if known >= x), len(self._points))
        if after == 0 or after == len(self._points):
            return self._points[min(after, len(self._points) - 1)][1]
        (left, low), (right, high) = self._points[after - 1], self._points[after]
        return low + (high - low) * math.log(x / left) / math.log(right / left)


def cell_fields(estimate: Estimate, correction: float, record: Record | None) -> dict[str, Any]:
    if record is not None:
        spread = round(record["max_ms"] - record["min_ms"], 3)
        note = f"one H200, {record['date']}, commit {record['commit']}"
        return {"ms": round(record["median_ms"], 3), "spread_ms": spread, "how": "measured", "note": note}
    note = estimate.note if correction == 1.0 else f"({estimate.note}), all but all_reduce x {correction:.3f} as measured beside it"
    return {"ms": round(estimate.own_ms * correction + estimate.comm_ms, 3), "how": "derived", "note": note}


def prefill_table(shape: Shape, weights: str, tp: int, ep: int, records: Sequence[Record]) -> PrefillTable:
    measured = newest(records, shape, weights, "tokens")
    ratio = Correction({n: r["median_ms"] / _whole(prefill_estimate(shape, n, weights, 1)) for (n,), r in measured.items()})
    cells = [
        PrefillCell(tokens=n, **cell_fields(prefill_estimate(shape, n, weights, tp), ratio.at(n), measured.get((n,)) if tp == 1 else None))
        for n in PREFILL_TOKENS
    ]
    return PrefillTable(tp=tp, ep=ep, weights=weights, cells=tuple(cells))


def decode_table(shape: Shape, weights: str, tp: int, ep: int, records: Sequence[Record]) -> DecodeTable:
    """The correction is that of the context that was measured at several batches."""
    measured = newest(records, shape, weights, "batch", "context")
    ratio = Correction(
        {b: r["median_ms"] / _whole(decode_estimate(shape, b, c, weights, 1)) for (b, c), r in measured.items() if c == SWEPT_CONTEXT}
    )
    cells = [
        DecodeCell(
            batch=b, context_tokens=c,
            **cell_fields(decode_estimate(shape, b, c, weights, tp), ratio.at(b), measured.get((b, c)) if tp == 1 else None),
        )
        for c in CONTEXTS
        for b in BATCHES
    ]  # fmt: skip
    return DecodeTable(tp=tp, ep=ep, weights=weights, cells=tuple(cells))


def _whole(estimate: Estimate) -> float:
    return estimate.own_ms + estimate.comm_ms


def transfer_cell(records: Sequence[Record]) -> TransferCell:
    rate = [r for r in records if r.get("transport") == "cuda_ipc" and r.get("tp_from") == r.get("tp_to") == 1][-1]
    note = f"rate: CUDA IPC over NVLink, two H200s, {rate['date']}, commit {rate['commit']}; fixed part assumed"
    return TransferCell(gbytes_per_s=rate["gb_per_s"], fixed_ms=1.0, how="derived", note=note)


def make(shape: Shape) -> Profile:
    layouts = [(1, 1), (2, 2), (4, 4), (8, 8)]
    formats = ("fp8", "mxfp4")
    prefill, decode, transfer = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("prefill", "decode", "transfer_gpu"))
    used = [r for r in [*prefill, *decode] if r["model"] == shape.name]
    return Profile(
        model=shape.name,
        hardware="NVIDIA H200 SXM",
        created=max(r["date"] for r in used),
        obtained="measured on one H200 where a cell says so; the others derived from kernel rates, scaled by what was measured beside them",
        software={"torch": used[-1]["torch"], "flashinfer": "0.6.12", "driver": "580"},
        prefill=tuple(prefill_table(shape, w, tp, ep, prefill) for w in formats for tp, ep in layouts),
        decode=tuple(decode_table(shape, w, tp, ep, decode) for w in formats for tp, ep in layouts),
        transfer=transfer_cell(transfer),
    )


def main() -> None:
    for shape in MODELS:
        save_profile(make(shape), FOLDER / f"h200_{shape.name}.json")


if __name__ == "__main__":
    main()
