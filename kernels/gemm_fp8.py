"""Dense FP8 GEMMs of the prefill path through DeepGEMM on Hopper, plain torch elsewhere. Those of the experts: `experts_prefill`.

Weights are FP8 with one scale per 128x128 block; activations FP8 with one scale per row and 128 columns. Also makes
an expert's scales even and folds its bias into its weight's padding columns, so that it enters the accumulator with the last K block.
Legend: T tokens, E local experts, R weight rows (outputs), P padded input columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels.reference import FP8_BLOCK, FP8_MAX, fp8_dequant_blocks_ref, fp8_dequant_rows_ref

BIAS_BLOCK_SCALE = 2.0**-12  # of rows that hold nothing but their bias; grows with it


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
        return fp8_dequant_rows_ref(a, a_scales, a.shape[1]) @ dequant_weight(weight, weight_scales).t()
    import deep_gemm

    out = torch.empty((a.shape[0], rows), dtype=torch.bfloat16, device=a.device)
    if a.shape[0]:
        deep_gemm.fp8_gemm_nt((a, a_scales), (weight, weight_scales), out, compiled_dims="nk")
    return out


def fold_bias(weight: Tensor, weight_scales: Tensor, bias: Tensor, columns: int, bias_columns: int) -> None:
    """Gives all columns of 128 rows the same scale, and writes the bias into the padding columns as a sum of FP8 terms, each multiplied by
    an activation of exactly 1.0.

    Shapes: weight [E, R, P] float8_e4m3fn, zeros from `columns` on; bias [E, R] float
    Shapes: weight_scales [E, ceil(R / 128), P / 128] fp32, powers of two
    Units: bias_columns: how many terms; one holds 448 times the scale, the remainder shrinks 16-fold per term
    Effects: the scale is the largest of the 128 rows', or what lets the terms hold the bias if that is more; payload of smaller blocks
        is rounded again, exact but for what ends below e4m3's subnormals: at most 2^-10 of the scale. Load time only
    """
    rows = weight.shape[1]
    limit = _by_row_block(bias.float().abs().t()).amax(1).t()
    reach = FP8_MAX * (bias_columns - 2)
    for values, scales, most in zip(weight, weight_scales, limit, strict=True):
        blocks = values.unflatten(1, (-1, FP8_BLOCK))
        is_used = _by_row_block((blocks.view(torch.uint8) & 0x7F).amax(-1)).amax(1) > 0
        scale = torch.where(is_used, scales, 0.0).amax(1)
        scale = torch.where(scale > 0, scale, BIAS_BLOCK_SCALE)
        scale = scale * torch.exp2(torch.ceil(torch.log2((most / (scale * reach)).clamp(min=1.0))))
        ratio = (scales / scale[:, None]).repeat_interleave(FP8_BLOCK, 0)[:rows, :, None]
        blocks.copy_((blocks.float() * ratio).to(blocks.dtype))
        scales.copy_(scale[:, None].expand_as(scales))
    rest = bias.float() / weight_scales[:, :, 0].repeat_interleave(FP8_BLOCK, 1)[:, :rows]
    for term in range(columns, columns + bias_columns):
        digit = rest.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        weight[..., term] = digit
        rest -= digit.float()


def _by_row_block(x: Tensor) -> Tensor:
    """[R, ...] -> [ceil(R / 128), 128, ...], zeros at the end."""
    missing = torch.zeros((-x.shape[0] % FP8_BLOCK, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return torch.cat((x, missing)).unflatten(0, (-1, FP8_BLOCK))


def dequant_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """values [R, P] float8_e4m3fn and scales [ceil(R / 128), P / 128] -> [R, P] fp32."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, scales.shape[0] * FP8_BLOCK - rows))
    return fp8_dequant_blocks_ref(padded, scales, rows, columns)
