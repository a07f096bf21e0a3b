from dataclasses import dataclass

import pytest
import torch

from common.errors import ShapeError
from kernels.experts_prefill import (
    check_sizes,
    down_order,
    empty_counters,
    experts_down,
    experts_gate_up,
    gate_up_order,
    grouped_product_ref,
    restore_rows,
)
from kernels.gemm_fp8 import dequant_weight
from kernels.moe_prefill import ExpertRows, combine, permute_rows
from kernels.quantize import BIAS_COLUMNS, empty_fp8_rows, quantize_rows
from kernels.reference import (
    FP8_BLOCK,
    experts_ref,
    fp8_quant_blocks_ref,
    fp8_quant_hidden_ref,
    mxfp4_dequant_ref,
    mxfp4_quant_ref,
    swiglu_ref,
)
from kernels.router import fold_router, route
from model.fp8_experts import pack_experts
from model.shards import Fp8Matrix
from tests.support.emulated_cuda import emulated  # noqa: F401

HIDDEN_SCALE = 0.125


@dataclass(frozen=True)
class Case:
    counts: tuple[int, ...]
    hidden: int = 256
    intermediate: int = 256

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.counts))}-C{self.hidden}-I{self.intermediate}"


CASES = [
    Case((1,)),
    Case((0, 17, 0, 8, 0)),
    Case((77, 3)),
    Case((65, 0, 9), intermediate=384),
    Case((5, 171), hidden=384, intermediate=192),
    Case((31,), hidden=128, intermediate=96),
    Case((13, 20), hidden=320, intermediate=72),
    Case((0, *(1,) * 33, 9), hidden=96, intermediate=96),  # more than the experts that end the list of work
]


def packed(experts: int, rows: int, columns: int, order: torch.Tensor, seed: int):
    """A random matrix whose blocks' sizes differ, in the kernel's order. Returns: values, scales, and the values in plain order"""
    g = torch.Generator().manual_seed(seed)
    weight = (
        torch.randn(experts, rows, columns, generator=g) / columns**0.5 * torch.exp2(torch.randint(-3, 3, (experts, rows, 1), generator=g))
    )
    weight = weight * torch.exp2(-(torch.arange(columns) // FP8_BLOCK % 3).float())
    matrix = Fp8Matrix(*fp8_quant_blocks_ref(weight), rows, columns)
    values, scales = pack_experts(matrix, torch.randn(experts, rows, generator=g) * 0.3, order, "cpu")
    return values, scales, restore_rows(values, order, rows)


def poisoned_rows(case: Case) -> ExpertRows:
    """Tokens of very different size; what lies past the last expert's is NaN."""
    g = torch.Generator().manual_seed(3)
    count = sum(case.counts)
    q, scales = empty_fp8_rows(count + 3, case.hidden, "cpu", BIAS_COLUMNS)
    q.view(torch.uint8).fill_(0xFF)
    scales.fill_(float("nan"))
    x = torch.randn(count, case.hidden, generator=g) * torch.exp2(torch.randint(-6, 3, (count, 1), generator=g))
    made = quantize_rows(x, bias_columns=BIAS_COLUMNS)
    q.view(torch.uint8)[:count], scales[:count] = made[0].view(torch.uint8), made[1]
    return ExpertRows(q, scales, torch.tensor(case.counts).cumsum(0).int(), torch.empty(0, 1, dtype=torch.int32))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_orders_are_permutations_within_a_scale_block(case):
    for order in (gate_up_order(2 * case.intermediate), down_order(case.hidden)):
        assert torch.equal(order.sort().values, torch.arange(order.shape[0]))
        assert torch.equal(order // FP8_BLOCK, torch.arange(order.shape[0]) // FP8_BLOCK)


@pytest.mark.parametrize("case", CASES[-3:], ids=str)
def test_packed_rows_are_those_of_the_order_and_rows_past_the_matrix_are_zero(case):
    order, rows = gate_up_order(2 * case.intermediate), 2 * case.intermediate
    matrix = Fp8Matrix(*fp8_quant_blocks_ref(torch.randn(2, rows, case.hidden)), rows, case.hidden)
    matrix.values[:, rows:] = 1.0
    values, scales = pack_experts(matrix, torch.zeros(2, rows), order, "cpu")
    plain = restore_rows(values, order, order.shape[0])
    assert torch.equal(
        dequant_weight(plain[1, :rows], scales[1])[:, : case.hidden],
        dequant_weight(matrix.values[1, :rows], matrix.scales[1])[:, : case.hidden],
    )
    assert not plain[:, rows:].float().any()


WAYS = pytest.mark.parametrize("rows_per_expert", [1, 1000], ids=["tokens shared", "rows shared"])


@WAYS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gate_up_kernel_equals_product_swiglu_and_quantisation(case, rows_per_expert, emulated):  # noqa: F811
    rows, count = poisoned_rows(case), sum(case.counts)
    weight, scales, plain = packed(len(case.counts), 2 * case.intermediate, case.hidden, gate_up_order(2 * case.intermediate), 5)
    product = grouped_product_ref(rows.q, rows.scales, plain, scales, rows.ends)[:count]
    expected = fp8_quant_hidden_ref(swiglu_ref(product), HIDDEN_SCALE, BIAS_COLUMNS).float() * HIDDEN_SCALE
    counters = empty_counters("cpu")
    for _ in range(2):
        q = experts_gate_up(rows, weight, scales, case.intermediate, counters, rows_per_expert=rows_per_expert)
    assert counters.tolist() == [0, 0]
    got = q[:count].float() * HIDDEN_SCALE
    bad = (got - expected).abs() > 0.13 * expected.abs() + 2.0**-12
    assert not bad.any(), f"{int(bad.sum())} bad, first {bad.nonzero()[0].tolist()}"
    assert float((got != expected).float().mean()) < 2e-3
    columns = slice(case.intermediate, case.intermediate + BIAS_COLUMNS)
    assert torch.equal(got[:, columns], torch.ones_like(got[:, columns]))
    assert not got[:, columns.stop :].any()


@WAYS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_down_kernel_equals_grouped_product(case, rows_per_expert, emulated):  # noqa: F811
    rows, count = poisoned_rows(case), sum(case.counts)
    inner, hidden = case.hidden, case.intermediate // 16 * 16
    weight, scales, plain = packed(len(case.counts), hidden, inner, down_order(hidden), 6)
    expected = grouped_product_ref(rows.q, torch.full_like(rows.scales, HIDDEN_SCALE), plain, scales, rows.ends)[:count]
    counters = empty_counters("cpu")
    for _ in range(2):
        y = experts_down(rows.q, weight, scales, rows, counters, rows_per_expert=rows_per_expert)[:count]
    assert counters.tolist() == [0, 0]
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.square().mean().sqrt()))


@pytest.mark.parametrize(("experts", "intermediate", "wrong"), [(129, 64, "129 experts"), (4, 66, "of 66 hidden columns")])
def test_sizes_without_a_kernel_are_refused(experts, intermediate, wrong):
    check_sizes(128, 2880)
    with pytest.raises(ShapeError, match=wrong):
        check_sizes(experts, intermediate)


def test_a_rank_without_a_piece_of_its_experts_adds_the_bias_alone(emulated):  # noqa: F811
    case = Case((3, 9), intermediate=0)
    rows = poisoned_rows(case)
    counters = empty_counters("cpu")
    q = experts_gate_up(rows, torch.empty(2, 0, 384, dtype=torch.float8_e4m3fn), torch.empty(2, 0, 3), 0, counters, rows_per_expert=1000)
    assert torch.equal(q[:12].float() * HIDDEN_SCALE, (torch.arange(128) < BIAS_COLUMNS).float().expand(12, 128))


@pytest.mark.parametrize("tokens", [1, 13])
def test_whole_expert_path_approaches_fp32(tokens):
    experts, hidden, inner, k = 4, 192, 320, 2
    g = torch.Generator().manual_seed(tokens)

    def mxfp4_exact(*shape: int) -> torch.Tensor:
        return mxfp4_dequant_ref(*mxfp4_quant_ref(torch.randn(*shape, generator=g) * 0.1))

    residual, norm = torch.randn(tokens, hidden, generator=g), torch.ones(hidden)
    gate_up, down = mxfp4_exact(experts, 2 * inner, hidden), mxfp4_exact(experts, hidden, inner)
    gate_up_bias, down_bias = torch.randn(experts, 2 * inner, generator=g), torch.randn(experts, hidden, generator=g)
    inverse = torch.rsqrt(residual.square().mean(-1) + 1e-5)
    folded = fold_router(torch.randn(experts, hidden, generator=g), norm)
    routing = route(residual, inverse, folded, torch.zeros(experts), k, torch.zeros(experts, dtype=torch.int32))
    x = residual * inverse[:, None]
    expected = experts_ref(x, routing.expert_ids.long(), routing.expert_weights, gate_up, gate_up_bias, down, down_bias)

    counters = empty_counters("cpu")
    wide = pack_experts(Fp8Matrix(*fp8_quant_blocks_ref(gate_up), 2 * inner, hidden), gate_up_bias, gate_up_order(2 * inner), "cpu")
    back = pack_experts(Fp8Matrix(*fp8_quant_blocks_ref(down), hidden, inner), down_bias, down_order(hidden), "cpu")
    rows = permute_rows(*quantize_rows(x, bias_columns=BIAS_COLUMNS), routing)
    y = experts_down(experts_gate_up(rows, *wide, inner, counters, rows_per_expert=1), *back, rows, counters, rows_per_expert=1)
    cosine = torch.nn.functional.cosine_similarity(combine(y, rows.rows, routing.expert_weights), expected, dim=1)
    assert cosine.min() > 0.999, cosine
