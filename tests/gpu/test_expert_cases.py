"""Faults of experts that were reported against other systems, on the kernels of prefill and decode: a bias added on every rank (M02), a
lost clamp (M04), experts and ranks without tokens (M06).

Ranks take turns on one device; sums over NVLink have a check of their own in `benchmarks/all_reduce.py`. Decode has whole experts on each
rank, in MXFP4 or FP8; cut ones are prefill's alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.decode_fused import combine_norm
from kernels.experts_prefill import empty_counters, experts_gate_up
from kernels.moe_decode import ExpertWeights, experts_decode, pack_mxfp4
from kernels.moe_prefill import permute_rows
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from kernels.reference import experts_ref, hidden_scale, mxfp4_dequant_ref
from model.fp8_experts import Fp8Weight
from tests.gpu.fp8_experts import (
    ALPHA,
    LIMIT,
    PHASES,
    TOP_K,
    TWO_FP8_SIDES_DIFF,
    DenseExperts,
    RankExperts,
    Run,
    config_on,
    dense_experts,
    exact,
    poison,
    prefill_routing,
    run_prefill,
)  # fmt: skip
from tests.support.tolerance import assert_calc_diff


def nans(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@PHASES
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)])
def test_m02_a_down_bias_of_one_stays_one(device: str, run: Run, tp: int, ep: int):
    if ep != tp and run is not run_prefill:
        pytest.skip("decode has whole experts on each rank")
    config = config_on(device, 8, hidden=256, intermediate=320)
    e, c, i = config.num_experts, config.hidden_size, config.intermediate_size
    zeros = [torch.zeros(e, *shape, device=device) for shape in ((2 * i, c), (2 * i,), (c, i))]
    experts = DenseExperts(*zeros, torch.ones(e, c, device=device))
    x = torch.randn(9, c, device=device).bfloat16()
    logits = torch.randn(9, e, device=device)
    total = sum(run(x, logits, experts.rank(config, tp, ep, rank)) for rank in range(tp))
    assert float((total - 1.0).abs().max()) <= 2.0**-7  # a rank's part is rounded to bf16


PAIRS = ((7, 7), (8, 8), (100, 100), (20, -20), (1, -1), (-8, -8), (0, 3), (-100, 100))
ACTIVATIONS = (55.9996, 55.9996, 55.9996, -41.9997, 0.0, 5.86e-5, 0.0, 0.0)  # of the clamped SwiGLU


def test_m04_fp8_experts_clamp_gate_above_and_up_on_both_sides(device: str):
    """Weights of zero, so that the biases are gate and up; FP8 holds a hidden value to a sixteenth of it."""
    config = config_on(device, 4, hidden=256, intermediate=192)
    c, i = config.hidden_size, config.intermediate_size
    bias = torch.tensor(PAIRS, dtype=torch.float32).flatten().repeat(i // len(PAIRS)).expand(4, -1).to(device)
    zeros = torch.zeros(4, 2 * i, c, device=device), torch.zeros(4, c, i, device=device)
    experts = DenseExperts(zeros[0], bias, zeros[1], torch.zeros(4, c, device=device)).rank(config, 1, 1, 0)
    logits = torch.zeros(3, 4, device=device)
    routing = prefill_routing(logits, torch.zeros(4, device=device), 0, 4)
    rows = permute_rows(*quantize_rows(torch.randn(3, c, device=device).bfloat16(), bias_columns=BIAS_COLUMNS), routing)
    poison(device)
    hidden = experts_gate_up(rows, *experts.gate_up, i, empty_counters(device), rows_per_expert=1.0)
    got = hidden[: 3 * TOP_K, :i].float().cpu() * hidden_scale(LIMIT)
    expected = torch.tensor(ACTIVATIONS).repeat(i // len(PAIRS))
    assert bool(((got - expected).abs() <= expected.abs() / 16 + hidden_scale(LIMIT) * 2.0**-10).all()), got[0, : len(PAIRS)]


def test_m04_mxfp4_experts_clamp_gate_above_and_up_on_both_sides(device: str):
    columns = 2880 if device == "cuda" else 192
    blocks = [torch.zeros(4, rows, columns // 32, 16, dtype=torch.uint8, device=device) for rows in (2 * columns, columns)]
    gate_up, down = (pack_mxfp4(b, b[..., 0], gate_up=g) for b, g in zip(blocks, (True, False), strict=True))
    bias = torch.tensor(PAIRS).flatten().repeat(columns // len(PAIRS)).expand(4, -1).bfloat16().contiguous().to(device)
    weights = ExpertWeights(gate_up, bias, down, torch.zeros(4, columns, dtype=torch.bfloat16, device=device))
    hidden = nans(device, 3 * TOP_K, columns)
    ids = torch.arange(TOP_K, dtype=torch.int32, device=device).repeat(3, 1)
    experts_decode(
        torch.randn(3, columns, device=device).bfloat16(), ids, weights, hidden=hidden,
        arrived=torch.zeros(2, dtype=torch.int32, device=device), out=nans(device, 3, TOP_K, columns), alpha=ALPHA, limit=LIMIT,
    )  # fmt: skip
    expected = torch.tensor(ACTIVATIONS).repeat(columns // len(PAIRS))
    assert bool(((hidden.float().cpu() - expected).abs() <= expected.abs() / 128 + 1e-6).all()), hidden[0, : len(PAIRS)]


CHOSEN = pytest.mark.parametrize("chosen", [[3, 40, 70, 127], [0, 5, 17, 31], [96, 97, 98, 99]], ids=["spread", "first rank", "last rank"])


def logits_choosing(chosen: list[int], device: str) -> Tensor:
    logits = torch.zeros(1, 128, device=device)
    logits[0, chosen] = torch.tensor([4.0, 3.5, 3.0, 2.5], device=device)
    return logits


@PHASES
@CHOSEN
def test_m06_one_token_among_128_experts_on_four_ranks(device: str, run: Run, chosen: list[int]):
    """Ranks without a token give zeros, the others their part, whatever memory held before."""
    config = config_on(device, TOP_K, hidden=256, intermediate=192)
    few = dense_experts(config, device)
    packed, share = few.rank(config, 1, 1, 0), 32
    x, logits = torch.randn(1, config.hidden_size, device=device).bfloat16(), logits_choosing(chosen, device)
    total = torch.zeros(1, config.hidden_size, device=device)
    for rank in range(4):
        mine = [expert - rank * share for expert in chosen if expert // share == rank]
        matrices = []
        for weight in (packed.gate_up, packed.down):  # experts that no token chose hold NaN
            values = torch.full((share, *weight.values.shape[1:]), float("nan"), device=device).to(torch.float8_e4m3fn)
            scales = torch.full((share, *weight.scales.shape[1:]), float("nan"), device=device)
            where = [number for number, expert in enumerate(chosen) if expert // share == rank]
            values.view(torch.uint8)[mine], scales[mine] = weight.values.view(torch.uint8)[where], weight.scales[where]
            matrices.append(Fp8Weight(values, scales))
        part = run(x, logits, RankExperts(*matrices, config.intermediate_size, rank * share))
        assert bool(part.isfinite().all())
        assert bool(part.any()) == bool(mine)
        total += part
    assert_calc_diff(total, exact(x, logits[:, chosen], few), TWO_FP8_SIDES_DIFF, chosen)


@CHOSEN
def test_m06_one_token_among_128_mxfp4_experts_on_four_ranks_in_decode(device: str, chosen: list[int]):
    columns, share = 2880 if device == "cuda" else 192, 32
    torch.manual_seed(6)
    shapes = ((2 * columns, columns), (columns, columns))
    blocks = [torch.randint(0, 256, (TOP_K, r, c // 32, 16), dtype=torch.uint8, device=device) for r, c in shapes]
    scales = [torch.randint(118, 122, b.shape[:3], dtype=torch.uint8, device=device) for b in blocks]
    biases = [torch.randn(TOP_K, rows, device=device).bfloat16() for rows, _ in shapes]
    packed = [pack_mxfp4(b, s, gate_up=g) for b, s, g in zip(blocks, scales, (True, False), strict=True)]
    x = torch.randn(1, columns, device=device).bfloat16()
    ids = torch.tensor([chosen], dtype=torch.int32, device=device)
    shares = torch.softmax(logits_choosing(chosen, device)[:, chosen], 1)
    total = torch.zeros(1, columns, device=device)
    for rank in range(4):
        mine = [expert - rank * share for expert in chosen if expert // share == rank]
        where = [number for number, expert in enumerate(chosen) if expert // share == rank]
        local = [torch.full((share, *p.shape[1:]), 0xFF, dtype=torch.uint8, device=device) for p in packed]
        local_biases = [nans(device, share, b.shape[1]) for b in biases]
        for whole, part in zip((*packed, *biases), (*local, *local_biases), strict=True):
            part[mine] = whole[where]
        weights = ExpertWeights(local[0], local_biases[0], local[1], local_biases[1], rank * share)
        arrived, pairs = torch.zeros(2, dtype=torch.int32, device=device), nans(device, 1, TOP_K, columns)
        hidden = nans(device, TOP_K, columns)
        experts_decode(x, ids, weights, hidden=hidden, arrived=arrived, out=pairs, alpha=ALPHA, limit=LIMIT)
        part = torch.zeros(1, columns, dtype=torch.bfloat16, device=device)
        combine_norm(
            pairs, ids, shares, part, torch.ones_like(part[0]), eps=1e-5, first_expert=rank * share, num_local_experts=share,
            normed=nans(device, 1, columns),
        )  # fmt: skip
        assert bool(part.isfinite().all())
        assert bool(part.any()) == bool(mine)
        total += part.float()
    dense = [mxfp4_dequant_ref(b, s) for b, s in zip(blocks, scales, strict=True)]
    order = torch.arange(TOP_K, device=device)[None]
    expected = experts_ref(x.float(), order, shares, dense[0], biases[0].float(), dense[1], biases[1].float())
    assert_calc_diff(total, expected, 1e-4, chosen)
