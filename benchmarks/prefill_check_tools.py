"""What the checks of prefill share: sizes, random inputs, poisoned memory, distances."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.attention_prefill import AttentionHeads
from kernels.experts_prefill import restore_rows
from kernels.reference import fp8_dequant_rows_ref
from model.prefill_weights import Fp8Weight

DEVICE = "cuda"
HIDDEN, EXPERTS, TOP_K = 2880, 128, 4
SIZES = (1, 127, 128, 129, 2879)
HEADS = AttentionHeads(64, 8, 64)


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 <x, y> / (|x|^2 + |y|^2), in fp64. Source: DeepGEMM"""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))


def poison_memory() -> None:
    """Fills what the allocator hands out next with NaN bytes (0xFF is NaN in fp8, bf16 and fp32), so that an unwritten output shows."""
    blocks = [torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(0xFF) for size in (1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 28)]
    del blocks


def check_rows(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], label: str) -> float:
    """FP8 rows equal to the twin's but for single rounding steps. Returns: share of payload bytes that differ"""
    torch.testing.assert_close(got[1], expected[1], rtol=2e-3, atol=0, msg=lambda m: f"{label} scales: {m}")
    value, reference = (fp8_dequant_rows_ref(*rows, rows[0].shape[1]) for rows in (got, expected))
    bad = ~((value - reference).abs() <= 0.13 * reference.abs() + _per_column(expected) * 2.0**-8)
    assert not bad.any(), f"{label}: {int(bad.sum())} bad, first {bad.nonzero()[0].tolist()}: {value[bad][0]} against {reference[bad][0]}"
    differs = float((got[0].float() != expected[0].float()).float().mean())
    assert differs < 2e-2, f"{label}: {differs:.4f} of the payload differs"
    return differs


def _per_column(rows: tuple[Tensor, Tensor]) -> Tensor:
    """Scales [T, P], of rows with one scale for 128 columns or for all"""
    return rows[1].repeat_interleave(rows[0].shape[1] // rows[1].shape[1], 1)


def normal(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * std).bfloat16()


def in_plain_order(weight: Fp8Weight, order: Callable[[int], Tensor]) -> Fp8Weight:
    """Experts' rows as the checkpoint has them; sizes whose rows need no padding."""
    rows = weight.values.shape[1]
    return Fp8Weight(restore_rows(weight.values, order(rows), rows), weight.scales)
