"""How close is close: one row per kind of result, and assertions whose failure says where and by how much.

A test that needs another number says why on the line that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= atol + rtol * |expected|, element by element."""

    rtol: float
    atol: float


FP32_OP = Tolerance(rtol=1e-4, atol=1e-5)
BF16_OP = Tolerance(rtol=1e-2, atol=1e-2)
FP16_OP = Tolerance(rtol=1e-3, atol=1e-3)
FP32_LOGITS = Tolerance(rtol=0.0, atol=1e-3)  # what we promise against transformers, at every position
FP8_GEMM_DIFF = 1e-3
ONE_FP4_SIDE_DIFF = 1e-2
TWO_FP4_SIDES_DIFF = 2e-2


def assert_close(actual: Tensor, expected: Tensor, tolerance: Tolerance, case: object = "") -> None:
    """Fails on another shape, on NaN where none is expected, and on the first element outside the tolerance."""
    _assert_same_shape(actual, expected, case)
    actual64, expected64 = actual.detach().double().cpu(), expected.detach().double().cpu()
    error = (actual64 - expected64).abs()
    error = torch.where(actual64 == expected64, torch.zeros_like(error), error)  # equal infinities
    bad = ~(error <= tolerance.atol + tolerance.rtol * expected64.abs())
    if bad.any():
        _fail(f"{tolerance}", actual64, expected64, error, bad, case)


def assert_same_bytes(actual: Tensor, expected: Tensor, case: object = "") -> None:
    """Fails unless dtype, shape and every bit agree."""
    _assert_same_shape(actual, expected, case)
    assert actual.dtype == expected.dtype, f"{case}: dtype {actual.dtype}, expected {expected.dtype}"
    a, b = (x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (actual, expected))
    different = a != b
    if different.any():
        where = int(different.nonzero()[0]) // actual.element_size()
        values = actual.flatten()[where].item(), expected.flatten()[where].item()
        raise AssertionError(f"{case}: {int(different.sum())} bytes differ, first at element {where}: {values[0]} != {values[1]}")


def calc_diff(actual: Tensor, expected: Tensor) -> float:
    """1 - 2<a, b> / (<a, a> + <b, b>): DeepGEMM's measure of low-precision products; 0 is equal."""
    a, b = actual.double().cpu(), expected.double().cpu()
    norm = (a * a + b * b).sum()
    return 0.0 if norm == 0 else float(1 - 2 * (a * b).sum() / norm)


def assert_calc_diff(actual: Tensor, expected: Tensor, limit: float, case: object = "") -> None:
    """Fails on another shape, on NaN, and on a `calc_diff` at or above the limit."""
    _assert_same_shape(actual, expected, case)
    diff = calc_diff(actual, expected)
    if not diff < limit:
        error = (actual.double().cpu() - expected.double().cpu()).abs()
        bad = error == error.max()
        _fail(f"calc_diff {diff:.3e} < {limit}", actual.double().cpu(), expected.double().cpu(), error, bad | error.isnan(), case)


def _assert_same_shape(actual: Tensor, expected: Tensor, case: object) -> None:
    assert actual.shape == expected.shape, f"{case}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"


def _fail(rule: str, actual: Tensor, expected: Tensor, error: Tensor, bad: Tensor, case: object) -> None:
    where = tuple(bad.nonzero()[0].tolist())
    raise AssertionError(
        f"{case}: {int(bad.sum())} of {bad.numel()} elements break {rule}; max error {error.max():.3e}, mean {error.mean():.3e}; "
        f"first at {where}: got {actual[where]:.6g}, expected {expected[where]:.6g}"
    )
