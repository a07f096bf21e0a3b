"""Sliding-window attention whose tile holds all query heads of one KV head: fewer keys that no query of the tile may see.

A tile of `TOKENS` tokens times the heads of a group reads TOKENS + window - 1 keys once for all of them; a tile of as many rows of one head
reads two windows. Rows of a tile: token-major, heads within. The sink starts the running maximum and sum, hence counts once.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "earlier"])
def _packed_window_attention(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, num_tokens, earlier, sm_scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    ROWS: tl.constexpr = TOKENS * PADDED_GROUP
    kv_head = tl.program_id(0)
    first_token = tl.program_id(1) * TOKENS
    row = tl.arange(0, ROWS)
    token = first_token + row // PADDED_GROUP
    member = row % PADDED_GROUP
    head = kv_head * GROUP + member
    real = (token < num_tokens) & (member < GROUP)
    lane = tl.arange(0, HEAD_DIM)
    at = (token.to(tl.int64)[:, None] * Q_HEADS + head[:, None]) * HEAD_DIM + lane[None, :]
    q = tl.load(q_ptr + at, mask=real[:, None], other=0.0).to(DOT)
    peak = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0) * LOG2E
    total = tl.full((ROWS,), 1.0, dtype=tl.float32)
    out = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
    position = earlier + token
    last = earlier + num_tokens
    for tile in range(TILES):
        column = earlier + first_token + TOKENS - (TILES - tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        present = (column >= 0) & (column < last)
        source = (column.to(tl.int64)[:, None] * KV_HEADS + kv_head) * HEAD_DIM + lane[None, :]
        k = tl.load(k_ptr + source, mask=present[:, None], other=0.0).to(DOT)
        v = tl.load(v_ptr + source, mask=present[:, None], other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (sm_scale * LOG2E)
        distance = position[:, None] - column[None, :]
        scores = tl.where((distance >= 0) & (distance < WINDOW) & (column >= 0)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        share = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(share, axis=1)
        out = tl.dot(share.to(DOT), v, out * shrink[:, None], input_precision="ieee")
        peak = higher
    out = out / total[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=real[:, None])


def launch_packed_window_attention(
    q, k, v, sinks, out, window_tokens: int, sm_scale: float, *, tokens: int = 16, block_n: int = 32, num_warps: int = 4
) -> None:
    """q [T, H, D], the last T of S tokens; k, v [S, K, D]; sinks [H] fp32; out [T, H, D]: filled. `tokens`: of one tile."""
    num_tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    tiles = triton.cdiv(tokens + window_tokens - 1, block_n)
    _packed_window_attention[(kv_heads, triton.cdiv(num_tokens, tokens))](
        q, k, v, sinks, out, num_tokens, k.shape[0] - num_tokens, sm_scale,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, GROUP=group, PADDED_GROUP=triton.next_power_of_2(group), HEAD_DIM=head_dim,
        WINDOW=window_tokens, TOKENS=tokens, BLOCK_N=block_n, TILES=tiles, DOT=tl.bfloat16 if q.is_cuda else tl.float32,
        num_warps=num_warps,
    )  # fmt: skip
