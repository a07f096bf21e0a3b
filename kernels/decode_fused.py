"""The dense half of a decode step, fused where launches would cost more than bytes: plan of the step, QKV with rotary embedding and K/V
write, output projection with residual, router with norm and top-k, expert combination with residual and norm, vocabulary.

Products up to 16 tokens run in kernels of our own that stream the weights and do not depend on the batch; above, the library's GEMM with a
small fused kernel after it. Called by `model/decode_cuda.py`.
Legend: B tokens (one a sequence), C hidden_size, H query heads, K KV heads, D head_dim (64), E experts, k experts_per_token, V vocabulary.

Weight rows of QKV are stored in `pack_qkv`'s order: 16 rows hold dimensions d .. d + 7 and d + 32 .. d + 39 of a head, so that one lane
finds both halves of a rotation. Outputs of the library's GEMM come in that order too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels import cuda_library
from kernels.attention_decode import num_chunks
from kernels.reference import apply_rope_ref, combine_rows_ref, rms_norm_ref, route_ref, write_kv_ref

HEAD_DIM = 64
MAX_STREAMED_TOKENS = 16  # above this the library's GEMM takes over


def pack_qkv(weight: Tensor) -> Tensor:
    """Rows [heads * 64, ...] in head order to the order of the QKV kernel. Works for the bias too."""
    if weight.shape[0] % HEAD_DIM:
        raise ShapeError(f"pack_qkv: {weight.shape[0]} rows are not heads of {HEAD_DIM}")
    halves = weight.unflatten(0, (-1, 2, 4, 8))  # [heads, half, tile, g, ...]
    return halves.transpose(1, 2).flatten(0, 3).contiguous()


def unpack_qkv(rows: Tensor) -> Tensor:
    """Inverse of `pack_qkv`."""
    return rows.unflatten(0, (-1, 4, 2, 8)).transpose(1, 2).flatten(0, 3).contiguous()


def prepare_step(
    token_source,
    token_ids,
    seq_lens,
    full_table,
    sliding_table,
    sliding_start,
    inv_freq,
    *,
    concentration: float,
    block_size: int,
    chunk_blocks: int,
    cos_sin,
    full_slots,
    sliding_slots,
    cu_chunks,
) -> None:
    """What all layers of a step share, from the lengths and tables alone.

    Shapes: token_source [B] int32: row of `token_ids` whose token goes on here, or -1 - token id; token_ids [>= B] int32, in and out
    Shapes: seq_lens, sliding_start [B] int32; full_table, sliding_table [B, M] int32; inv_freq [D/2] fp32
    Shapes: out: cos_sin [B, D/2, 2] fp32; full_slots, sliding_slots [B] int32, -1 for rows of length 0; cu_chunks [B + 1] int32
    Units: chunk_blocks: `attention_decode.chunk_blocks` of the step
    Effects: one kernel, writes token_ids and the four outputs; capturable
    """
    if cuda_library.runs(seq_lens):
        launch_prepare_step(
            token_source,
            token_ids,
            seq_lens,
            full_table,
            sliding_table,
            sliding_start,
            inv_freq,
            concentration,
            block_size,
            chunk_blocks,
            cos_sin,
            full_slots,
            sliding_slots,
            cu_chunks,
        )
        return
    told, row = -1 - token_source, token_source.clamp(min=0).long()
    token_ids[: len(row)] = torch.where(token_source < 0, told, token_ids[row])
    position = (seq_lens - 1).clamp(min=0)
    angle = position[:, None].float() * inv_freq
    cos_sin.copy_(torch.stack((angle.cos(), angle.sin()), dim=-1) * concentration)
    for table, start, slots in (
        (full_table, torch.zeros_like(seq_lens), full_slots),
        (sliding_table, sliding_start, sliding_slots),
    ):
        local = (position - start).clamp(min=0).long()  # a padded row's start is an old one
        block = table.gather(1, (local // block_size)[:, None])[:, 0]
        slots.copy_(torch.where(seq_lens > 0, block * block_size + local % block_size, -1))
    chunks = torch.tensor([0, *(num_chunks(n, chunk_blocks) for n in seq_lens.tolist())])
    cu_chunks.copy_(chunks.cumsum(0))


def launch_prepare_step(
    token_source,
    token_ids,
    seq_lens,
    full_table,
    sliding_table,
    sliding_start,
    inv_freq,
    concentration,
    block_size,
    chunk_blocks,
    cos_sin,
    full_slots,
    sliding_slots,
    cu_chunks,
) -> None:
    """The launch alone; arguments as in `prepare_step`."""
    cuda_library.call(
        "decode_fused", "tandem_prepare_step", token_source, token_ids, seq_lens, full_table, sliding_table, sliding_start, inv_freq,
        cos_sin, full_slots, sliding_slots, cu_chunks, seq_lens.shape[0], full_table.shape[1], sliding_table.shape[1], block_size,
        chunk_blocks, float(concentration),
    )  # fmt: skip


def qkv_rope_write(x, weight, bias, kv_pool, slots, cos_sin, q, *, scratch) -> None:
    """q, k, v = x W + b; q and k rotated; k and v written to their slots.

    Shapes: x [B, C] bf16; weight [(H + 2 K) * D, C], bias [(H + 2 K) * D] bf16 in `pack_qkv` order; kv_pool [N, 2, K, S, D] bf16
    Shapes: slots [B] int32, -1 writes nowhere; cos_sin [B, D/2, 2] fp32; q [B, H, D] bf16 out; scratch [B, (H + 2 K) * D] bf16
    Effects: writes q and kv_pool; one kernel up to 16 tokens, else two; capturable
    """
    if not cuda_library.runs(x):
        _qkv_on_cpu(x, weight, bias, kv_pool, slots, cos_sin, q)
    elif x.shape[0] <= MAX_STREAMED_TOKENS:
        launch_qkv(x, weight, bias, kv_pool, slots, cos_sin, q)
    else:
        torch.mm(x, weight.t(), out=scratch)
        launch_rotate_write(scratch, bias, kv_pool, slots, cos_sin, q)


def launch_qkv(x, weight, bias, kv_pool, slots, cos_sin, q) -> None:
    """The streaming kernel alone; arguments as in `qkv_rope_write`."""
    cuda_library.call(
        "dense_decode", "tandem_qkv", x, weight, bias, q, kv_pool, slots, cos_sin, x.shape[0], x.shape[1], weight.shape[0] // 16,
        q.shape[1], kv_pool.shape[2], kv_pool.shape[3], 2 * _processors(x),
    )  # fmt: skip


def launch_rotate_write(qkv, bias, kv_pool, slots, cos_sin, q) -> None:
    """Bias, rotation and K/V write of a finished product [B, (H + 2 K) * D] in `pack_qkv` order."""
    cuda_library.call(
        "decode_fused", "tandem_rotate_write", qkv, bias, q, kv_pool, slots, cos_sin, q.shape[0], q.shape[1], kv_pool.shape[2],
        kv_pool.shape[3],
    )  # fmt: skip


def output_projection(x, weight, bias, residual, *, scratch) -> None:
    """residual += x W + b.

    Shapes: x [B, H * D] bf16; weight [C, H * D], bias [C] bf16; residual [B, C] bf16; scratch [B, C] bf16
    Effects: writes residual; one kernel up to 16 tokens, else two; capturable
    """
    if not cuda_library.runs(x):
        residual.copy_(residual.float() + x.float() @ weight.float().t() + bias.float())
    elif x.shape[0] <= MAX_STREAMED_TOKENS:
        launch_projection(x, weight, bias, residual, residual)
    else:
        torch.mm(x, weight.t(), out=scratch)
        launch_add_bias_residual(scratch, bias, residual)


def partial_projection(x, weight, out) -> None:
    """out = x W: one rank's part of the output projection.

    Shapes: x [B, H * D] bf16, this rank's heads; weight [C, H * D] bf16; out [B, C] bf16
    Effects: one kernel; capturable
    """
    if not cuda_library.runs(x):
        out.copy_(x.float() @ weight.float().t())
    elif x.shape[0] <= MAX_STREAMED_TOKENS:
        launch_projection(x, weight, None, None, out)
    else:
        torch.mm(x, weight.t(), out=out)


def launch_projection(x, weight, bias, residual, out) -> None:
    """The streaming kernel alone: out = residual (or nothing, if None) + x W + b."""
    cuda_library.call(
        "dense_decode",
        "tandem_projection",
        x,
        weight,
        bias,
        residual,
        out,
        x.shape[0],
        x.shape[1],
        weight.shape[0] // 16,
        2 * _processors(x),
    )


def launch_add_bias_residual(x, bias, residual) -> None:
    """residual += x + bias. Shapes: x, residual [B, C]; bias [C]; all bf16."""
    cuda_library.call("decode_fused", "tandem_add_bias_residual", x, bias, residual, *residual.shape)


def norm_route(
    x,
    norm_weight,
    router_weight,
    router_bias,
    slots,
    *,
    eps: float,
    normed,
    logits,
    arrived,
    expert_ids,
    expert_weights,
    logits_override=None,
) -> None:
    """RMSNorm, router and the choice of experts.

    Shapes: x, normed [B, C] bf16; router_weight [E, C], router_bias [E] bf16; slots [B] int32, -1 marks a padded row
    Shapes: logits [B, E] fp32 scratch; arrived [16] int32, zero before and after; expert_ids [B, k] int32; expert_weights [B, k] fp32
    Units: logits_override [B, E] fp32 takes the place of the computed logits in the choice (benchmarks on random weights)
    Effects: one kernel; ties go to the lower id; padded rows get ids -1 and weights 0; NaN counts as minus infinity
    """
    if cuda_library.runs(x):
        launch_norm_route(
            x,
            norm_weight,
            router_weight,
            router_bias,
            slots,
            eps,
            normed,
            logits,
            arrived,
            expert_ids,
            expert_weights,
            logits_override,
        )
        return
    normed.copy_(rms_norm_ref(x, norm_weight, eps))
    logits.copy_(normed.float() @ router_weight.float().t() + router_bias.float())
    ids, weights = route_ref(logits if logits_override is None else logits_override, expert_ids.shape[1])
    padded = (slots < 0)[:, None]
    expert_ids.copy_(ids.masked_fill(padded, -1))
    expert_weights.copy_(weights.masked_fill(padded, 0.0))


def launch_norm_route(
    x,
    norm_weight,
    router_weight,
    router_bias,
    slots,
    eps,
    normed,
    logits,
    arrived,
    expert_ids,
    expert_weights,
    logits_override,
) -> None:
    """The launch alone; arguments as in `norm_route`."""
    cuda_library.call(
        "dense_decode", "tandem_route", x, router_weight, router_bias, norm_weight, normed, logits_override, logits, arrived, slots,
        expert_ids, expert_weights, x.shape[0], x.shape[1], router_weight.shape[0] // 16, expert_ids.shape[1], float(eps),
    )  # fmt: skip


def embed_norm(token_ids, embedding, norm_weight, *, eps: float, residual, normed) -> None:
    """residual = embedding rows; normed = RMSNorm of it. Shapes: token_ids [B] int32; embedding [V, C], the others [B, C] / [C] bf16."""
    if cuda_library.runs(residual):
        launch_combine_norm(residual, norm_weight, normed, eps=eps, token_ids=token_ids, embedding=embedding)
        return
    residual.copy_(embedding[token_ids.long()])
    normed.copy_(rms_norm_ref(residual, norm_weight, eps))


def combine_norm(
    pairs,
    expert_ids,
    expert_weights,
    residual,
    norm_weight,
    *,
    eps: float,
    first_expert: int,
    num_local_experts: int,
    normed,
    rows=None,
) -> None:
    """residual += sum over the token's local experts of weight * output; normed = RMSNorm of the new residual.

    Shapes: rows None: pairs [B, k, C] bf16; else rows [B, k] int32: which row of pairs [M, C] bf16 a choice's output is, -1 if not local
    Shapes: expert_ids [B, k] int32; expert_weights [B, k] fp32; residual, normed [B, C] bf16; norm_weight [C] bf16
    Effects: one kernel; entries of experts that are not local, or -1, are not read
    """
    if cuda_library.runs(residual):
        launch_combine_norm(
            residual, norm_weight, normed, eps=eps, pairs=pairs, expert_ids=expert_ids, expert_weights=expert_weights,
            first_expert=first_expert, num_local_experts=num_local_experts, rows=rows,
        )  # fmt: skip
        return
    if rows is None:
        local = (expert_ids >= first_expert) & (expert_ids < first_expert + num_local_experts)
        rows = torch.where(local, torch.arange(expert_ids.numel(), device=pairs.device).view_as(expert_ids), -1)
        pairs = pairs.flatten(0, 1)
    residual.copy_(residual.float() + combine_rows_ref(pairs, rows, expert_weights))
    normed.copy_(rms_norm_ref(residual, norm_weight, eps))


def launch_combine_norm(
    residual,
    norm_weight,
    normed,
    *,
    eps,
    token_ids=None,
    embedding=None,
    pairs=None,
    expert_ids=None,
    expert_weights=None,
    first_expert=0,
    num_local_experts=0,
    rows=None,
) -> None:
    """The launch behind `embed_norm` and `combine_norm`."""
    choices = 0 if expert_ids is None else expert_ids.shape[1]
    cuda_library.call(
        "decode_fused", "tandem_combine_norm", token_ids, embedding, pairs, expert_ids if rows is None else rows, expert_weights, residual,
        norm_weight, normed, *residual.shape, choices, first_expert, num_local_experts, rows is not None, float(eps),
    )  # fmt: skip


def vocabulary_logits(x, weight, out) -> None:
    """out = x W in fp32, by the library, which streams these weights at the speed of a copy.

    Shapes: x [B, C] bf16; weight [V, C] bf16; out [B, V] fp32
    Effects: a row's result depends on B, which chooses the library's kernel, and on nothing else beside it
    """
    if x.is_cuda:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    else:
        out.copy_(x.float() @ weight.float().t())


def _qkv_on_cpu(x, weight, bias, kv_pool, slots, cos_sin, q) -> None:
    tokens, heads, dim = q.shape
    kv_heads = kv_pool.shape[2]
    qkv = x.float() @ unpack_qkv(weight).float().t() + unpack_qkv(bias).float()
    parts = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos_sin.unbind(-1)
    q.copy_(apply_rope_ref(parts[0], cos, sin))
    write_kv_ref(apply_rope_ref(parts[1], cos, sin), parts[2], kv_pool, slots.long())


def _processors(x: Tensor) -> int:
    return cuda_library.multiprocessors(x.device.index or 0)
