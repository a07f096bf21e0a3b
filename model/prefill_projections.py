"""The dense projections of a prefill layer, in FP8 or bf16 as its weights are. Called by the prefill forwards."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gemm_fp8 import gemm_fp8
from kernels.quantize import quantize_rows
from model.prefill_weights import Fp8Weight

NormedRows = tuple[Tensor, Tensor] | Tensor  # FP8 rows and scales, or bf16 rows: what the next projection takes


def project_output(attended: Tensor, weight: Fp8Weight | Tensor) -> Tensor:
    """This rank's part of the output projection, without bias. Shapes: attended [T, H, D]. Returns: [T, C]"""
    flat = attended.flatten(1)
    return project(quantize_rows(flat) if isinstance(weight, Fp8Weight) else flat, weight)


def add_output(residual: Tensor, attended: Tensor, weight: Tensor) -> None:
    """residual += the output projection, rounded once: the product reads and writes the stream itself.

    Shapes: residual [T, C]; attended [T, H, D]; weight [C, H * D] bf16
    """
    flat = attended.flatten(1)
    if residual.is_cuda:
        residual.addmm_(flat, weight.t())
    else:
        residual.copy_(residual.float() + flat.float() @ weight.float().t())


def project(rows: NormedRows, weight: Fp8Weight | Tensor) -> Tensor:
    """rows @ weight.T in the weight's precision. Returns: [T, R] bf16 on CUDA, fp32 elsewhere"""
    if isinstance(weight, Fp8Weight):
        values, scales = rows
        return gemm_fp8(values, scales, *weight)
    assert isinstance(rows, torch.Tensor)
    return torch.mm(rows, weight.t()) if rows.is_cuda else rows.float() @ weight.float().t()
