"""Row movement around the grouped expert GEMMs: permutation by expert, and SwiGLU with re-quantisation.

Row buffer: experts in order, each starting at a multiple of ALIGN; `ends[e]` is one past expert e's last row. Rows between are never read.
"""

import torch
import triton
import triton.language as tl

from kernels.reference import hidden_scale


@triton.jit(do_not_specialize=["scale_stride", "out_scale_stride", "first_expert"])
def _permute_rows(
    ids_ptr, ranks_ptr, counts_ptr, q_ptr, scale_ptr, rows_ptr, ends_ptr, out_q_ptr, out_scale_ptr, scale_stride, out_scale_stride,
    first_expert, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WORDS: tl.constexpr,
    PADDED_WORDS: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    expert = tl.arange(0, PADDED_EXPERTS)
    count = tl.load(counts_ptr + expert, mask=expert < EXPERTS, other=0)
    aligned = (count + ALIGN - 1) // ALIGN * ALIGN
    start = tl.cumsum(aligned, axis=0) - aligned
    if token == 0:
        tl.store(ends_ptr + expert, start + count, mask=expert < EXPERTS)
    word = tl.arange(0, PADDED_WORDS)
    group = tl.arange(0, PADDED_GROUPS)
    q = tl.load(q_ptr + token.to(tl.int64) * WORDS + word, mask=word < WORDS, other=0)
    scale = tl.load(scale_ptr + group * scale_stride + token, mask=group < GROUPS, other=0.0)
    for k in tl.static_range(TOP_K):
        rank = tl.load(ranks_ptr + token * TOP_K + k)
        local = tl.load(ids_ptr + token * TOP_K + k) - first_expert
        row = tl.sum(tl.where(expert == local, start, 0), axis=0) + rank
        row = tl.where(rank >= 0, row, -1)
        tl.store(rows_ptr + token * TOP_K + k, row)
        tl.store(out_q_ptr + row.to(tl.int64) * WORDS + word, q, mask=(word < WORDS) & (rank >= 0))
        tl.store(out_scale_ptr + group * out_scale_stride + row, scale, mask=(group < GROUPS) & (rank >= 0))


@triton.jit
def _gated(gate, alpha, ON_GPU: tl.constexpr):
    """gate * sigmoid(alpha * gate); on a GPU by its exponential and reciprocal, without the handling of subnormal numbers."""
    if ON_GPU:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [gate * (alpha * -1.4426950408889634)], dtype=tl.float32, is_pure=True, pack=1
        )
        share = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [power + 1.0], dtype=tl.float32, is_pure=True, pack=1)
        return gate * share
    else:
        return gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit(do_not_specialize=["scale_stride"])
def _swiglu_quantize(
    x_ptr, ends_ptr, q_ptr, scale_ptr, scale_stride, alpha, limit, scale,
    INTERMEDIATE: tl.constexpr, GROUPS: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BIAS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * ROWS
    group = tl.program_id(1)
    expert = tl.arange(0, PADDED_EXPERTS)
    end = tl.load(ends_ptr + expert, mask=expert < EXPERTS, other=0)
    previous = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)
    start = (previous + ALIGN - 1) // ALIGN * ALIGN
    used = tl.sum(((first_row >= start) & (first_row < end)).to(tl.int32), axis=0)
    if used > 0:
        row = first_row + tl.arange(0, ROWS)
        column = group * 128 + tl.arange(0, 128)
        pair = group * 256 + tl.arange(0, 256)
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * (2 * INTERMEDIATE) + pair[None, :], mask=(pair < 2 * INTERMEDIATE)[None, :], other=0.0
        )
        gate, up = tl.split(tl.reshape(x.to(tl.float32), (ROWS, 128, 2)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        h = (up + 1.0) * _gated(gate, alpha, ON_GPU)
        q = h * (1.0 / scale)
        if BIAS and group == GROUPS - 1:
            q = tl.where(((column >= INTERMEDIATE) & (column < INTERMEDIATE + BIAS))[None, :], 1.0 / scale, q)
        tl.store(q_ptr + row.to(tl.int64)[:, None] * (GROUPS * 128) + column[None, :], q.to(q_ptr.dtype.element_ty))
        tl.store(scale_ptr + group * scale_stride + row, tl.zeros((ROWS,), dtype=tl.float32) + scale)


def launch_permute_rows(ids, ranks, counts, q, scales, rows, ends, out_q, out_scales, first_expert: int, alignment: int) -> None:
    """q [T, P] fp8 and scales go to their places in out_q [M, P] and out_scales; rows [T, k] and ends [E] int32: filled."""
    tokens, top_k = ids.shape
    words = q.shape[1] // 4
    groups = scales.shape[1]
    experts = counts.shape[0]
    _permute_rows[(tokens,)](
        ids, ranks, counts, q.view(dtype=torch.int32), scales, rows, ends, out_q.view(dtype=torch.int32), out_scales,
        scales.stride(1), out_scales.stride(1), first_expert, EXPERTS=experts, PADDED_EXPERTS=triton.next_power_of_2(experts),
        TOP_K=top_k, WORDS=words, PADDED_WORDS=triton.next_power_of_2(words), GROUPS=groups,
        PADDED_GROUPS=triton.next_power_of_2(groups), ALIGN=alignment, num_warps=4,
    )  # fmt: skip


def launch_swiglu_quantize(
    x,
    ends,
    q,
    scales,
    alpha: float,
    limit: float,
    alignment: int,
    bias_columns: int,
    row_block: int = 16,
    num_warps: int = 4,
) -> None:
    """x [M, 2I] bf16 interleaved -> q [M, P] fp8 and scales [M, P/128]; only row blocks that hold a token are touched."""
    experts = ends.shape[0]
    groups = scales.shape[1]
    _swiglu_quantize[(x.shape[0] // row_block, groups)](
        x, ends, q, scales, scales.stride(1), alpha, limit, hidden_scale(limit), INTERMEDIATE=x.shape[1] // 2, GROUPS=groups, EXPERTS=experts,
        PADDED_EXPERTS=triton.next_power_of_2(experts), ALIGN=alignment, ROWS=row_block, BIAS=bias_columns, ON_GPU=x.is_cuda,
        num_warps=num_warps,
    )  # fmt: skip
