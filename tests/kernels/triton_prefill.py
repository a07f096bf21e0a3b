"""Support of the Triton prefill kernels' tests: interpreter mode without a GPU, poisoned outputs, and FP8 comparison.

The interpreter truncates on stores narrower than fp32, so tests hand it fp32 outputs where the kernel rounds, and round them here.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from kernels.quantize import empty_scales, padded_columns
from kernels.reference import FP8_BLOCK, fp8_dequant_rows_ref


def interpreted_ops(name: str):
    """Module `kernels.triton_ops.<name>` with its kernels in interpreter mode; skips where triton is not installed or has a GPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (extra `gpu`)")
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("triton compiles for the GPU that is here: benchmarks/prefill.py --check runs these kernels on it")
    return importlib.import_module(f"kernels.triton_ops.{name}")


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """NaN for floats, the lowest value for integers."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype)


def poisoned_fp8_rows(rows: int, columns: int, bias_columns: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload [rows, P] fp32 (to be rounded by the comparison) and group-major scales, all NaN; with bias columns one scale a row."""
    padded = padded_columns(columns, bias_columns)
    scales = empty_scales(rows, 1 if bias_columns else padded // FP8_BLOCK, "cpu")
    return poisoned(rows, padded), scales.fill_(float("nan"))


def group_major(scales: torch.Tensor) -> torch.Tensor:
    """The same scales in the layout that CUDA launchers take."""
    return empty_scales(scales.shape[0], scales.shape[1], "cpu").copy_(scales)


def assert_fp8_rows_equal(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], label: str) -> None:
    """Scales to fp32 rounding; payload equal but for 1 in 200 elements one step away (the kernel multiplies by 1 / scale)."""
    q, scales = got[0].to(torch.float8_e4m3fn), got[1]
    torch.testing.assert_close(scales, expected[1], rtol=1e-6, atol=0, msg=lambda m: f"{label}: {m}")
    differs = q.float() != expected[0].float()
    value = fp8_dequant_rows_ref(q, scales, q.shape[1])
    reference = fp8_dequant_rows_ref(expected[0], expected[1], q.shape[1])
    assert not value.isnan().any(), f"{label}: {int(value.isnan().sum())} elements were never written"
    step = reference.abs() * 0.13 + expected[1].repeat_interleave(q.shape[1] // scales.shape[1], 1) * 2.0**-9
    bad = (value - reference).abs() > step
    assert not bad.any(), f"{label}: first bad {bad.nonzero()[0].tolist()}, got {value[bad][0]}, expected {reference[bad][0]}"
    assert differs.float().mean() < 5e-3, f"{label}: {differs.float().mean():.4f} of the payload differs"
