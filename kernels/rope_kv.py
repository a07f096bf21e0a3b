"""QKV bias, rotary embedding and the paged K/V write in one pass over the QKV projection's output.

Owns the cos/sin table's layout. Called by `model/`. Legend: T tokens, H query heads, K KV heads, D head_dim, N blocks, S block_size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels.reference import apply_rope_ref, rope_cos_sin_ref, write_kv_ref


def rope_table(max_positions: int, inv_freq: Tensor, concentration: float) -> Tensor:
    """cos and sin of every position side by side, already times the concentration.

    Shapes: inv_freq [D / 2] fp32
    Returns: [max_positions, D] fp32 on inv_freq.device: first D / 2 columns cos, then sin
    """
    positions = torch.arange(max_positions, device=inv_freq.device)
    return torch.cat(rope_cos_sin_ref(positions, inv_freq, concentration), dim=1)


def rope_write_kv(
    qkv: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_pool: Tensor,
    num_qo_heads: int,
    *,
    kv_rows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Rotates Q and K, adds the bias, writes K and V into their slots and, on request, side by side.

    Shapes: qkv [T, (H + 2K) * D] bf16, columns q then k then v; bias [(H + 2K) * D] or None; cos_sin from `rope_table`
    Shapes: positions [T] int; slot_mapping [T] int, -1 writes nothing; kv_pool [N, 2, K, S, D] bf16 contiguous
    Shapes: kv_rows: rotated k and v [T, K, D] bf16 contiguous, every row filled
    Returns: q [T, H, D] bf16, rotated
    Effects: writes kv_pool and kv_rows; capturable; no host sync
    Raises: ShapeError
    Source: `apply_rope_ref`, `write_kv_ref`
    """
    kv_heads, head_dim = kv_pool.shape[2], kv_pool.shape[4]
    if qkv.shape[1] != (num_qo_heads + 2 * kv_heads) * head_dim:
        raise ShapeError(f"qkv has {qkv.shape[1]} columns, {num_qo_heads} + 2 * {kv_heads} heads of {head_dim} need another number")
    tokens = qkv.shape[0]
    if not qkv.is_cuda:
        x = (qkv.float() if bias is None else qkv.float() + bias.float()).view(tokens, -1, head_dim)
        q, k, v = x.split((num_qo_heads, kv_heads, kv_heads), dim=1)
        cos, sin = cos_sin[positions.long()].chunk(2, dim=1)
        k = apply_rope_ref(k, cos, sin)
        write_kv_ref(k, v, kv_pool, slot_mapping.long())
        if kv_rows is not None:
            kv_rows[0].copy_(k)
            kv_rows[1].copy_(v)
        return apply_rope_ref(q, cos, sin).to(qkv.dtype)
    from kernels.triton_ops.rope_kv import launch_rope_write_kv

    q = torch.empty((tokens, num_qo_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        launch_rope_write_kv(qkv, bias, cos_sin, positions, slot_mapping, q, kv_pool, kv_rows)
    return q
