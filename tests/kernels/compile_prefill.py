"""Cross-compiles every Triton prefill kernel for Hopper at the real model's shapes. A process of its own, never in interpreter mode."""

from __future__ import annotations

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton_ops import moe_prefill, norm, quantize, rope_kv, router, window_attention

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"bf16": "*bf16", "fp8": "*fp8e4nv", "f32": "*fp32", "i32": "*i32"}


def compile_kernel(kernel, pointers: str, scalars: str = "", **constants) -> str:
    """`pointers` and `scalars`: types of the arguments that are no constants, in order; all divisible by 16. Returns the PTX."""
    types = [POINTERS[p] for p in pointers.split()] + scalars.split()
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(types), f"{kernel.__name__}: {names} against {types}"
    signature = dict(zip(names, types, strict=True)) | {name: "constexpr" for name in constants}
    attrs = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*") or t == "i32"}
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}, attrs=attrs)
    return triton.compile(source, target=HOPPER, options={"num_warps": 4}).asm["ptx"]


def main() -> None:
    row = {"COLUMNS": 2880, "GROUPS": 23, "PADDED_GROUPS": 32, "BIAS": 32}
    experts = {"EXPERTS": 128, "PADDED_EXPERTS": 128}
    built = {
        "quantize_rows": compile_kernel(quantize._quantize_rows, "bf16 fp8 f32", "i32 i32", **row),
        "add_norm_quantize": compile_kernel(
            norm._add_norm_quantize, "bf16 bf16 bf16 bf16 fp8 f32 f32", "i32 fp32",
            HAS_DELTA=True, HAS_BIAS=True, HAS_INVERSE=True, FP8=True, **row,
        ),
        "combine_norm_quantize": compile_kernel(
            norm._combine_norm_quantize, "bf16 bf16 i32 f32 bf16 bf16 fp8 f32", "i32 fp32", COLUMNS=2880, GROUPS=23, PADDED_GROUPS=32,
            TOP_K=4, HAS_RESIDUAL=True, HAS_NORM=True, HAS_BIAS=True, FP8=True,
        ),
        "rope_write_kv": compile_kernel(
            rope_kv._rope_write_kv, "bf16 f32 f32 i32 i32 bf16 bf16 bf16 bf16", "i32",
            Q_HEADS=64, KV_HEADS=8, PADDED_Q=64, PADDED_KV=8, HEAD_DIM=64, BLOCK_SIZE=16, HAS_BIAS=True, HAS_ROWS=True,
        ),
        "choose": compile_kernel(
            router._choose, "f32 f32 bf16 f32 i32 f32 i32 i32 i32", "i32 i32 i32",
            TOP_K=4, PADDED_K=4, HAS_OFFSET=True, HAS_NUM_TOKENS=True, BLOCK_T=8, **experts,
        ),
        "window_attention": compile_kernel(
            window_attention._window_attention, "bf16 bf16 bf16 f32 bf16", "i32 i32 fp32",
            Q_HEADS=64, KV_HEADS=8, PADDED_GROUP=8, HEAD_DIM=64, WINDOW=128, BLOCK_M=128, BLOCK_N=32, TILES=5, DOT=tl.bfloat16,
        ),
        "permute_rows": compile_kernel(
            moe_prefill._permute_rows, "i32 i32 i32 i32 f32 i32 i32 i32 f32", "i32 i32 i32",
            TOP_K=4, WORDS=736, PADDED_WORDS=1024, GROUPS=1, PADDED_GROUPS=1, **experts,
        ),
    }  # fmt: skip
    for name, ptx in built.items():
        sys.stdout.write(f"{name} {len(ptx)} {'wgmma' if 'wgmma' in ptx else 'mma.sync' if 'mma.sync' in ptx else '-'}\n")
    if len(sys.argv) > 1:
        for name, ptx in built.items():
            with open(f"{sys.argv[1]}/{name}.ptx", "w") as f:
                f.write(ptx)


if __name__ == "__main__":
    main()
