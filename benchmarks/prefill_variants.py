"""Ways to run parts of the prefill forward that are not served until they are measured, and how to switch them on for a block of code.

Called by `benchmarks/prefill_next.py` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import model.prefill_cuda
import model.prefill_inputs
import model.prefill_pieces
from kernels.moe_prefill import ExpertRows, permute_rows, swiglu_quantize
from kernels.quantize import empty_fp8_rows

WindowAttention = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def packed_window(tokens: int, block_n: int, num_warps: int) -> WindowAttention:
    """`window_attention` by tiles of all heads of a group. Units: tokens: of a tile"""
    from kernels.triton_ops.packed_window_attention import launch_packed_window_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window_tokens: int) -> Tensor:
        out = torch.empty_like(q)
        launch_packed_window_attention(
            q, k, v, sinks, out, window_tokens, q.shape[2] ** -0.5, tokens=tokens, block_n=block_n, num_warps=num_warps
        )
        return out

    return attend


def tiled_window(block_m: int, block_n: int, num_warps: int) -> WindowAttention:
    """`window_attention` with other tiles of one head."""
    from kernels.triton_ops.window_attention import launch_window_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window_tokens: int) -> Tensor:
        out = torch.empty_like(q)
        launch_window_attention(
            q, k, v, sinks, out, window_tokens, q.shape[2] ** -0.5, block_m=block_m, block_n=block_n, num_warps=num_warps
        )
        return out

    return attend


def permute_and_zero(q: Tensor, scales: Tensor, routing: Any, *, alignment: int, first_expert: int = 0) -> ExpertRows:
    """`permute_rows` with zeros in the rows that no token owns."""
    from kernels.triton_ops.padding_rows import launch_zero_padding_rows

    rows = permute_rows(q, scales, routing, alignment=alignment, first_expert=first_expert)
    launch_zero_padding_rows(rows.q, rows.ends, alignment)
    return rows


def fast_swiglu(
    gate_up: Tensor, expert_rows: ExpertRows, *, alpha: float = 1.702, limit: float = 7.0, bias_columns: int = 0
) -> tuple[Tensor, Tensor]:
    """`swiglu_quantize` with the hardware's exponential and reciprocal."""
    from kernels.triton_ops.moe_prefill import launch_swiglu_quantize

    q, scales = empty_fp8_rows(gate_up.shape[0], gate_up.shape[1] // 2, gate_up.device, bias_columns)
    launch_swiglu_quantize(gate_up, expert_rows.ends, q, scales, alpha, limit, expert_rows.alignment, bias_columns, fast=True)
    return q, scales


def fast_swiglu_and_zero(gate_up: Tensor, expert_rows: ExpertRows, **options: Any) -> tuple[Tensor, Tensor]:
    """Both."""
    from kernels.triton_ops.padding_rows import launch_zero_padding_rows

    q, scales = fast_swiglu(gate_up, expert_rows, **options)
    launch_zero_padding_rows(q, expert_rows.ends, expert_rows.alignment)
    return q, scales


def swiglu_and_zero(gate_up: Tensor, expert_rows: ExpertRows, **options: Any) -> tuple[Tensor, Tensor]:
    """`swiglu_quantize` with zeros in the rows that no token owns."""
    from kernels.triton_ops.padding_rows import launch_zero_padding_rows

    q, scales = swiglu_quantize(gate_up, expert_rows, **options)
    launch_zero_padding_rows(q, expert_rows.ends, expert_rows.alignment)
    return q, scales


@contextmanager
def using(*, window: Callable | None = None, zero_padding: bool = False, fast: bool = False) -> Iterator[None]:
    """Replaces ops of the forward while the block runs, capture of graphs included."""
    changes: list[tuple[Any, str, Callable]] = []
    if window is not None:
        changes += [(model.prefill_inputs, "window_attention", window), (model.prefill_pieces, "window_attention", window)]
    swiglu = {(True, True): fast_swiglu_and_zero, (True, False): swiglu_and_zero, (False, True): fast_swiglu}.get((zero_padding, fast))
    if zero_padding:
        changes.append((model.prefill_cuda, "permute_rows", permute_and_zero))
    if swiglu is not None:
        changes.append((model.prefill_cuda, "swiglu_quantize", swiglu))
    saved = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, op in changes:
        setattr(module, name, op)
    try:
        yield
    finally:
        for module, name, op in saved:
            setattr(module, name, op)
