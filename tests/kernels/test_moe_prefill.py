from dataclasses import dataclass

import pytest
import torch

from kernels.moe_prefill import combine, combine_norm_quantize, permute_rows, row_bound
from kernels.quantize import quantize_rows
from kernels.reference import expert_rows_ref
from kernels.router import Routing, _ranks_ref
from tests.kernels.triton_prefill import assert_fp8_rows_equal, group_major, interpreted_ops, poisoned, poisoned_fp8_rows

UNREAD = 3e38  # poison of rows that no expert owns: large, but no NaN, which numpy's reductions warn of


@dataclass(frozen=True)
class Case:
    tokens: int
    experts: int = 5
    top_k: int = 3
    columns: int = 192
    pattern: str = "random"
    first_expert: int = 0
    all_experts: int = 5

    def __str__(self) -> str:
        return f"T{self.tokens}-E{self.first_expert}+{self.experts}of{self.all_experts}-k{self.top_k}-{self.pattern}"


CASES = [
    Case(1),
    Case(16),
    Case(17, pattern="empty"),
    Case(15, pattern="one", top_k=1),
    Case(20, experts=2, first_expert=2),
    Case(9, columns=2880),
    Case(33),
    Case(19, columns=256, experts=8, all_experts=8, top_k=4),  # the trained fixture: the bias columns are a group more
]


def routing_of(case: Case) -> Routing:
    g = torch.Generator().manual_seed(case.tokens)
    scores = torch.rand(case.tokens, case.all_experts, generator=g)
    if case.pattern == "empty":
        scores[:, ::2] = -1.0  # top_k of the others first; expert 0 and 4 get few or none
        scores[:, 0] = -2.0
    if case.pattern == "one":
        scores[:, 3] = 2.0
    ids = scores.argsort(1, descending=True)[:, : case.top_k].int()
    counts = torch.zeros(case.experts, dtype=torch.int32)
    ranks = _ranks_ref(ids, counts, case.first_expert, case.tokens)
    weights = torch.rand(case.tokens, case.top_k, generator=g)
    return Routing(ids, weights / weights.sum(1, keepdim=True), ranks, counts)


def permuted(case: Case):
    x = torch.randn(case.tokens, case.columns, generator=torch.Generator().manual_seed(1))
    routing = routing_of(case)
    q, scales = quantize_rows(x, bias_columns=32)
    return routing, q, scales, permute_rows(
        q, scales, routing, first_expert=case.first_expert
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_permute_rows_kernel_copies_bytes_to_their_rows(case):
    ops = interpreted_ops("moe_prefill")
    routing, q, scales, expected = permuted(case)
    out_q = torch.full_like(expected.q.view(torch.uint8), 0x7F).view(torch.float8_e4m3fn)
    out_scales = group_major(torch.full_like(expected.scales, float("nan")))
    rows, ends = poisoned(case.tokens, case.top_k, dtype=torch.int32), poisoned(case.experts, dtype=torch.int32)
    ops.launch_permute_rows(
        routing.expert_ids, routing.ranks, routing.counts, q, group_major(scales), rows, ends, out_q, out_scales,
        case.first_expert,
    )  # fmt: skip
    assert torch.equal(rows, expected.rows)
    assert torch.equal(ends, expected.ends)
    used = rows[rows >= 0].long()
    assert torch.equal(out_q.view(torch.uint8)[used], expected.q.view(torch.uint8)[used])
    assert torch.equal(out_scales[used], expected.scales[used])
    assert int((out_q.view(torch.uint8) != 0x7F).any(1).sum()) == used.numel()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_permute_rows_matches_the_placement_twin(case):
    routing, _, _, rows = permuted(case)
    expected_rows, expected_ends = expert_rows_ref(routing.expert_ids, case.first_expert, case.experts)
    assert torch.equal(rows.rows, expected_rows)
    assert torch.equal(rows.ends, expected_ends)
    assert rows.q.shape[0] == row_bound(case.tokens, case.top_k, case.experts)
    assert int(rows.ends.max()) <= rows.q.shape[0]


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_combine_kernels_equal_reference(case, with_bias):
    ops = interpreted_ops("norm")
    routing, _, _, rows = permuted(case)
    used = rows.rows[rows.rows >= 0].long()
    y = torch.full((rows.q.shape[0], case.columns), UNREAD).bfloat16()
    y[used] = torch.randn(used.numel(), case.columns).bfloat16()
    residual, weight = torch.randn(case.tokens, case.columns), torch.randn(case.columns).bfloat16()
    bias = torch.randn(case.columns).bfloat16() if with_bias else None
    expected_residual, without = residual.clone(), residual.clone()
    expected = combine_norm_quantize(expected_residual, y, rows.rows, routing.expert_weights, weight, 1e-5, stream_bias=bias)
    if bias is not None:  # stored with the stream, and the norm does not see it
        same = combine_norm_quantize(without, y, rows.rows, routing.expert_weights, weight, 1e-5)
        assert torch.equal(same[0].view(torch.uint8), expected[0].view(torch.uint8))
        torch.testing.assert_close(expected_residual - without, bias.float().expand_as(without), rtol=1e-4, atol=1e-5)
    q, scales = poisoned_fp8_rows(case.tokens, case.columns)
    ops.launch_combine_norm_quantize(
        residual, y, rows.rows, routing.expert_weights, weight, q, scales, 1e-5, add_residual=True, stream_bias=bias
    )  # fmt: skip
    torch.testing.assert_close(residual, expected_residual, rtol=1e-5, atol=1e-5)
    assert_fp8_rows_equal((q, scales), expected, str(case))

    alone = poisoned(case.tokens, case.columns)
    ops.launch_combine_norm_quantize(alone, y, rows.rows, routing.expert_weights, None, None, None, 0.0, add_residual=False)
    torch.testing.assert_close(alone, combine(y.float(), rows.rows, routing.expert_weights), rtol=1e-5, atol=1e-5)
