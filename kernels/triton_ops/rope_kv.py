"""Bias, rotary embedding and the K/V writes (paged, and on request as plain rows) of one token's QKV row in one pass."""

import triton
import triton.language as tl


@triton.jit
def _load_heads(qkv_ptr, bias_ptr, first_column, head, lane, mask, HAS_BIAS: tl.constexpr, HEAD_DIM: tl.constexpr):
    at = first_column + head[:, None] * HEAD_DIM + lane[None, :]
    x = tl.load(qkv_ptr + at, mask=mask[:, None], other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + at, mask=mask[:, None], other=0.0).to(tl.float32)
    return x


@triton.jit
def _rope_write_kv(
    qkv_ptr, bias_ptr, cos_sin_ptr, positions_ptr, slots_ptr, q_out_ptr, kv_pool_ptr, k_rows_ptr, v_rows_ptr, qkv_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PADDED_Q: tl.constexpr, PADDED_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    source = qkv_ptr + row * qkv_stride
    half = tl.arange(0, HALF)
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + half)[None, :]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HALF + half)[None, :]

    head = tl.arange(0, PADDED_Q)
    mask = head < Q_HEADS
    low = _load_heads(source, bias_ptr, 0, head, half, mask, HAS_BIAS, HEAD_DIM)
    high = _load_heads(source, bias_ptr, HALF, head, half, mask, HAS_BIAS, HEAD_DIM)
    out = q_out_ptr + row * (Q_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + half[None, :]
    element = q_out_ptr.dtype.element_ty
    tl.store(out, (low * cos - high * sin).to(element), mask=mask[:, None])
    tl.store(out + HALF, (high * cos + low * sin).to(element), mask=mask[:, None])

    slot = tl.load(slots_ptr + row).to(tl.int64)
    if HAS_ROWS or slot >= 0:
        kv_head = tl.arange(0, PADDED_KV)
        kv_mask = kv_head < KV_HEADS
        k_low = _load_heads(source, bias_ptr, Q_HEADS * HEAD_DIM, kv_head, half, kv_mask, HAS_BIAS, HEAD_DIM)
        k_high = _load_heads(source, bias_ptr, Q_HEADS * HEAD_DIM + HALF, kv_head, half, kv_mask, HAS_BIAS, HEAD_DIM)
        first_v = (Q_HEADS + KV_HEADS) * HEAD_DIM
        v_low = _load_heads(source, bias_ptr, first_v, kv_head, half, kv_mask, HAS_BIAS, HEAD_DIM).to(element)
        v_high = _load_heads(source, bias_ptr, first_v + HALF, kv_head, half, kv_mask, HAS_BIAS, HEAD_DIM).to(element)
        k_first = (k_low * cos - k_high * sin).to(element)
        k_second = (k_high * cos + k_low * sin).to(element)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            k_out = kv_pool_ptr + ((block * 2 * KV_HEADS + kv_head[:, None]) * BLOCK_SIZE + offset) * HEAD_DIM + half[None, :]
            v_out = k_out + KV_HEADS * BLOCK_SIZE * HEAD_DIM
            tl.store(k_out, k_first, mask=kv_mask[:, None])
            tl.store(k_out + HALF, k_second, mask=kv_mask[:, None])
            tl.store(v_out, v_low, mask=kv_mask[:, None])
            tl.store(v_out + HALF, v_high, mask=kv_mask[:, None])
        if HAS_ROWS:
            at = row * (KV_HEADS * HEAD_DIM) + kv_head[:, None] * HEAD_DIM + half[None, :]
            tl.store(k_rows_ptr + at, k_first, mask=kv_mask[:, None])
            tl.store(k_rows_ptr + at + HALF, k_second, mask=kv_mask[:, None])
            tl.store(v_rows_ptr + at, v_low, mask=kv_mask[:, None])
            tl.store(v_rows_ptr + at + HALF, v_high, mask=kv_mask[:, None])


def launch_rope_write_kv(qkv, bias, cos_sin, positions, slot_mapping, q_out, kv_pool, kv_rows) -> None:
    """qkv [T, (H + 2K) D]; q_out [T, H, D], kv_pool [N, 2, K, S, D] and, unless None, kv_rows (k, v) [T, K, D]: filled."""
    tokens, q_heads, head_dim = q_out.shape
    kv_heads, block_size = kv_pool.shape[2], kv_pool.shape[3]
    k_rows, v_rows = (q_out, q_out) if kv_rows is None else kv_rows
    _rope_write_kv[(tokens,)](
        qkv, qkv if bias is None else bias, cos_sin, positions, slot_mapping, q_out, kv_pool, k_rows, v_rows, qkv.stride(0),
        Q_HEADS=q_heads, KV_HEADS=kv_heads, PADDED_Q=triton.next_power_of_2(q_heads), PADDED_KV=triton.next_power_of_2(kv_heads),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, HAS_BIAS=bias is not None, HAS_ROWS=kv_rows is not None, num_warps=4,
    )  # fmt: skip
