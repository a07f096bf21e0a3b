"""The FP8 experts of prefill on Hopper: gate/up with SwiGLU and quantisation in one launch, down in another (`cuda/experts_prefill.cu`).

Owns the row order that these kernels want of their weights, and the launches. Weights have one scale per 128 rows, tokens one each and
hidden rows one for all (`docs/decisions/even-scales.md`).
Legend: M rows of the expert buffer, E local experts, C hidden_size, I intermediate_size, R weight rows, P padded columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels import cuda_library
from kernels.gemm_fp8 import dequant_weight
from kernels.moe_prefill import ExpertRows
from kernels.quantize import BIAS_COLUMNS, padded_columns
from kernels.reference import FP8_BLOCK, fp8_dequant_rows_ref, fp8_quant_hidden_ref, hidden_scale, swiglu_ref

NAME = "experts_prefill"
MOST_SHARED_ROWS = 160
MAX_EXPERTS, COLUMN_STEP = 128, 4
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


def check_sizes(experts: int, intermediate: int) -> None:
    """Raises: ShapeError where the kernels have no instance for a rank's experts"""
    if experts > MAX_EXPERTS or intermediate % COLUMN_STEP:
        raise ShapeError(
            f"{experts} experts of {intermediate} hidden columns on a rank: the kernels take {MAX_EXPERTS} at most and multiples of "
            f"{COLUMN_STEP} columns"
        )


def restore_rows(values: Tensor, order: Tensor, rows: int) -> Tensor:
    """values [E, len(order), P] in this order -> [E, rows, P]."""
    return values.view(torch.uint8)[:, torch.argsort(order)[:rows].to(values.device)].view(torch.float8_e4m3fn)


def grouped_product_ref(q: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows times that expert's weight.

    Shapes: q [M, P] float8_e4m3fn; scales [M, 1] fp32; weight [E, R, P] float8_e4m3fn; weight_scales [E, ceil(R / 128), P / 128]
    Returns: [M, R] fp32, zeros past the last expert's rows
    """
    out = torch.zeros(q.shape[0], weight.shape[1], device=q.device)
    start = 0
    for e, end in enumerate(ends.tolist()):
        out[start:end] = fp8_dequant_rows_ref(q[start:end], scales[start:end], q.shape[1]) @ dequant_weight(weight[e], weight_scales[e]).t()
        start = end
    return out


def empty_counters(device: torch.device | str) -> Tensor:
    """What the blocks of a launch share; zero before and after each, so that one serves every launch of a stream."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def split_tokens(rows_per_expert: float) -> bool:
    """How the two blocks of a cluster divide an expert's work: they share its weight rows and have half of its tokens each (True), or they
    share its tokens and have weight rows of their own. Measured, us a layer (120b; 20b at 128 rows and again at 1,024):

    | rows an expert | share weight rows | share tokens |
    |---|---|---|
    | 32 | 962 | 826 |
    | 128 | 328 | 299 |
    | 256 | 1,600 | 1,698 |
    | 1,024 | 5,750; 1,425 | 5,993; 1,522 |

    Units: rows_per_expert: the mean over experts; a tile of shared tokens holds 176
    """
    return rows_per_expert > MOST_SHARED_ROWS


def experts_gate_up(
    expert_rows: ExpertRows, weight: Tensor, weight_scales: Tensor, intermediate: int, counters: Tensor, *,
    rows_per_expert: float, alpha: float = 1.702, limit: float = 7.0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gate/up product, SwiGLU and FP8 of the hidden rows, with `BIAS_COLUMNS` behind them.

    Shapes: weight [E, 2I rounded up to 128, P] float8_e4m3fn in `gate_up_order`, bias inside; weight_scales [E, ceil(2I / 128), P / 128],
        the same along P, as `fold_bias` leaves them
    Shapes: counters: `empty_counters`. Units: rows_per_expert: `split_tokens`
    Returns: [M, P'] float8_e4m3fn in units of `hidden_scale(limit)`, `out` if that is given; rows past the last expert's hold anything
    Effects: capturable; no host sync
    Source: `grouped_product_ref`, `swiglu_ref`, `fp8_quant_hidden_ref`
    """
    if not cuda_library.runs(weight):
        plain = restore_rows(weight, gate_up_order(2 * intermediate), 2 * intermediate)
        product = grouped_product_ref(expert_rows.q, expert_rows.scales, plain, weight_scales, expert_rows.ends)
        hidden = fp8_quant_hidden_ref(swiglu_ref(product, alpha=alpha, limit=limit), hidden_scale(limit), BIAS_COLUMNS)
        return hidden if out is None else out.copy_(hidden)
    rows = expert_rows.q.shape[0]
    if out is None:
        out = torch.empty((rows, padded_columns(intermediate, BIAS_COLUMNS)), dtype=torch.float8_e4m3fn, device=weight.device)
    cuda_library.call(
        NAME, "experts_gate_up", expert_rows.q, expert_rows.scales, expert_rows.ends, weight, weight_scales, out, counters, rows,
        weight.shape[0], weight.shape[1], weight.shape[2] // FP8_BLOCK, out.shape[1], intermediate, BIAS_COLUMNS, alpha, limit,
        hidden_scale(limit), split_tokens(rows_per_expert), _grid(weight),
    )  # fmt: skip
    return out


def experts_down(
    q: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    expert_rows: ExpertRows,
    counters: Tensor,
    *,
    rows_per_expert: float,
    limit: float = 7.0,
    out: Tensor | None = None,
) -> Tensor:
    """Down product.

    Shapes: q [M, P] float8_e4m3fn from `experts_gate_up`; weight [E, C, P] float8_e4m3fn in `down_order`, bias inside
    Returns: [M, C] bf16 on CUDA, fp32 elsewhere, or `out`; rows past the last expert's hold anything
    Effects: capturable; no host sync
    Source: `grouped_product_ref`
    """
    hidden = weight.shape[1]
    if not cuda_library.runs(weight):
        scales = torch.full((q.shape[0], 1), hidden_scale(limit), device=q.device)
        product = grouped_product_ref(q, scales, restore_rows(weight, down_order(hidden), hidden), weight_scales, expert_rows.ends)
        return product if out is None else out.copy_(product)
    if out is None:
        out = torch.empty((q.shape[0], hidden), dtype=torch.bfloat16, device=q.device)
    cuda_library.call(
        NAME, "experts_down", q, expert_rows.ends, weight, weight_scales, out, counters, q.shape[0], weight.shape[0], hidden,
        weight.shape[2] // FP8_BLOCK, hidden_scale(limit), split_tokens(rows_per_expert), _grid(weight),
    )  # fmt: skip
    return out


def _grid(weight: Tensor) -> int:
    return cuda_library.multiprocessors(weight.device.index or 0)
