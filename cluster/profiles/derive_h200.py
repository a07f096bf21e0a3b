"""Derives the first H200 profiles from kernel rates that were measured on one H200, until `tandem sweep` has measured the whole.

`python -m cluster.profiles.derive_h200` rewrites the two files beside this one. Every cell is marked derived and carries its terms.
Routing is taken as uniform; rates are of DeepGEMM (FP8), FlashInfer FA2/FA3 with sinks, and NCCL / symmetric-memory all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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


def prefill_cell(shape: Shape, tokens: int, weights: str, tp: int) -> PrefillCell:
    layers = shape.num_layers
    experts = layers * expert_prefill_ms(shape, tokens, weights, tp)
    full = layers / 2 * (2 * tokens**2 * QO_HEADS * HEAD_DIM / 432e9 + 0.02) / tp  # FA3, causal, 432 TFLOP/s
    sliding = layers / 2 * (tokens * 24.4e-6 + 0.02) / tp  # FA2: 0.20 ms at 8,192 tokens
    dense = layers * max(tokens * 0.0407e-3, HIDDEN * (QKV + HEADS_OUT) / 3.3e9) / tp  # 12 ms for 8,192 x 36
    rest = layers * (tokens * 0.0339e-3 + PREFILL_LAYER_FIXED_MS)  # norms, routing, permutation: 10 ms for 8,192 x 36
    comm = 2 * layers * allreduce_ms(tokens, tp)
    parts = {"experts": experts, "full_attention": full, "sliding_attention": sliding, "dense": dense, "rest": rest, "all_reduce": comm}
    note = " + ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
    return PrefillCell(tokens=tokens, ms=round(sum(parts.values()), 3), how="derived", note=note)


def decode_cell(shape: Shape, batch: int, context: int, weights: str, tp: int) -> DecodeCell:
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
    return DecodeCell(batch=batch, context_tokens=context, ms=round(read + fixed + comm, 3), how="derived", note=note)


def derive(shape: Shape) -> Profile:
    layouts = [(1, 1), (2, 2), (4, 4), (8, 8)]
    formats = ("fp8", "mxfp4")
    return Profile(
        model=shape.name,
        hardware="NVIDIA H200 SXM",
        created="2026-11-30",
        obtained="derived from kernel rates measured on one H200; uniform routing; no whole-model run is in it",
        software={"torch": "2.11.0+cu130", "flashinfer": "0.6.12", "driver": "580"},
        prefill=tuple(
            PrefillTable(tp=tp, ep=ep, weights=w, cells=tuple(prefill_cell(shape, t, w, tp) for t in PREFILL_TOKENS))
            for w in formats
            for tp, ep in layouts
        ),
        decode=tuple(
            DecodeTable(tp=tp, ep=ep, weights=w, cells=tuple(decode_cell(shape, b, c, w, tp) for c in CONTEXTS for b in BATCHES))
            for w in formats
            for tp, ep in layouts
        ),
        transfer=TransferCell(gbytes_per_s=360.0, fixed_ms=1.0, how="derived", note="CUDA IPC scatter over NVLink; fixed part assumed"),
    )


def main() -> None:
    for shape in MODELS:
        save_profile(derive(shape), Path(__file__).parent / f"h200_{shape.name}.json")


if __name__ == "__main__":
    main()
