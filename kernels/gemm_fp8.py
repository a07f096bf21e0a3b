"""FP8 GEMMs of the prefill path: dense and grouped by expert, through DeepGEMM on Hopper, plain torch elsewhere.

Weights are FP8 with one scale per 128x128 block; activations FP8 with one scale per row and 128 columns. Also folds an expert's bias into
its weight's padding columns, so the bias enters the accumulator with the last K block and costs nothing.
Legend: T tokens, M rows of the expert buffer, E local experts, R weight rows (outputs), P padded input columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels.moe_prefill import ExpertRows
from kernels.reference import FP8_BLOCK, FP8_MAX, fp8_dequant_blocks_ref, fp8_dequant_rows_ref

_FEW_ROWS = 64


def row_alignment(rows_per_expert: float) -> int:
    """Where experts' rows may start: the rows of a tile of their GEMMs. Measured (docs/performance.md): tiles of 128 rows multiply faster,
    but where an expert has few rows, most of such a tile would be padding.

    Units: rows_per_expert: the mean over experts
    """
    return 64 if rows_per_expert <= _FEW_ROWS else 128


def gemm_fp8(a: Tensor, a_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """a @ weight.T.

    Shapes: a [T, P] float8_e4m3fn; a_scales [T, P / 128] fp32, group-major on CUDA; weight [R, P] float8_e4m3fn
    Shapes: weight_scales [ceil(R / 128), P / 128] fp32
    Returns: [T, R] bf16 on CUDA, fp32 elsewhere; accumulated in fp32 across 128-column blocks
    Effects: compiles at the first call of a shape; capturable afterwards; no host sync
    Raises: ShapeError
    Source: DeepGEMM `fp8_gemm_nt`
    """
    if a.shape[1] != weight.shape[1]:
        raise ShapeError(f"a has {a.shape[1]} columns, weight {weight.shape[1]}: pad both to the same multiple of {FP8_BLOCK}")
    rows = weight.shape[0]
    if not a.is_cuda:
        return fp8_dequant_rows_ref(a, a_scales, a.shape[1]) @ _dequant_weight(weight, weight_scales).t()
    import deep_gemm

    out = torch.empty((a.shape[0], rows), dtype=torch.bfloat16, device=a.device)
    if a.shape[0]:
        deep_gemm.fp8_gemm_nt((a, a_scales), (weight, weight_scales), out, compiled_dims="nk")
    return out


def grouped_gemm_fp8(a: Tensor, a_scales: Tensor, weight: Tensor, weight_scales: Tensor, expert_rows: ExpertRows) -> Tensor:
    """Each expert's rows times that expert's weight.

    Shapes: a [M, P] float8_e4m3fn; a_scales [M, P / 128] fp32; weight [E, R, P] float8_e4m3fn; weight_scales [E, ceil(R / 128), P / 128]
    Returns: [M, R] bf16 on CUDA, fp32 elsewhere; rows past an expert's end hold anything
    Effects: compiles at the first call of a shape; capturable afterwards; no host sync: row counts stay on the device
    Source: DeepGEMM `m_grouped_fp8_gemm_nt_contiguous` with the prefix-sum layout
    """
    experts, rows, _ = weight.shape
    if not a.is_cuda:
        out = torch.zeros(a.shape[0], rows)
        start = 0
        for e, end in enumerate(expert_rows.ends.tolist()):
            x = fp8_dequant_rows_ref(a[start:end], a_scales[start:end], a.shape[1])
            out[start:end] = x @ _dequant_weight(weight[e], weight_scales[e]).t()
            start = -(-end // expert_rows.alignment) * expert_rows.alignment
        return out
    import deep_gemm

    out = torch.empty((a.shape[0], rows), dtype=torch.bfloat16, device=a.device)
    if rows == 0:  # a rank of a small model may hold no piece of its experts
        return out
    if deep_gemm.get_mk_alignment_for_contiguous_layout() != expert_rows.alignment:
        deep_gemm.set_mk_alignment_for_contiguous_layout(expert_rows.alignment)
    expected_rows = -(-expert_rows.rows.numel() // experts)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (a, a_scales), (weight, weight_scales), out, expert_rows.ends,
        use_psum_layout=True, expected_m_for_psum_layout=max(expected_rows, 1),
    )  # fmt: skip
    return out


def fold_bias(weight: Tensor, weight_scales: Tensor, bias: Tensor, columns: int, bias_columns: int) -> None:
    """Gives all columns of 128 rows the same scale, and writes the bias into the padding columns as a sum of FP8 terms, each multiplied by an
    activation of exactly 1.0.

    Shapes: weight [E, R, P] float8_e4m3fn, zeros from `columns` on; weight_scales [E, ceil(R / 128), P / 128] fp32, powers of two; bias [E, R]
    Units: bias_columns: how many terms; one holds 448 times the scale, the remainder shrinks 16-fold per term
    Effects: the scale is the largest of the 128 rows', or what lets the terms hold the bias if that is more; payload of smaller blocks is
        rounded again, exact but for what ends below e4m3's subnormals: at most 2^-10 of the scale. Load time only
    """
    rows = weight.shape[1]
    row_blocks = weight_scales.shape[1]
    limit = torch.nn.functional.pad(bias.float().abs(), (0, row_blocks * FP8_BLOCK - rows)).unflatten(1, (-1, FP8_BLOCK)).amax(-1)
    scale = weight_scales[:, :, : -(-columns // FP8_BLOCK)].amax(-1)
    growth = torch.exp2(torch.ceil(torch.log2((limit / (scale * (FP8_MAX * (bias_columns - 2)))).clamp(min=1.0))))
    scale = scale * growth
    ratios = weight_scales / scale[:, :, None]
    uneven = (ratios != 1).flatten(1).any(1).tolist()
    for expert in range(weight.shape[0]):
        if uneven[expert]:
            ratio = ratios[expert].repeat_interleave(FP8_BLOCK, 0)[:rows, :, None]
            blocks = weight[expert].unflatten(1, (-1, FP8_BLOCK))
            blocks.copy_((blocks.float() * ratio).to(weight.dtype))
    weight_scales.copy_(scale[:, :, None].expand_as(weight_scales))
    rest = bias.float() / scale.repeat_interleave(FP8_BLOCK, 1)[:, :rows]
    for term in range(columns, columns + bias_columns):
        digit = rest.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        weight[..., term] = digit
        rest -= digit.float()


def _dequant_weight(weight: Tensor, scales: Tensor) -> Tensor:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, scales.shape[0] * FP8_BLOCK - rows))
    return fp8_dequant_blocks_ref(padded, scales, rows, columns)
