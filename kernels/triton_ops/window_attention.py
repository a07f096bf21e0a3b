"""Sliding-window attention with a sink over contiguous K and V: one program serves a few tokens for all query heads of one KV head.

Those heads read the same keys, so each key is loaded once for all of them. A window is a few key tiles, so there is no split and no plan,
and which of them need a mask is known beforehand: the oldest, the newest, and those that begin before the prompt does. The sink starts the
running maximum and sum, hence counts once.
"""

import triton
import triton.language as tl

BLOCK_M, BLOCK_N, NUM_WARPS = 128, 32, 8


@triton.jit(do_not_specialize=["num_tokens", "earlier"])
def _window_attention(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, num_tokens, earlier, sm_scale,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // PADDED_GROUP
    kv_head = tl.program_id(0)
    first = tl.program_id(1) * TOKENS
    row = tl.arange(0, BLOCK_M)
    token = first + row // PADDED_GROUP
    head = kv_head * GROUP + row % PADDED_GROUP
    mask = (token < num_tokens) & (row % PADDED_GROUP < GROUP)
    lane = tl.arange(0, HEAD_DIM)
    at = (token.to(tl.int64) * Q_HEADS + head)[:, None] * HEAD_DIM + lane[None, :]
    q = tl.load(q_ptr + at, mask=mask[:, None], other=0.0).to(DOT)
    scale = sm_scale * LOG2E
    peak = tl.load(sinks_ptr + head, mask=mask, other=0.0) * LOG2E
    total = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
    out = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    for tile in tl.static_range(TILES):
        back = (TILES - tile) * BLOCK_N - TOKENS  # how far the tile begins before the first token
        start = earlier + first - back
        column = start + tl.arange(0, BLOCK_N)
        present = (column >= 0) & (column < earlier + num_tokens)
        source = (column.to(tl.int64)[:, None] * KV_HEADS + kv_head) * HEAD_DIM + lane[None, :]
        k = tl.load(k_ptr + source, mask=present[:, None], other=0.0).to(DOT)
        v = tl.load(v_ptr + source, mask=present[:, None], other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if back + TOKENS - 1 < WINDOW and back >= BLOCK_N - 1:
            if start < 0:
                scores = tl.where((column >= 0)[None, :], scores, float("-inf"))
        else:
            distance = earlier + token[:, None] - column[None, :]
            scores = tl.where((distance >= 0) & (distance < WINDOW) & (column >= 0)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        share = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(share, axis=1)
        out = tl.dot(share.to(DOT), v, out * shrink[:, None], input_precision="ieee")
        peak = higher
    out = out / total[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask[:, None])


def launch_window_attention(
    q, k, v, sinks, out, window_tokens: int, sm_scale: float, *, block_m: int = BLOCK_M, block_n: int = BLOCK_N, num_warps: int = NUM_WARPS
) -> None:
    """q [T, H, D], the last T of S tokens; k, v [S, K, D]; sinks [H] fp32; out [T, H, D]: filled.

    Units: block_m: rows of a program, tokens times query heads of a KV head
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    padded_group = triton.next_power_of_2(q_heads // kv_heads)
    block_tokens = block_m // padded_group
    tiles = triton.cdiv(block_tokens + window_tokens - 1, block_n)
    _window_attention[(kv_heads, triton.cdiv(tokens, block_tokens))](
        q, k, v, sinks, out, tokens, k.shape[0] - tokens, sm_scale,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, PADDED_GROUP=padded_group, HEAD_DIM=head_dim, WINDOW=window_tokens,
        BLOCK_M=block_m, BLOCK_N=block_n, TILES=tiles, DOT=tl.bfloat16 if q.is_cuda else tl.float32, num_warps=num_warps,
    )  # fmt: skip
