"""The FP8 experts of prefill on Hopper: gate/up with SwiGLU and quantisation in one launch, down in another (`cuda/experts_prefill.cu`).

Owns the row order that these kernels want of their weights and the launches; elsewhere than on a GPU their twins are `grouped_gemm_fp8` and
`swiglu_quantize`. Tokens are padded to 8 inside a tile and not in the buffer, so any row alignment will do.
Legend: M rows of the expert buffer, E local experts, C hidden_size, I intermediate_size, R weight rows, P padded columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels import cuda_library
from kernels.gemm_fp8 import grouped_gemm_fp8
from kernels.moe_prefill import ExpertRows, swiglu_quantize
from kernels.quantize import empty_fp8_rows
from kernels.reference import FP8_BLOCK, hidden_scale

NAME = "experts_prefill"
FEW_ROWS, MIDDLE_ROWS = 48, 144
TILE_ROWS = 16  # of the tensor cores' operand, in whose fragments a thread holds rows 8 apart


def gate_up_order(rows: int) -> Tensor:
    """Which row of an interleaved gate/up matrix lies where: within 128 rows, a thread has gate and up of four neighbouring columns.

    Returns: [rows rounded up to 128] int64; numbers from `rows` on mean a row of zeros
    """
    i = torch.arange(-(-rows // FP8_BLOCK) * FP8_BLOCK)
    half, warp, up, pair, odd = (i >> 6) & 1, (i >> 4) & 3, (i >> 3) & 1, (i >> 1) & 3, i & 1
    column = 16 * warp + 4 * pair + 2 * odd + half
    return (i & ~(FP8_BLOCK - 1)) + 2 * column + up


def down_order(rows: int) -> Tensor:
    """Which row of a down matrix lies where: within 16 rows, a thread has four neighbouring ones.

    Returns: [rows] int64
    Raises: ShapeError if the rows are no multiple of 16
    """
    if rows % TILE_ROWS:
        raise ShapeError(f"a down matrix has {rows} rows, the kernel takes multiples of {TILE_ROWS}")
    i = torch.arange(rows)
    upper, pair, odd = (i >> 3) & 1, (i >> 1) & 3, i & 1
    return (i & ~(TILE_ROWS - 1)) + 4 * pair + 2 * upper + odd


def order_rows(values: Tensor, order: Tensor) -> Tensor:
    """values [E, R, P] float8_e4m3fn -> the rows in this order, [E, len(order), P]; scales of 128 rows stay as they are."""
    missing = order.shape[0] - values.shape[1]
    padded = torch.nn.functional.pad(values.view(torch.uint8), (0, 0, 0, missing)) if missing > 0 else values.view(torch.uint8)
    return padded[:, order.to(values.device)].view(torch.float8_e4m3fn)


def restore_rows(values: Tensor, order: Tensor, rows: int) -> Tensor:
    """Inverse of `order_rows`."""
    return values.view(torch.uint8)[:, torch.argsort(order)[:rows].to(values.device)].view(torch.float8_e4m3fn)


def empty_counters(device: torch.device | str) -> Tensor:
    """What the blocks of a launch share; zero before and after each, so that one serves every launch of a stream."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def mode_of(rows_per_expert: float) -> int:
    """How the blocks of a cluster divide the work. 0: for up to 64 rows; 1: two blocks share an expert's tokens and have weight rows of their
    own; 2: they share weight rows and have half of the tokens each.

    Units: rows_per_expert: the mean over experts
    """
    return 0 if rows_per_expert <= FEW_ROWS else 1 if rows_per_expert <= MIDDLE_ROWS else 2


def experts_gate_up(
    expert_rows: ExpertRows, weight: Tensor, weight_scales: Tensor, intermediate: int, counters: Tensor, *, alpha: float = 1.702,
    limit: float = 7.0, bias_columns: int = 0, mode: int | None = None,
) -> Tensor:  # fmt: skip
    """Gate/up product, SwiGLU and FP8 of the hidden rows.

    Shapes: weight [E, 2I rounded up to 128, P] float8_e4m3fn in `gate_up_order`, bias inside; weight_scales [E, ceil(2I / 128), P / 128],
        the same along P as `fold_bias` leaves them; the rows' scales are the same along P too
    Shapes: counters: `empty_counters`
    Returns: [M, P'] float8_e4m3fn in units of `hidden_scale(limit)`; rows past an expert's end hold anything
    Effects: capturable; no host sync
    Raises: ShapeError
    Source: `grouped_gemm_fp8`, `swiglu_quantize`
    """
    if not cuda_library.runs(weight):
        plain = restore_rows(weight, gate_up_order(2 * intermediate), 2 * intermediate)
        product = grouped_gemm_fp8(expert_rows.q, expert_rows.scales, plain, weight_scales, expert_rows)
        return swiglu_quantize(product, expert_rows, alpha=alpha, limit=limit, bias_columns=bias_columns)[0]
    if intermediate % 4:
        raise ShapeError(f"the kernel takes multiples of 4 hidden columns, got {intermediate}")
    q, _ = empty_fp8_rows(expert_rows.q.shape[0], intermediate, weight.device, bias_columns)
    cuda_library.call(
        NAME, "experts_gate_up", expert_rows.q, expert_rows.scales, expert_rows.ends, weight, weight_scales, q, counters,
        expert_rows.q.shape[0], weight.shape[0], expert_rows.alignment, weight.shape[1], weight.shape[2] // FP8_BLOCK, q.shape[1],
        intermediate, bias_columns, alpha, limit, hidden_scale(limit), _mode(expert_rows, weight, mode), _grid(weight),
    )  # fmt: skip
    return q


def experts_down(
    q: Tensor, weight: Tensor, weight_scales: Tensor, expert_rows: ExpertRows, counters: Tensor, *, limit: float = 7.0,
    mode: int | None = None,
) -> Tensor:  # fmt: skip
    """Down product.

    Shapes: q [M, P] float8_e4m3fn from `experts_gate_up`; weight [E, C, P] float8_e4m3fn in `down_order`, bias inside
    Returns: [M, C] bf16 on CUDA, fp32 elsewhere; rows past an expert's end hold anything
    Effects: capturable; no host sync
    Source: `grouped_gemm_fp8`
    """
    hidden = weight.shape[1]
    if not cuda_library.runs(weight):
        scales = torch.full((q.shape[0], q.shape[1] // FP8_BLOCK), hidden_scale(limit))
        return grouped_gemm_fp8(q, scales, restore_rows(weight, down_order(hidden), hidden), weight_scales, expert_rows)
    out = torch.empty((q.shape[0], hidden), dtype=torch.bfloat16, device=q.device)
    cuda_library.call(
        NAME, "experts_down", q, expert_rows.ends, weight, weight_scales, out, counters, q.shape[0], weight.shape[0],
        expert_rows.alignment, hidden, weight.shape[2] // FP8_BLOCK, hidden_scale(limit), _mode(expert_rows, weight, mode), _grid(weight),
    )  # fmt: skip
    return out


def _mode(expert_rows: ExpertRows, weight: Tensor, mode: int | None) -> int:
    return mode_of(expert_rows.rows.numel() / weight.shape[0]) if mode is None else mode


def _grid(weight: Tensor) -> int:
    return cuda_library.multiprocessors(weight.device.index or 0)
