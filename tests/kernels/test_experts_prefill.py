from dataclasses import dataclass

import pytest
import torch

from kernels.experts_prefill import (
    down_order,
    empty_counters,
    experts_down,
    experts_gate_up,
    gate_up_order,
    order_rows,
    restore_rows,
)
from kernels.gemm_fp8 import fold_bias, grouped_gemm_fp8
from kernels.moe_prefill import ExpertRows, swiglu_quantize
from kernels.quantize import empty_fp8_rows, padded_columns, quantize_rows
from kernels.reference import FP8_BLOCK, fp8_dequant_rows_ref, fp8_quant_blocks_ref
from tests.support.emulated_cuda import emulated  # noqa: F401


BIAS = 32


@dataclass(frozen=True)
class Case:
    counts: tuple[int, ...]
    hidden: int = 256
    intermediate: int = 256
    alignment: int = 8

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.counts))}-C{self.hidden}-I{self.intermediate}-A{self.alignment}"


CASES = [
    Case((1,)),
    Case((0, 17, 0, 8, 0)),
    Case((77, 3)),
    Case((65, 0, 9), intermediate=384, alignment=128),
    Case((5, 171), hidden=384, intermediate=192, alignment=1),
    Case((31,), hidden=128, intermediate=96),
    Case((13, 20), hidden=320, intermediate=72),
    Case((0, *(1,) * 33, 9), hidden=96, intermediate=96),  # more than the experts that end the list of work
]


def matrices(experts: int, rows: int, columns: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, rows, columns, generator=g) / columns**0.5 * torch.exp2(torch.randint(-3, 3, (experts, rows, 1), generator=g))
    values, scales = fp8_quant_blocks_ref(torch.nn.functional.pad(weight, (0, padded_columns(columns, BIAS) - columns)))
    values = values[:, :rows].contiguous()
    fold_bias(values, scales, torch.randn(experts, rows, generator=g) * 0.3, columns, BIAS)
    return values, scales


def poisoned_rows(case: Case) -> ExpertRows:
    """Tokens of very different size, so that scales of neighbouring column groups differ; everything between experts is NaN."""
    g = torch.Generator().manual_seed(3)
    starts, ends, start = [], [], 0
    for count in case.counts:
        starts.append(start)
        ends.append(start + count)
        start = -(-ends[-1] // case.alignment) * case.alignment
    q, scales = empty_fp8_rows(start + 3, case.hidden, "cpu", BIAS)
    q.view(torch.uint8).fill_(0xFF)
    scales.fill_(float("nan"))
    for first, end in zip(starts, ends, strict=True):
        x = torch.randn(end - first, case.hidden, generator=g) * torch.exp2(torch.randint(-6, 3, (1, case.hidden), generator=g))
        q.view(torch.uint8)[first:end], scales[first:end] = (p.view(torch.uint8) if p.dtype != torch.float32 else p for p in quantize_rows(x, bias_columns=BIAS))
    return ExpertRows(q, scales, torch.tensor(ends, dtype=torch.int32), torch.empty(0, 1, dtype=torch.int32), case.alignment)


def used_rows(rows: ExpertRows, counts: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(end - count, end) for end, count in zip(rows.ends.tolist(), counts, strict=True)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_orders_are_permutations_within_a_scale_block(case):
    for order, rows in ((gate_up_order(2 * case.intermediate), 2 * case.intermediate), (down_order(case.hidden), case.hidden)):
        assert torch.equal(order.sort().values, torch.arange(order.shape[0]))
        assert torch.equal(order // FP8_BLOCK, torch.arange(order.shape[0]) // FP8_BLOCK)
        values = torch.randint(0, 127, (2, rows, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert torch.equal(restore_rows(order_rows(values, order), order, rows).view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gate_up_kernel_equals_product_swiglu_and_quantisation(case, mode, emulated):
    rows = poisoned_rows(case)
    used = used_rows(rows, case.counts)
    weight, scales = matrices(len(case.counts), 2 * case.intermediate, case.hidden, 5)
    expected, expected_scales = swiglu_quantize(grouped_gemm_fp8(rows.q, rows.scales, weight, scales, rows), rows, bias_columns=BIAS)
    counters = empty_counters("cpu")
    packed = order_rows(weight, gate_up_order(2 * case.intermediate))
    for _ in range(2):
        q = experts_gate_up(rows, packed, scales, case.intermediate, counters, bias_columns=BIAS, mode=mode)
    assert counters.tolist() == [0, 0]
    got, wanted = (fp8_dequant_rows_ref(p[used], expected_scales[used], p.shape[1]) for p in (q, expected))
    bad = (got - wanted).abs() > 0.13 * wanted.abs() + 2.0**-12
    assert not bad.any(), f"{int(bad.sum())} bad, first {bad.nonzero()[0].tolist()}"
    assert float((q[used].float() != expected[used].float()).float().mean()) < 2e-3
    columns = slice(case.intermediate, case.intermediate + BIAS)
    assert torch.equal(got[:, columns], torch.ones_like(got[:, columns]))
    assert not got[:, columns.stop :].any()


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_down_kernel_equals_grouped_product(case, mode, emulated):
    rows = poisoned_rows(case)
    used = used_rows(rows, case.counts)
    weight, scales = matrices(len(case.counts), case.intermediate // 16 * 16, case.hidden, 6)
    hidden = torch.full_like(rows.scales, 0.125)
    expected = grouped_gemm_fp8(rows.q, hidden, weight, scales, rows)[used]
    counters = empty_counters("cpu")
    for _ in range(2):
        y = experts_down(rows.q, order_rows(weight, down_order(weight.shape[1])), scales, rows, counters, mode=mode)[used]
    assert counters.tolist() == [0, 0]
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.square().mean().sqrt()))


def test_twins_on_the_cpu_restore_the_order():
    case = Case((5, 9))
    rows = poisoned_rows(case)
    used = used_rows(rows, case.counts)
    weight, scales = matrices(2, 512, 256, 7)
    packed = order_rows(weight, gate_up_order(512))
    got = experts_gate_up(rows, packed, scales, 256, empty_counters("cpu"), bias_columns=BIAS)
    expected = swiglu_quantize(grouped_gemm_fp8(rows.q, rows.scales, weight, scales, rows), rows, bias_columns=BIAS)
    assert torch.equal(got.view(torch.uint8)[used], expected[0].view(torch.uint8)[used])
    down = order_rows(weight, down_order(512))
    hidden = torch.full_like(rows.scales, 0.125)
    assert torch.equal(experts_down(rows.q, down, scales, rows, empty_counters("cpu"))[used], grouped_gemm_fp8(rows.q, hidden, weight, scales, rows)[used])
