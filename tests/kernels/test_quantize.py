from dataclasses import dataclass

import pytest
import torch

from common.errors import ShapeError
from kernels.quantize import empty_scales, padded_columns, quantize_rows
from kernels.reference import fp8_dequant_rows_ref, fp8_quant_rows_bias_ref, fp8_quant_rows_ref
from tests.kernels.triton_prefill import assert_fp8_rows_equal, interpreted_ops, poisoned_fp8_rows


@dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    bias_columns: int = 0

    def __str__(self) -> str:
        return f"T{self.rows}-C{self.columns}-B{self.bias_columns}"


CASES = [Case(1, 64), Case(3, 128), Case(7, 2880, 32), Case(2, 2880), Case(5, 192, 32), Case(2, 4096), Case(9, 129), Case(3, 256, 32)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantize_rows_kernel_equals_reference(case):
    ops = interpreted_ops("quantize")
    x = torch.randn(case.rows, case.columns, generator=torch.Generator().manual_seed(case.columns)).bfloat16()
    x[case.rows // 2] = 0
    q, scales = poisoned_fp8_rows(case.rows, case.columns, case.bias_columns)
    ops.launch_quantize_rows(x, q, scales, case.bias_columns)
    assert_fp8_rows_equal((q, scales), fp8_quant_rows_bias_ref(x, case.bias_columns), str(case))


def test_quantize_rows_without_bias_columns_is_the_plain_quantisation():
    x = torch.randn(4, 200)
    for got, expected in zip(quantize_rows(x), fp8_quant_rows_ref(x), strict=True):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 3e3])
def test_bias_columns_hold_exactly_one_at_any_magnitude(magnitude):
    x = torch.randn(6, 192) * magnitude
    q, scales = quantize_rows(x, bias_columns=32)
    values = fp8_dequant_rows_ref(q, scales, q.shape[1])
    assert torch.equal(values[:, 192:224], torch.ones(6, 32))
    assert torch.equal(values[:, 224:], torch.zeros(6, 32))
    assert scales.shape == (6, 1)
    assert torch.equal(scales, torch.exp2(scales.log2().round()))
    loose = scales * 2.0**-10
    assert ((values[:, :192] - x).abs() <= x.abs() / 16 + loose).all()


def test_bias_columns_stay_in_one_group():
    with pytest.raises(ShapeError, match="cross a group"):
        quantize_rows(torch.zeros(1, 112), bias_columns=32)


@pytest.mark.parametrize("rows", [1, 4, 5, 127])
def test_scales_lie_group_major_with_aligned_group_starts(rows):
    scales = empty_scales(rows, 23, "cpu")
    assert scales.shape == (rows, 23)
    assert scales.stride(0) == 1
    assert scales.stride(1) % 4 == 0
    assert scales.stride(1) - rows in range(4)


def test_padded_columns_of_the_real_model():
    assert padded_columns(2880) == padded_columns(2880, 32) == 2944
    assert padded_columns(1536, 32) == 1664
    assert padded_columns(4096) == 4096
