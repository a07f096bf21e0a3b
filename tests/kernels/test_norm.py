from dataclasses import dataclass

import pytest
import torch

from common.errors import ShapeError
from kernels.norm import add_norm, add_norm_quantize
from kernels.reference import fp8_quant_rows_bias_ref, rms_norm_ref
from tests.kernels.triton_prefill import assert_fp8_rows_equal, interpreted_ops, poisoned, poisoned_fp8_rows


@dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    has_delta: bool = True
    has_bias: bool = True
    bias_columns: int = 0

    def __str__(self) -> str:
        return f"T{self.rows}-C{self.columns}-d{self.has_delta:d}-b{self.has_bias:d}-B{self.bias_columns}"


CASES = [
    Case(1, 320),
    Case(5, 320, has_bias=False),
    Case(3, 320, has_delta=False, has_bias=False),
    Case(3, 2880, bias_columns=32),
    Case(4, 192, bias_columns=32),
    Case(3, 256, bias_columns=32),  # the bias columns are a group of their own
    Case(2, 128, bias_columns=32),
]


def make(case: Case):
    g = torch.Generator().manual_seed(case.rows * 1000 + case.columns)
    residual = torch.randn(case.rows, case.columns, generator=g)
    delta = torch.randn(case.rows, case.columns, generator=g).bfloat16() if case.has_delta else None
    bias = torch.randn(case.columns, generator=g).bfloat16() if case.has_bias else None
    weight = (1 + 0.1 * torch.randn(case.columns, generator=g)).bfloat16()
    return residual, delta, bias, weight


@pytest.mark.parametrize("case", CASES, ids=str)
def test_add_norm_quantize_kernel_equals_reference(case):
    ops = interpreted_ops("norm")
    residual, delta, bias, weight = make(case)
    expected_residual = residual.clone()
    expected_inverse, inverse = poisoned(case.rows), poisoned(case.rows)
    expected = add_norm_quantize(
        expected_residual, weight, 1e-5, delta=delta, delta_bias=bias, bias_columns=case.bias_columns, inverse_rms=expected_inverse
    )
    q, scales = poisoned_fp8_rows(case.rows, case.columns, case.bias_columns)
    ops.launch_add_norm_quantize(residual, delta, bias, weight, q, scales, inverse, 1e-5, case.bias_columns)
    torch.testing.assert_close(residual, expected_residual, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inverse, expected_inverse, rtol=1e-6, atol=0)
    assert_fp8_rows_equal((q, scales), expected, str(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_add_norm_kernel_equals_reference(case):
    ops = interpreted_ops("norm")
    residual, delta, bias, weight = make(case)
    expected_residual = residual.clone()
    expected = add_norm(expected_residual, weight, 1e-5, delta=delta, delta_bias=bias)
    out = poisoned(case.rows, case.columns)
    ops.launch_add_norm_quantize(residual, delta, bias, weight, out, None, None, 1e-5, 0)
    torch.testing.assert_close(residual, expected_residual, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_add_norm_quantize_on_cpu_composes_the_twins():
    residual, delta, bias, weight = make(Case(4, 192))
    total = residual + delta.float() + bias.float()
    q, scales = add_norm_quantize(residual, weight, 1e-5, delta=delta, delta_bias=bias)
    assert torch.equal(residual, total)
    expected = fp8_quant_rows_bias_ref(rms_norm_ref(total, weight, 1e-5), 0)
    assert torch.equal(q.float(), expected[0].float())
    assert torch.equal(scales, expected[1])


def test_norm_of_bf16_residual_reads_what_it_stored():
    residual = torch.full((1, 128), 1.0).bfloat16()
    delta = torch.full((1, 128), 2.0**-10).bfloat16()
    add_norm_quantize(residual, torch.ones(128), 0.0, delta=delta)
    assert torch.equal(residual, torch.ones(1, 128).bfloat16())


def test_delta_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match="delta"):
        add_norm_quantize(torch.zeros(2, 128), torch.ones(128), 1e-5, delta=torch.zeros(1, 128))
