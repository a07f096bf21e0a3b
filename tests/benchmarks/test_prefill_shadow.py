import pytest
import torch

from benchmarks.prefill_shadow import Shadow, check_sizes
from kernels.moe_prefill import permute_rows
from kernels.quantize import quantize_rows
from kernels.router import Routing


def test_the_first_op_that_departs_from_its_twin_is_named():
    shadow = Shadow()

    def without_bias(x, *, bias_columns):
        q, scales = quantize_rows(x, bias_columns=bias_columns)
        q[:, 256:] = float("nan")
        return q, scales

    x = torch.randn(3, 256)
    shadow.wrap("quantize_rows", quantize_rows, quantize_rows)(x, bias_columns=32)
    shadow.wrap("quantize_rows", without_bias, quantize_rows)(x, bias_columns=32)
    assert [(d.op, d.call, d.error) for d in shadow.departures] == [("quantize_rows", 1, float("inf"))]


def test_rows_of_the_buffer_that_hold_no_token_do_not_count():
    shadow = Shadow()
    routing = Routing(torch.tensor([[0], [0], [1]]).int(), torch.ones(3, 1), torch.tensor([[0], [1], [-1]]).int(), torch.tensor([2]).int())
    rows = permute_rows(*quantize_rows(torch.randn(3, 64), bias_columns=32), routing)

    def product(rows):
        return rows.q.float() * rows.scales

    def with_other_garbage(rows):
        out = product(rows)
        out[2:] = float("nan")
        return out

    shadow.wrap("experts_down", with_other_garbage, product)(rows)
    assert shadow.departures == []
    assert shadow.worst["experts_down"] == 0.0


@pytest.mark.gpu
def test_every_op_of_the_forward_equals_its_twin_at_odd_sizes():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    assert [line for line in check_sizes() if line.startswith("FAIL")] == []
