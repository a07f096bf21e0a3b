"""A rank's experts as the FP8 expert kernels want them, made once at load: rows in the kernels' order, one scale per 128 rows, biases in
the columns' padding. Prefill and decode pools on GPUs hold the same. Called by `model/prefill_weights.py` and `model/decode_experts.py`.

Legend: C hidden_size, E local experts, I local intermediate, R rows, P padded columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError
from kernels.experts_prefill import check_sizes, down_order, gate_up_order
from kernels.gemm_fp8 import fold_bias
from kernels.quantize import BIAS_COLUMNS, padded_columns
from kernels.reference import FP8_BLOCK
from model.shards import ExpertShard, Fp8Matrix, Mxfp4Matrix


class Fp8Weight(NamedTuple):
    """values [..., R, P] float8_e4m3fn, rows not padded; scales [..., ceil(R / 128), P / 128] fp32, one per 128x128 block."""

    values: Tensor
    scales: Tensor


def pack_shard(experts: ExpertShard, hidden: int, device: torch.device | str) -> tuple[Fp8Weight, Fp8Weight]:
    """Units: hidden: C
    Returns: gate_up [E, 2I rounded up to 128, P] in `gate_up_order` and down [E, C, P] in `down_order`, biases folded in
    Effects: takes one expert at a time to the device
    Raises: ConfigError unless the experts are packed FP8; ShapeError if their sizes have no kernel
    """
    check_sizes(experts.gate_up_bias.shape[0], experts.intermediate)
    gate_up, down = experts.gate_up, experts.down
    if not isinstance(gate_up, Fp8Matrix) or not isinstance(down, Fp8Matrix):
        came = "MXFP4" if isinstance(gate_up, Mxfp4Matrix) or isinstance(down, Mxfp4Matrix) else "decoded"
        raise ConfigError(f"FP8 experts are wanted and {came} ones came; run `tandem convert` and set the pool's weights to fp8")
    return (
        pack_experts(gate_up, experts.gate_up_bias, gate_up_order(2 * experts.intermediate), device),
        pack_experts(down, experts.down_bias, down_order(hidden), device),
    )


def pack_experts(matrix: Fp8Matrix, bias: Tensor, order: Tensor, device: torch.device | str) -> Fp8Weight:
    """Experts' matrices with their rows in this order, with room for the bias columns, scales even and bias folded in.

    Shapes: bias [E, rows] fp32; order [rows or more] int64: which row lies where, numbers from `rows` on mean a row of zeros
    Effects: takes one expert at a time to the device
    """
    experts, rows = matrix.values.shape[0], order.shape[0]
    padded = padded_columns(matrix.columns, BIAS_COLUMNS)
    kept = min(padded, matrix.values.shape[2])
    order = order.to(device)
    values = torch.zeros((experts, rows, padded), dtype=torch.float8_e4m3fn, device=device)
    for expert in range(experts):
        source = matrix.values[expert, : matrix.rows, :kept].to(device).to(values.dtype).view(torch.uint8)
        missing = rows - source.shape[0]
        source = torch.nn.functional.pad(source, (0, 0, 0, missing)) if missing else source
        values.view(torch.uint8)[expert, :, :kept] = source[order]
    scales = torch.ones((experts, -(-rows // FP8_BLOCK), padded // FP8_BLOCK), dtype=torch.float32, device=device)
    scales[:, :, : kept // FP8_BLOCK] = matrix.scales[:, : scales.shape[1], : kept // FP8_BLOCK].to(device)
    ordered_bias = torch.nn.functional.pad(bias.to(device), (0, rows - bias.shape[1]))[:, order]
    fold_bias(values, scales, ordered_bias, matrix.columns, BIAS_COLUMNS)
    return Fp8Weight(values, scales)
