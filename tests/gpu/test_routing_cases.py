"""M01 of the public faults, on the routers of prefill and decode: shares are a softmax over the chosen experts alone, the bias counts, and
ties are broken the same on all ranks. Choices at real scale against fp64 are a check of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.decode_fused import norm_route
from tests.gpu.fp8_experts import TOP_K, prefill_routing

Router = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def nans(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def route_prefill(logits: Tensor, bias: Tensor, first_expert: int, local: int) -> tuple[Tensor, Tensor]:
    routing = prefill_routing(logits, bias, first_expert, local)
    return routing.expert_ids, routing.expert_weights


def route_decode(logits: Tensor, bias: Tensor, first_expert: int, local: int) -> tuple[Tensor, Tensor]:
    """Decode routes on every rank over all experts; its override replaces products and bias, so the bias rides in it unless it is all."""
    rows, experts = logits.shape
    device = logits.device
    ids, weights = torch.full((rows, TOP_K), 999, dtype=torch.int32, device=device), nans(device, rows, TOP_K, dtype=torch.float32)
    columns = 2880 if logits.is_cuda else 256
    zeros = torch.zeros(max(rows, experts), columns, dtype=torch.bfloat16, device=device)
    norm_route(
        zeros[:rows], zeros[0], zeros[:experts], bias.bfloat16(), torch.arange(rows, dtype=torch.int32, device=device), eps=1e-5,
        normed=nans(device, rows, columns), logits=nans(device, rows, experts, dtype=torch.float32),
        arrived=torch.zeros(16, dtype=torch.int32, device=device), expert_ids=ids, expert_weights=weights,
        logits_override=logits + bias if logits.any() else None,
    )  # fmt: skip
    return ids, weights


routers = pytest.mark.parametrize("choose", [route_prefill, route_decode], ids=["prefill", "decode"])


@routers
@pytest.mark.parametrize("experts", [32, 128])
def test_m01_shares_are_a_softmax_over_the_chosen_alone(device: str, choose: Router, experts: int):
    logits = torch.full((3, experts), -3.0)
    places = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 20, 3, 31, 5, 6, 8, 9], list(range(experts - 8, experts))]
    for row, where in zip(logits, places, strict=True):
        row[where] = torch.tensor([2, 1.9, 1.5, 1, 0.5, 0, -1, -2])
    ids, shares = choose(logits.to(device), torch.zeros(experts, device=device), 0, experts)
    assert ids.tolist() == [where[:TOP_K] for where in places]
    assert shares[0].tolist() == pytest.approx([0.3473, 0.3143, 0.2107, 0.1278], abs=5e-5)
    assert torch.equal(shares, shares[:1].expand(3, -1))


@routers
def test_m01_the_router_s_bias_counts(device: str, choose: Router):
    bias = torch.zeros(32, device=device)
    bias[[30, 4, 11, 19]] = torch.tensor([4.0, 3.0, 2.0, 1.0], device=device)
    ids, shares = choose(torch.zeros(2, 32, device=device), bias, 0, 32)
    assert ids.tolist() == [[30, 4, 11, 19]] * 2
    assert shares[0].tolist() == pytest.approx(torch.softmax(torch.tensor([4.0, 3.0, 2.0, 1.0]), 0).tolist(), abs=1e-6)


@routers
def test_m01_equal_logits_go_to_the_lower_expert_on_every_rank(device: str, choose: Router):
    logits = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16().float().round()  # few different values: ties
    order = torch.argsort(logits, dim=1, descending=True, stable=True)[:, :TOP_K].int()
    for first in (0, 32, 64, 96):
        assert torch.equal(choose(logits.to(device), torch.zeros(128, device=device), first, 32)[0].cpu(), order)
