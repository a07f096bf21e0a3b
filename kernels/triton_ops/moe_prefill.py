"""Row movement before the expert products: permutation by expert.

Row buffer: experts in order without gaps; `ends[e]` is one past expert e's last row.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["scale_stride", "out_scale_stride", "first_expert"])
def _permute_rows(
    ids_ptr, ranks_ptr, counts_ptr, q_ptr, scale_ptr, rows_ptr, ends_ptr, out_q_ptr, out_scale_ptr, scale_stride, out_scale_stride,
    first_expert, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WORDS: tl.constexpr,
    PADDED_WORDS: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    expert = tl.arange(0, PADDED_EXPERTS)
    count = tl.load(counts_ptr + expert, mask=expert < EXPERTS, other=0)
    start = tl.cumsum(count, axis=0) - count
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


def launch_permute_rows(ids, ranks, counts, q, scales, rows, ends, out_q, out_scales, first_expert: int) -> None:
    """q [T, P] fp8 and scales go to their places in out_q [M, P] and out_scales; rows [T, k] and ends [E] int32: filled."""
    tokens, top_k = ids.shape
    words = q.shape[1] // 4
    groups = scales.shape[1]
    experts = counts.shape[0]
    _permute_rows[(tokens,)](
        ids, ranks, counts, q.view(dtype=torch.int32), scales, rows, ends, out_q.view(dtype=torch.int32), out_scales,
        scales.stride(1), out_scales.stride(1), first_expert, EXPERTS=experts, PADDED_EXPERTS=triton.next_power_of_2(experts),
        TOP_K=top_k, WORDS=words, PADDED_WORDS=triton.next_power_of_2(words), GROUPS=groups,
        PADDED_GROUPS=triton.next_power_of_2(groups), num_warps=4,
    )  # fmt: skip
