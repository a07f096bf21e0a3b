"""FP8 row quantisation (1x128 for DeepGEMM, one scale a row for experts) and the scale layout that DeepGEMM loads without a transpose.

Owns how activations look in FP8 on their way into a GEMM. Weights are quantised at conversion, not here. Called by `model/` and by the
other prefill ops. Legend: T tokens, C columns, P columns padded to a multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels.reference import FP8_BLOCK, fp8_quant_rows_bias_ref

SCALE_ROW_ALIGNMENT = 4
BIAS_COLUMNS = 32


def padded_columns(columns: int, bias_columns: int = 0) -> int:
    """Columns and bias columns rounded up to whole 128-column groups (2880 -> 2944, with or without 32 bias columns).

    Raises: ShapeError if the bias columns would lie in two groups, since only the last one's scale is exact
    """
    padded = -(-(columns + bias_columns) // FP8_BLOCK) * FP8_BLOCK
    if bias_columns and columns < padded - FP8_BLOCK:
        raise ShapeError(f"{bias_columns} bias columns after {columns} columns cross a group of {FP8_BLOCK}")
    return padded


def empty_scales(rows: int, groups: int, device: torch.device | str) -> Tensor:
    """Uninitialised scales, group-major: rows lie side by side and a group's start is 16-byte aligned, as TMA wants.

    Returns: [rows, groups] fp32 with strides (1, rows rounded up to 4)
    Source: DeepGEMM `get_mn_major_tma_aligned_tensor`, which passes such a tensor through untouched
    """
    aligned = -(-rows // SCALE_ROW_ALIGNMENT) * SCALE_ROW_ALIGNMENT
    return torch.empty((groups, aligned), dtype=torch.float32, device=device).t()[:rows]


def empty_fp8_rows(rows: int, columns: int, device: torch.device | str, bias_columns: int = 0) -> tuple[Tensor, Tensor]:
    """Uninitialised payload [rows, P] float8_e4m3fn and its scales, P = padded_columns(columns, bias_columns): [rows, P / 128], with bias
    columns [rows, 1]."""
    padded = padded_columns(columns, bias_columns)
    payload = torch.empty((rows, padded), dtype=torch.float8_e4m3fn, device=device)
    return payload, empty_scales(rows, 1 if bias_columns else padded // FP8_BLOCK, device)


def quantize_rows(x: Tensor, *, bias_columns: int = 0) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 with one scale per row and 128 columns, or with bias columns one per row.

    Shapes: x [T, C] float, rows contiguous
    Units: bias_columns: padding columns that hold exactly 1.0 after scaling, for a GEMM whose weight carries its bias there
    Returns: q [T, P] float8_e4m3fn; scales [T, P / 128], with bias columns [T, 1], fp32, group-major on CUDA
    Effects: capturable in a CUDA graph; no host sync
    Raises: ShapeError if the bias columns would cross a group
    Source: `fp8_quant_rows_bias_ref`
    """
    q, scales = empty_fp8_rows(x.shape[0], x.shape[1], x.device, bias_columns)
    if not x.is_cuda:
        return fp8_quant_rows_bias_ref(x, bias_columns)
    from kernels.triton_ops.quantize import launch_quantize_rows

    if x.shape[0]:
        launch_quantize_rows(x, q, scales, bias_columns)
    return q, scales
