"""RMSNorm fused with the residual add before it and the FP8 quantisation after it.

The bf16 residual stream is updated in place; what comes out is the next GEMM's input: FP8, or bf16 for projections kept in bf16.
Called by `model/`. Legend: T tokens, C hidden_size, P hidden_size padded to a multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels.quantize import empty_fp8_rows
from kernels.reference import fp8_quant_rows_bias_ref, rms_norm_ref


def add_norm_quantize(
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    delta: Tensor | None = None,
    delta_bias: Tensor | None = None,
    bias_columns: int = 0,
    inverse_rms: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """residual += delta + delta_bias; then FP8 of its RMSNorm.

    Shapes: residual, delta [T, C] bf16 contiguous; weight, delta_bias [C] float; inverse_rms [T] fp32: filled with 1 / RMS when given
    Shapes: out: q and scales to fill, rows of larger ones from `empty_fp8_rows` for instance; None makes them
    Units: bias_columns: padding columns of the result that hold exactly 1.0 (see `quantize_rows`)
    Returns: q [T, P] float8_e4m3fn; scales [T, P / 128] fp32, with bias columns [T, 1]; the norm reads the residual as rounded to its dtype
    Effects: residual is updated when delta is given; capturable; no host sync
    Raises: ShapeError
    Source: `rms_norm_ref` then `fp8_quant_rows_bias_ref`
    """
    _check_delta(residual, delta)
    if not residual.is_cuda:
        made = fp8_quant_rows_bias_ref(_add_norm_on_cpu(residual, weight, eps, delta, delta_bias, inverse_rms), bias_columns)
        return made if out is None else (out[0].copy_(made[0]), out[1].copy_(made[1]))
    q, scales = empty_fp8_rows(residual.shape[0], residual.shape[1], residual.device, bias_columns) if out is None else out
    from kernels.triton_ops.norm import launch_add_norm_quantize

    if residual.shape[0]:
        launch_add_norm_quantize(residual, delta, delta_bias, weight, q, scales, inverse_rms, eps, bias_columns)
    return q, scales


def add_norm(residual: Tensor, weight: Tensor, eps: float, *, delta: Tensor | None = None, delta_bias: Tensor | None = None) -> Tensor:
    """The same without quantisation.

    Returns: [T, C] in residual.dtype
    Effects: residual is updated when delta is given; capturable; no host sync
    Raises: ShapeError
    """
    _check_delta(residual, delta)
    if not residual.is_cuda:
        return _add_norm_on_cpu(residual, weight, eps, delta, delta_bias, None).to(residual.dtype)
    from kernels.triton_ops.norm import launch_add_norm_quantize

    out = torch.empty_like(residual)
    if residual.shape[0]:
        launch_add_norm_quantize(residual, delta, delta_bias, weight, out, None, None, eps, 0)
    return out


def _check_delta(residual: Tensor, delta: Tensor | None) -> None:
    if delta is not None and delta.shape != residual.shape:
        raise ShapeError(f"delta {tuple(delta.shape)} differs from residual {tuple(residual.shape)}")


def _add_norm_on_cpu(residual, weight, eps, delta, delta_bias, inverse_rms) -> Tensor:
    """Returns: the norm, fp32."""
    if delta is not None:
        total = residual.float() + delta.float()
        residual.copy_(total if delta_bias is None else total + delta_bias.float())
    x = residual.float()
    if inverse_rms is not None:
        inverse_rms.copy_(torch.rsqrt(x.square().mean(1) + eps))
    return rms_norm_ref(x, weight, eps)
