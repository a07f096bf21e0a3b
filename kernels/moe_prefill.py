"""Row movement of the prefill MoE: permutation by expert, weighted combine with residual and next norm.

The products between these passes are those of `experts_prefill`, biases inside.
Legend: T tokens, k experts_per_token, E local experts, M rows of the buffer, C hidden_size, I intermediate_size, P padded to 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantize import empty_fp8_rows, empty_scales
from kernels.reference import combine_rows_ref, fp8_quant_rows_bias_ref, rms_norm_ref
from kernels.router import Routing


@dataclass(frozen=True)
class ExpertRows:
    """FP8 rows sorted by expert without gaps; rows past the last expert's hold anything and are never read back.

    Shapes: q [M, P] float8_e4m3fn; scales [M, 1] fp32; ends [E] int32: one past each expert's last row
    Shapes: rows [T, k] int32: where (token, choice) went, -1 if not local
    """

    q: Tensor
    scales: Tensor
    ends: Tensor
    rows: Tensor


def row_bound(num_tokens: int, experts_per_token: int, num_local_experts: int) -> int:
    """Rows that hold any routing of `num_tokens` tokens: known on the host without reading the routing."""
    return num_tokens * min(experts_per_token, num_local_experts)


def permute_rows(q: Tensor, scales: Tensor, routing: Routing, *, first_expert: int = 0) -> ExpertRows:
    """Copies each token's FP8 row to its experts' rows: quantised once, copied k times.

    Shapes: q [T, P] float8_e4m3fn; scales [T, 1] fp32, from `quantize_rows` with bias columns
    Returns: ExpertRows with M = row_bound(...)
    Effects: capturable; no host sync
    Source: `expert_rows_ref` (the order within an expert may differ)
    """
    tokens, top_k = routing.expert_ids.shape
    experts = routing.counts.shape[0]
    bound = row_bound(tokens, top_k, experts)
    out_q = torch.empty((bound, q.shape[1]), dtype=q.dtype, device=q.device)
    out_scales = empty_scales(bound, 1, q.device)
    if not q.is_cuda:
        start = (torch.cumsum(routing.counts, 0) - routing.counts).int()
        local = (routing.expert_ids - first_expert).clamp(0, experts - 1).long()
        rows = torch.where(routing.ranks >= 0, start[local] + routing.ranks, -1).int()
        token, choice = (rows >= 0).nonzero(as_tuple=True)
        target = rows[token, choice].long()
        out_q.view(torch.uint8)[target] = q.view(torch.uint8)[token]
        out_scales[target] = scales[token]
        return ExpertRows(out_q, out_scales, start + routing.counts, rows)
    from kernels.triton_ops.moe_prefill import launch_permute_rows

    ends = torch.empty(experts, dtype=torch.int32, device=q.device)
    rows = torch.empty((tokens, top_k), dtype=torch.int32, device=q.device)
    launch_permute_rows(routing.expert_ids, routing.ranks, routing.counts, q, scales, rows, ends, out_q, out_scales, first_expert)
    return ExpertRows(out_q, out_scales, ends, rows)


def combine_norm_quantize(
    residual: Tensor, y: Tensor, rows: Tensor, expert_weights: Tensor, norm_weight: Tensor, eps: float, *, stream_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """residual += weighted sum of each token's k expert rows; then FP8 of the next layer's RMSNorm.

    Shapes: residual [T, C] bf16; y [M, C] bf16, bias inside; rows [T, k] int32; expert_weights [T, k] fp32; norm_weight [C]
    Shapes: stream_bias [C]: added to the residual that is stored, not to what the norm reads; for a product that is added to it next
    Returns: q [T, P] float8_e4m3fn; scales [T, P / 128] fp32
    Effects: residual updated in place; capturable; no host sync
    Source: `combine_rows_ref`, `rms_norm_ref`, `fp8_quant_rows_bias_ref`
    """
    if not residual.is_cuda:
        return fp8_quant_rows_bias_ref(_combine_norm_on_cpu(residual, y, rows, expert_weights, norm_weight, eps, stream_bias), 0)
    from kernels.triton_ops.norm import launch_combine_norm_quantize

    q, scales = empty_fp8_rows(residual.shape[0], residual.shape[1], residual.device)
    if residual.shape[0]:
        launch_combine_norm_quantize(
            residual, y, rows, expert_weights, norm_weight, q, scales, eps, add_residual=True, stream_bias=stream_bias
        )  # fmt: skip
    return q, scales


def combine_norm(
    residual: Tensor, y: Tensor, rows: Tensor, expert_weights: Tensor, norm_weight: Tensor, eps: float, *, stream_bias: Tensor | None = None
) -> Tensor:
    """The same without quantisation.

    Returns: [T, C] in residual.dtype
    Effects: residual updated in place; capturable; no host sync
    """
    if not residual.is_cuda:
        return _combine_norm_on_cpu(residual, y, rows, expert_weights, norm_weight, eps, stream_bias).to(residual.dtype)
    from kernels.triton_ops.norm import launch_combine_norm_quantize

    out = torch.empty_like(residual)
    if residual.shape[0]:
        launch_combine_norm_quantize(
            residual, y, rows, expert_weights, norm_weight, out, None, eps, add_residual=True, stream_bias=stream_bias
        )  # fmt: skip
    return out


def _combine_norm_on_cpu(residual, y, rows, expert_weights, norm_weight, eps, stream_bias) -> Tensor:
    """Returns: the norm, fp32."""
    total = residual.float() + combine_rows_ref(y, rows, expert_weights)
    residual.copy_(total if stream_bias is None else total + stream_bias.float())
    return rms_norm_ref(total.to(residual.dtype).float(), norm_weight, eps)


def combine(y: Tensor, rows: Tensor, expert_weights: Tensor) -> Tensor:
    """Weighted sum of each token's expert rows alone: what the ranks of a group add up before the residual.

    Shapes: y [M, C] bf16; rows [T, k] int32, -1 contributes nothing; expert_weights [T, k] fp32
    Returns: [T, C] in y.dtype
    Effects: capturable; no host sync
    Source: `combine_rows_ref`
    """
    if not y.is_cuda:
        return combine_rows_ref(y, rows, expert_weights).to(y.dtype)
    from kernels.triton_ops.norm import launch_combine_norm_quantize

    out = torch.empty((rows.shape[0], y.shape[1]), dtype=y.dtype, device=y.device)
    if rows.shape[0]:
        launch_combine_norm_quantize(out, y, rows, expert_weights, None, None, None, 0.0, add_residual=False)
    return out
