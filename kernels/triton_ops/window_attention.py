"""Sliding-window attention with a sink over contiguous K and V: one program serves one query tile of one head.

A window is at most a few key tiles, so there is no split and no plan. The sink starts the running maximum and sum, hence counts once.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "earlier"])
def _window_attention(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, num_tokens, earlier, sm_scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(0)
    first_row = tl.program_id(1) * BLOCK_M
    kv_head = head // (Q_HEADS // KV_HEADS)
    row = first_row + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, HEAD_DIM)
    at = (row.to(tl.int64)[:, None] * Q_HEADS + head) * HEAD_DIM + lane[None, :]
    q = tl.load(q_ptr + at, mask=(row < num_tokens)[:, None], other=0.0).to(DOT)
    peak = tl.zeros((BLOCK_M,), dtype=tl.float32) + tl.load(sinks_ptr + head) * LOG2E
    total = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
    out = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    for tile in tl.static_range(TILES):
        start = earlier + first_row + BLOCK_M - (TILES - tile) * BLOCK_N
        column = start + tl.arange(0, BLOCK_N)
        present = (column >= 0) & (column < earlier + num_tokens)
        source = (column.to(tl.int64)[:, None] * KV_HEADS + kv_head) * HEAD_DIM + lane[None, :]
        k = tl.load(k_ptr + source, mask=present[:, None], other=0.0).to(DOT)
        v = tl.load(v_ptr + source, mask=present[:, None], other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (sm_scale * LOG2E)
        distance = earlier + row[:, None] - column[None, :]
        scores = tl.where((distance >= 0) & (distance < WINDOW) & (column >= 0)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        share = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(share, axis=1)
        out = tl.dot(share.to(DOT), v, out * shrink[:, None], input_precision="ieee")
        peak = higher
    out = out / total[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(row < num_tokens)[:, None])


def launch_window_attention(
    q, k, v, sinks, out, window_tokens: int, sm_scale: float, *, block_m: int = 64, block_n: int = 64, num_warps: int = 4
) -> None:
    """q [T, H, D], the last T of S tokens; k, v [S, K, D]; sinks [H] fp32; out [T, H, D]: filled."""
    tokens, q_heads, head_dim = q.shape
    tiles = triton.cdiv(block_m + window_tokens - 1, block_n)
    _window_attention[(q_heads, triton.cdiv(tokens, block_m))](
        q, k, v, sinks, out, tokens, k.shape[0] - tokens, sm_scale,
        Q_HEADS=q_heads, KV_HEADS=k.shape[1], HEAD_DIM=head_dim, WINDOW=window_tokens,
        BLOCK_M=block_m, BLOCK_N=block_n, TILES=tiles, DOT=tl.bfloat16 if q.is_cuda else tl.float32, num_warps=num_warps,
    )  # fmt: skip
