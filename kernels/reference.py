"""Plain torch twin of every op: readable, fp32 inside, any device. The specification that fast paths are tested against.

Runs the model on a CPU. Formulas: gpt-oss `torch/model.py` and `torch/weights.py`; Hugging Face `modeling_gpt_oss.py`.
Legend: T tokens, B sequences, H query heads, K KV heads, D head_dim, E experts, N blocks, S block_size, I intermediate, C columns.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP8_MAX = 448.0
MXFP4_GROUP = 32
FP8_BLOCK = 128
QUERY_TILE = 256  # bounds the score matrix of a long prefill chunk


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis.

    Shapes: x [T, C] any float; weight [C]
    Returns: [T, C] in x.dtype; computed in fp32, the weight multiplied before the cast back
    Source: gpt-oss torch/model.py RMSNorm
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * weight.float()).to(x.dtype)


def yarn_inv_freq_ref(
    head_dim: int, theta: float, factor: float, original_context: int, beta_fast: float, beta_slow: float
) -> tuple[Tensor, float]:
    """YaRN frequencies with the unrounded correction range.

    Returns: (inv_freq [head_dim/2] fp32, concentration that multiplies cos and sin)
    Source: gpt-oss torch/model.py RotaryEmbedding._compute_concentration_and_inv_freq
    """
    freq = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if factor <= 1.0:
        return (1.0 / freq).float(), 1.0
    low = head_dim / 2 * math.log(original_context / (beta_fast * 2 * math.pi)) / math.log(theta)
    high = head_dim / 2 * math.log(original_context / (beta_slow * 2 * math.pi)) / math.log(theta)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    inv_freq = ramp / (factor * freq) + (1 - ramp) / freq
    return inv_freq.float(), 0.1 * math.log(factor) + 1.0


def rope_cos_sin_ref(positions: Tensor, inv_freq: Tensor, concentration: float) -> tuple[Tensor, Tensor]:
    """cos and sin of each position.

    Shapes: positions [T] int; inv_freq [D/2] fp32
    Returns: two [T, D/2] fp32, already times the concentration
    """
    angle = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    return angle.cos() * concentration, angle.sin() * concentration


def apply_rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates halves: (x1 c - x2 s, x2 c + x1 s), x1 the first half of the head.

    Shapes: x [T, H, D]; cos, sin [T, D/2] fp32
    Returns: [T, H, D] in x.dtype
    """
    x1, x2 = x.float().chunk(2, dim=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1).to(x.dtype)


def write_kv_ref(k: Tensor, v: Tensor, kv_pool: Tensor, slot_mapping: Tensor) -> None:
    """Writes the new tokens' K and V into their slots.

    Shapes: k, v [T, K, D]; kv_pool [N, 2, K, S, D] (one layer); slot_mapping [T] int64 = block_id * S + offset, -1 to skip
    Effects: writes kv_pool
    """
    block_size = kv_pool.shape[3]
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    kv_pool[block, 0, :, offset] = k.to(kv_pool.dtype)
    kv_pool[block, 1, :, offset] = v.to(kv_pool.dtype)


def gather_kv_ref(kv_pool: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Reads whole block tables as dense K and V.

    Shapes: kv_pool [N, 2, K, S, D]; block_table [B, M] int, -1 reads block 0 (mask it)
    Returns: k, v [B, M * S, K, D]
    """
    blocks = kv_pool[block_table.clamp(min=0).long()]  # [B, M, 2, K, S, D]
    b, m, _, heads, size, dim = blocks.shape
    k, v = blocks.permute(2, 0, 1, 4, 3, 5).reshape(2, b, m * size, heads, dim)
    return k, v


def paged_attention_ref(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    kv_start: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    sink: Tensor,
    *,
    window: int | None,
    sm_scale: float,
) -> Tensor:
    """Causal attention over paged KV with a learned sink per head, for prefill chunks and decode steps alike.

    Shapes: q [T, H, D]; kv_pool [N, 2, K, S, D]; block_table [B, M] int32, unused entries -1
    Shapes: kv_start, seq_lens [B] int32: position of the first token of the table's first block; tokens so far with the new ones
    Shapes: cu_seqlens_q [B + 1] int32: the last `q_len` positions of each sequence are its queries; sink [H] fp32
    Units: window: keys visible to a query, itself included (128 for gpt-oss' sliding layers), None for all
    Returns: [T, H, D] in q.dtype; the sink enters the softmax once as an extra column that is then dropped, never scaled
    Source: gpt-oss torch/model.py sdpa
    """
    num_kv_heads = kv_pool.shape[2]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    bounds = cu_seqlens_q.tolist()
    k_all, v_all = gather_kv_ref(kv_pool, block_table)
    lens, starts = seq_lens.tolist(), kv_start.tolist()
    if all(end - begin == 1 for begin, end in pairwise(bounds)):
        return _decode_attention_ref(q, k_all, v_all, kv_start, seq_lens, sink, group, window, sm_scale)
    for b, (begin, end) in enumerate(pairwise(bounds)):
        for first in range(begin, end, QUERY_TILE):
            rows = slice(first, min(first + QUERY_TILE, end))
            out[rows] = _attend_rows(q[rows], k_all[b], v_all[b], starts[b], lens[b] - end + first, sink, window, sm_scale)
    return out


def _attend_rows(q, k, v, kv_start, first_pos, sink, window, sm_scale):
    """Queries of one sequence at positions `first_pos` on, over the keys that any of them sees; memory is bounded by the tile."""
    num_kv_heads = k.shape[1]
    last_pos = first_pos + q.shape[0] - 1
    low = kv_start if window is None else max(kv_start, first_pos - window + 1)
    k, v = (x[low - kv_start : last_pos + 1 - kv_start].float() for x in (k, v))
    key_pos = torch.arange(low, last_pos + 1, device=q.device)
    query_pos = torch.arange(first_pos, last_pos + 1, device=q.device)
    visible = key_pos[None, :] <= query_pos[:, None]
    if window is not None:
        visible &= key_pos[None, :] > query_pos[:, None] - window
    q_TKGD = q.float().unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("tkgd,jkd->kgtj", q_TKGD, k) * sm_scale
    scores = scores.masked_fill(~visible, float("-inf"))
    probs = _softmax_with_sink(scores, sink.float().view(num_kv_heads, -1, 1, 1))
    return torch.einsum("kgtj,jkd->tkgd", probs, v).flatten(1, 2).to(q.dtype)


def _softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    sink = sink.expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]


def _decode_attention_ref(q, k, v, kv_start, seq_lens, sink, group, window, sm_scale):
    """All sequences at once, one query each; keys outside are masked and their values zeroed."""
    key_pos = kv_start[:, None] + torch.arange(k.shape[1], device=q.device)[None, :]  # [B, J]
    visible = key_pos < seq_lens[:, None]
    if window is not None:
        visible &= key_pos >= seq_lens[:, None] - window
    q_BKGD = q.float().view(q.shape[0], k.shape[2], group, -1)
    k32 = k.float().masked_fill(~visible[:, :, None, None], 0.0)
    v32 = v.float().masked_fill(~visible[:, :, None, None], 0.0)
    scores = torch.einsum("bkgd,bjkd->bkgj", q_BKGD, k32) * sm_scale
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    probs = _softmax_with_sink(scores, sink.float().view(1, k.shape[2], group, 1))
    return torch.einsum("bkgj,bjkd->bkgd", probs, v32).reshape(q.shape).to(q.dtype)


def route_ref(logits: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    """Top-k experts and the softmax over the chosen logits alone.

    Shapes: logits [T, E] with the router's bias inside
    Returns: expert_ids [T, k] int64 by falling logit, ties to the lower id (the same on every rank); expert_weights [T, k] fp32
    """
    order = torch.argsort(logits.float(), dim=-1, descending=True, stable=True)[:, :experts_per_token]
    return order, torch.softmax(logits.float().gather(-1, order), dim=-1)


def swiglu_ref(x: Tensor, *, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss' clamped SwiGLU over interleaved columns (2i gate, 2i+1 up).

    Shapes: x [..., 2 * I]
    Returns: [..., I] in x.dtype: (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above only, up on both sides
    """
    gate = x[..., 0::2].float().clamp(max=limit)
    up = x[..., 1::2].float().clamp(min=-limit, max=limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(x.dtype)


def experts_ref(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    *,
    first_expert: int = 0,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """Weighted sum of the local experts' outputs; tokens whose experts live elsewhere get zeros.

    Shapes: x [T, C]; expert_ids, expert_weights [T, k]; gate_up [E_local, 2I, C]; gate_up_bias [E_local, 2I]
    Shapes: down [E_local, C, I]; down_bias [E_local, C]. Biases lie inside the router weighting.
    Units: first_expert: global id of local expert 0
    Returns: [T, C] fp32; add it over ranks to get the whole
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    local = expert_ids - first_expert
    for e in range(gate_up.shape[0]):
        token, choice = (local == e).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        h = torch.nn.functional.linear(x[token], gate_up[e], gate_up_bias[e].to(x.dtype))
        h = swiglu_ref(h, alpha=alpha, limit=limit)
        y = torch.nn.functional.linear(h, down[e], down_bias[e].to(x.dtype))
        out.index_add_(0, token, y.float() * expert_weights[token, choice, None])
    return out


def mxfp4_dequant_ref(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decodes MXFP4: low nibble first, value = table[nibble] * 2^(scale - 127).

    Shapes: blocks [..., G, 16] uint8 (32 values each); scales [..., G] uint8
    Returns: [..., G * 32] in dtype; exact in fp32, and in bf16 wherever 2^(scale-127) is a normal number
    """
    table, byte = 2 * torch.tensor(FP4_VALUES, dtype=torch.float32), torch.arange(256)
    pairs = torch.stack((table[byte & 0xF], table[byte >> 4]), dim=-1).to(blocks.device)  # [256, 2]: both values of each byte
    values = torch.nn.functional.embedding(blocks.int(), pairs).flatten(-2)  # [..., G, 32]
    scale = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 128)  # table doubled: 2^128 would be infinite
    return (values * scale[..., None]).flatten(-2).to(dtype)


def mxfp4_quant_ref(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds to MXFP4 with the OCP shared exponent floor(log2 amax) - 2, saturating at 6.

    Shapes: weight [..., C], C a multiple of 32
    Returns: blocks [..., C/32, 16] uint8; scales [..., C/32] uint8
    """
    groups = weight.float().unflatten(-1, (-1, MXFP4_GROUP))
    amax = groups.abs().amax(-1)
    exponent = (torch.floor(torch.log2(amax.clamp(min=2.0**-125))).to(torch.int32) - 2).clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponent[..., None])
    table = torch.tensor(FP4_VALUES[:8], device=weight.device)
    middle = (table[1:] + table[:-1]) / 2
    nibble = torch.bucketize(scaled.abs().contiguous(), middle).to(torch.uint8)
    nibble |= (scaled < 0).to(torch.uint8) << 3
    return nibble[..., 0::2] | (nibble[..., 1::2] << 4), (exponent + 127).to(torch.uint8)


def fp8_quant_rows_ref(x: Tensor, *, scale_pow2: bool = False) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 with one scale per row and 128 columns (1x128), columns padded with zeros to a multiple of 128.

    Shapes: x [T, C]
    Returns: q [T, ceil(C/128)*128] float8_e4m3fn; scales [T, ceil(C/128)] fp32 with x ~= q * scale; a row block of zeros has scale 1
    """
    pad = -x.shape[-1] % FP8_BLOCK
    blocks = torch.nn.functional.pad(x.float(), (0, pad)).unflatten(-1, (-1, FP8_BLOCK))
    scale = blocks.abs().amax(-1) / FP8_MAX
    if scale_pow2:
        scale = torch.exp2(torch.ceil(torch.log2(scale.clamp(min=2.0**-120))))
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    q = (blocks / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(-2), scale


def fp8_dequant_rows_ref(q: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Inverse of `fp8_quant_rows_ref`: q [T, P] float8_e4m3fn, scales [T, P/128] or [T, 1] -> [T, columns] fp32."""
    return (q.float().unflatten(-1, (-1, FP8_BLOCK)) * scales[..., None]).flatten(-2)[..., :columns]


def fp8_quant_blocks_ref(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 with one power-of-two scale per 128x128 block, both axes padded with zeros to multiples of 128.

    Shapes: weight [..., R, C]
    Returns: q [..., R', C'] float8_e4m3fn; scales [..., R'/128, C'/128] fp32. Powers of two keep MXFP4 values exact where the
        block's exponents lie within e4m3's range.
    """
    rows, cols = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(-2, (-1, FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))  # [..., r, 128, c, 128]
    amax = blocks.abs().amax(dim=(-3, -1))
    scale = torch.exp2(torch.ceil(torch.log2(amax.clamp(min=2.0**-120) / FP8_MAX)))
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    q = (blocks / scale[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return q.flatten(-2).flatten(-3, -2), scale


def fp8_dequant_blocks_ref(q: Tensor, scales: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of `fp8_quant_blocks_ref`: -> [..., rows, cols] fp32, padding cut off."""
    blocks = q.float().unflatten(-2, (-1, FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    blocks = blocks * scales[..., :, None, :, None]
    return blocks.flatten(-2).flatten(-3, -2)[..., :rows, :cols]


def fp8_quant_rows_bias_ref(x: Tensor, bias_columns: int) -> tuple[Tensor, Tensor]:
    """A row in FP8 whose first `bias_columns` padding columns hold exactly 1.0, so that a GEMM can carry its bias there.

    Shapes: x [T, C]; P = C + bias_columns rounded up to a multiple of 128
    Returns: q [T, P] float8_e4m3fn; scales fp32: [T, 1], powers of two >= 2^-8 (1 / scale is exact in e4m3); without bias columns it is
        `fp8_quant_rows_ref`
    """
    if bias_columns == 0:
        return fp8_quant_rows_ref(x)
    amax = torch.nn.functional.pad(x.float().abs(), (0, 1)).amax(-1)
    scale = torch.exp2(torch.ceil(torch.log2((amax / FP8_MAX).clamp(min=2.0**-8))))
    return _fp8_with_ones(x.float(), scale[:, None], bias_columns), scale[:, None]


def fp8_quant_hidden_ref(hidden: Tensor, scale: float, bias_columns: int) -> Tensor:
    """Hidden rows of experts in FP8 with one scale for all, a power of two. Shapes: hidden [T, C]. Returns: q [T, P] float8_e4m3fn"""
    return _fp8_with_ones(hidden.float(), torch.tensor(scale, device=hidden.device), bias_columns)


def hidden_scale(limit: float) -> float:
    """The least power of two with which FP8 reaches every output of the clamped SwiGLU: at most limit * (limit + 1)."""
    return 2.0 ** math.ceil(math.log2(limit * (limit + 1) / FP8_MAX))


def _fp8_with_ones(x: Tensor, scale: Tensor, bias_columns: int) -> Tensor:
    columns = x.shape[-1]
    q = torch.zeros((*x.shape[:-1], -(-(columns + bias_columns) // FP8_BLOCK) * FP8_BLOCK), device=x.device)
    q[..., :columns] = (x / scale).clamp(-FP8_MAX, FP8_MAX)
    q[..., columns : columns + bias_columns] = 1.0 / scale
    return q.to(torch.float8_e4m3fn)


def expert_rows_ref(expert_ids: Tensor, first_expert: int, num_local_experts: int) -> tuple[Tensor, Tensor]:
    """Places each (token, choice) in a row buffer sorted by expert.

    Shapes: expert_ids [T, k] int
    Returns: rows [T, k] int32, -1 where the expert is not local; ends [num_local_experts] int32: one past each expert's last row
    """
    local = expert_ids.reshape(-1).long() - first_expert
    rows = torch.full_like(local, -1)
    ends, start = [], 0
    for e in range(num_local_experts):
        chosen = (local == e).nonzero(as_tuple=True)[0]
        rows[chosen] = start + torch.arange(chosen.numel(), device=local.device)
        start += chosen.numel()
        ends.append(start)
    return rows.view(expert_ids.shape).int(), torch.tensor(ends, dtype=torch.int32, device=expert_ids.device)


def combine_rows_ref(y: Tensor, rows: Tensor, expert_weights: Tensor) -> Tensor:
    """Weighted sum of each token's expert outputs.

    Shapes: y [M, C]; rows [T, k] int32, -1 contributes nothing; expert_weights [T, k] fp32
    Returns: [T, C] fp32, summed in the order of k
    """
    out = torch.zeros(rows.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for k in range(rows.shape[1]):
        mine = rows[:, k] >= 0
        out[mine] += y[rows[mine, k].long()].float() * expert_weights[mine, k, None]
    return out
