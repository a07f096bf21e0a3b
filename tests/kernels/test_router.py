from dataclasses import dataclass

import pytest
import torch

from kernels.reference import rms_norm_ref, route_ref
from kernels.router import fold_router, route
from tests.kernels.triton_prefill import interpreted_ops, poisoned


@dataclass(frozen=True)
class Case:
    tokens: int
    columns: int = 192
    experts: int = 8
    top_k: int = 4
    first_expert: int = 0
    num_local: int = 8
    num_tokens: int | None = None
    offset: bool = False

    def __str__(self) -> str:
        return f"T{self.tokens}-C{self.columns}-E{self.experts}-k{self.top_k}-l{self.first_expert}+{self.num_local}-n{self.num_tokens}"


CASES = [
    Case(1),
    Case(17, columns=200, experts=10, num_local=10),
    Case(33, first_expert=2, num_local=4),
    Case(20, num_tokens=13),
    Case(5, columns=2880, experts=128, num_local=128),
    Case(16, offset=True),
]


def make(case: Case):
    g = torch.Generator().manual_seed(case.tokens)
    residual = torch.randn(case.tokens, case.columns, generator=g).bfloat16()
    norm = (1 + 0.1 * torch.randn(case.columns, generator=g)).bfloat16()
    weight = (torch.randn(case.experts, case.columns, generator=g) * 0.05).bfloat16()
    bias = torch.randn(case.experts, generator=g).bfloat16()
    offset = torch.randn(case.tokens, case.experts, generator=g) if case.offset else None
    return residual, norm, weight, bias, offset


def inverse_rms(residual: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(residual.float().square().mean(1) + 1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_choose_kernel_equals_fp32_choice(case):
    ops = interpreted_ops("router")
    residual, norm, weight, bias, offset = make(case)
    used = None if case.num_tokens is None else torch.tensor([case.num_tokens], dtype=torch.int32)
    counts = torch.zeros(case.num_local, dtype=torch.int32)
    folded, inverse = fold_router(weight, norm), inverse_rms(residual)
    expected = route(
        residual, inverse, folded, bias, case.top_k, counts.clone(),
        first_expert=case.first_expert, num_tokens=used, logit_offset=offset,
    )  # fmt: skip
    shape = (case.tokens, case.top_k)
    ids, ranks, weights = poisoned(*shape, dtype=torch.int32), poisoned(*shape, dtype=torch.int32), poisoned(*shape)
    products = residual.float() @ folded.float().t()
    ops.launch_choose(products, inverse, bias, offset, ids, weights, ranks, counts, used, case.first_expert)
    assert torch.equal(ids, expected.expert_ids)
    torch.testing.assert_close(weights, expected.expert_weights, rtol=1e-5, atol=1e-6)
    assert torch.equal(counts, expected.counts)
    assert torch.equal(ranks >= 0, expected.ranks >= 0)
    for e in range(case.num_local):
        mine = ranks[(ids == e + case.first_expert) & (ranks >= 0)]
        assert torch.equal(mine.sort().values, torch.arange(counts[e], dtype=torch.int32))


def test_ties_go_to_the_lower_expert_in_kernel_and_reference():
    ops = interpreted_ops("router")
    bias = torch.tensor([0.0, 1, 0, 1, 1, 0, 1, 1]).bfloat16()
    ids, ranks, weights = poisoned(3, 4, dtype=torch.int32), poisoned(3, 4, dtype=torch.int32), poisoned(3, 4)
    counts = torch.zeros(8, dtype=torch.int32)
    ops.launch_choose(torch.zeros(3, 16), torch.ones(3), bias, None, ids, weights, ranks, counts, None, 0)
    assert ids.tolist() == [[1, 3, 4, 6]] * 3
    assert weights.tolist() == [[0.25] * 4] * 3
    assert counts.tolist() == [0, 3, 0, 3, 3, 0, 3, 0]
    residual, folded = torch.ones(3, 64).bfloat16(), fold_router(torch.zeros(8, 64), torch.ones(64))
    assert route(residual, torch.ones(3), folded, bias, 4, torch.zeros(8, dtype=torch.int32)).expert_ids.tolist() == ids.tolist()


def test_route_on_cpu_is_norm_then_route():
    residual, norm, weight, bias, _ = make(Case(9))
    got = route(residual, inverse_rms(residual), fold_router(weight, norm), bias, 4, torch.zeros(8, dtype=torch.int32))
    ids, weights = route_ref(rms_norm_ref(residual.float(), norm, 1e-5) @ weight.float().t() + bias.float(), 4)
    assert torch.equal(got.expert_ids.long(), ids)
    torch.testing.assert_close(got.expert_weights, weights, rtol=1e-5, atol=1e-6)
    assert got.counts.sum() == 36


def test_folding_keeps_the_product_of_bf16_weights_to_2_to_the_minus_17():
    _, norm, weight, _, _ = make(Case(1, columns=2880, experts=128, num_local=128))
    high, low = fold_router(weight, norm).double().chunk(2)
    exact = weight.double() * norm.double()
    assert float(((high + low - exact).abs() / exact.abs().clamp(min=1e-30)).max()) < 2.0**-17
