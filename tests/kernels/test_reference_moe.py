"""Routing, experts and number formats of the reference against closed forms and independent float64 loops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.reference import (
    FP4_VALUES,
    FP8_MAX,
    experts_ref,
    fp8_dequant_blocks_ref,
    fp8_dequant_rows_ref,
    fp8_quant_blocks_ref,
    fp8_quant_rows_ref,
    mxfp4_dequant_ref,
    mxfp4_quant_ref,
    route_ref,
    swiglu_ref,
)
from tests.support.tolerance import FP8_GEMM_DIFF, FP32_OP, assert_calc_diff, assert_close, assert_same_bytes

NAN = float("nan")


def test_routing_weights_are_a_softmax_over_the_chosen_alone():
    logits = torch.tensor([[2, 1.9, 1.5, 1, 0.5, 0, -1, -2]])
    ids, weights = route_ref(logits, 4)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert weights[0].tolist() == pytest.approx([0.3473, 0.3143, 0.2107, 0.1278], abs=5e-5)


@pytest.mark.parametrize("num_experts", [8, 32, 128])
@pytest.mark.parametrize("experts_per_token", [1, 4])
def test_routing_follows_a_permutation_of_the_experts(num_experts: int, experts_per_token: int):
    logits = torch.randn(50, num_experts) * 3
    ids, weights = route_ref(logits, experts_per_token)
    assert_close(weights.sum(-1), torch.ones(50), FP32_OP)
    assert (weights.diff(dim=-1) <= 0).all()
    order = torch.randperm(num_experts)
    moved_ids, moved_weights = route_ref(logits[:, order], experts_per_token)
    assert torch.equal(order[moved_ids], ids)
    assert_same_bytes(moved_weights, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_logits_go_to_the_lower_expert(dtype: torch.dtype):
    logits = torch.tensor([[1, 3, 3, 1, 3, 3, 3, 0], [5] * 8, [0, 0, 0, 0, 0, 0, 0, 1]], dtype=dtype)
    assert route_ref(logits, 4)[0].tolist() == [[1, 2, 4, 5], [0, 1, 2, 3], [7, 0, 1, 2]]


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [(7, 7, 55.9996), (8, 8, 55.9996), (100, 100, 55.9996), (20, -20, -41.9997), (1, -1, 0.0), (-8, -8, 5.86e-5), (0, 3, 0.0)],
)
def test_swiglu_clamps_gate_above_and_up_on_both_sides(gate: float, up: float, expected: float):
    assert swiglu_ref(torch.tensor([[gate, up]], dtype=torch.float32)).item() == pytest.approx(expected, rel=2e-5, abs=1e-7)


def test_swiglu_pairs_neighbouring_columns_and_takes_its_limits():
    x = torch.randn(4, 3, 10) * 10
    gate, up = x[..., 0::2].double(), x[..., 1::2].double()
    for alpha, limit in ((1.702, 7.0), (1.0, 2.5)):
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        assert_close(swiglu_ref(x, alpha=alpha, limit=limit), (u + 1) * g / (1 + (-alpha * g).exp()), FP32_OP, (alpha, limit))


@dataclass(frozen=True)
class MoeCase:
    num_tokens: int
    num_experts: int = 8
    ranks: int = 1
    hidden: int = 24
    intermediate: int = 40

    def __str__(self) -> str:
        return f"T{self.num_tokens}-E{self.num_experts}-ranks{self.ranks}"


@pytest.mark.parametrize(
    "case", [MoeCase(0), MoeCase(1), MoeCase(7), MoeCase(65), MoeCase(1, 128, 4), MoeCase(3, 32, 8), MoeCase(40, 8, 2)], ids=str
)
def test_experts_of_all_ranks_add_up_to_a_dense_loop(case: MoeCase):
    """Experts without a token hold NaN: nothing of them may be read."""
    generator = torch.Generator().manual_seed(case.num_tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    e, c, i = case.num_experts, case.hidden, case.intermediate
    x, gate_up, gate_up_bias, down, down_bias = (
        draw(case.num_tokens, c),
        draw(e, 2 * i, c) / 5,
        draw(e, 2 * i),
        draw(e, c, i) / 5,
        draw(e, c),
    )
    ids, weights = route_ref(draw(case.num_tokens, e), 4)
    for unused in set(range(e)) - set(ids.flatten().tolist()):
        for tensor in (gate_up, gate_up_bias, down, down_bias):
            tensor[unused] = NAN
    expected = torch.zeros(case.num_tokens, c, dtype=torch.float64)
    for token in range(case.num_tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            h = swiglu_ref(gate_up[expert].double() @ x[token].double() + gate_up_bias[expert].double())
            expected[token] += weight * (down[expert].double() @ h.double() + down_bias[expert].double())
    share = e // case.ranks
    parts = []
    for rank in range(case.ranks):
        mine = slice(rank * share, (rank + 1) * share)
        local = (gate_up[mine], gate_up_bias[mine], down[mine], down_bias[mine])
        parts.append(experts_ref(x, ids, weights, *local, first_expert=rank * share))
    assert all(torch.isfinite(part).all() for part in parts)
    assert_close(torch.stack(parts).sum(0), expected, FP32_OP, case)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_down_bias_of_one_stays_one(ranks: int):
    zeros = {"gate_up": torch.zeros(8, 64, 16), "gate_up_bias": torch.zeros(8, 64), "down": torch.zeros(8, 16, 32)}
    ids, weights = route_ref(torch.randn(9, 8), 4)
    total = sum(
        experts_ref(
            torch.randn(9, 16),
            ids,
            weights,
            **{name: tensor[rank * 8 // ranks : (rank + 1) * 8 // ranks] for name, tensor in zeros.items()},
            down_bias=torch.ones(8 // ranks, 16),
            first_expert=rank * 8 // ranks,
        )
        for rank in range(ranks)
    )
    assert_close(total, torch.ones(9, 16), FP32_OP)


# MXFP4


@pytest.mark.parametrize(
    ("byte", "scale", "expected"),
    [(0xE3, 127, [1.5, -4.0]), (0xE3, 128, [3.0, -8.0]), (0x21, 127, [0.5, 1.0]), (0x08, 127, [0.0, 0.0]), (0x7F, 130, [-48.0, 48.0])],
)
def test_low_nibble_comes_first(byte: int, scale: int, expected: list[float]):
    blocks = torch.full((1, 16), byte, dtype=torch.uint8)
    assert mxfp4_dequant_ref(blocks, torch.tensor([scale], dtype=torch.uint8)).tolist() == expected * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0, 1, 2, 100, 126, 127, 128, 200, 252])
def test_every_byte_decodes_exactly(scale: int, dtype: torch.dtype):
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    got = mxfp4_dequant_ref(blocks, torch.full((16,), scale, dtype=torch.uint8), dtype)
    expected = [FP4_VALUES[nibble] * 2.0 ** (scale - 127) for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert got.dtype == dtype
    assert got.double().tolist() == expected


def test_the_largest_scale_is_a_number_like_any_other():
    """255 is not NaN in published code: 0.5 becomes 2^127, larger magnitudes overflow, zero stays zero."""
    got = mxfp4_dequant_ref(torch.tensor([[0x10] + [0x90] * 15], dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8))
    assert got[:4].tolist() == [0.0, 2.0**127, 0.0, -(2.0**127)]
    assert mxfp4_dequant_ref(torch.full((1, 16), 0x77, dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8)).isinf().all()


def test_groups_take_their_own_scale_in_any_leading_shape():
    blocks = torch.full((2, 3, 90, 16), 0x22, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 3, 90), dtype=torch.uint8)
    got = mxfp4_dequant_ref(blocks, scales)
    assert got.shape == (2, 3, 2880)
    assert torch.equal(got.view(2, 3, 90, 32), torch.exp2(scales.float() - 127)[..., None].expand(2, 3, 90, 32))


def test_quantising_decoded_values_gives_them_back():
    magnitudes = torch.tensor(FP4_VALUES)[torch.randint(0, 16, (5, 4, 32))]
    magnitudes[..., 0] = 6.0  # the group's exponent is the one that 6 asks for
    values = (magnitudes * torch.exp2(torch.randint(-20, 20, (5, 4, 1)).float())).flatten(-2)
    assert torch.equal(mxfp4_dequant_ref(*mxfp4_quant_ref(values)), values)


def test_quantising_takes_the_nearest_value_and_saturates_at_six():
    values = torch.randn(64, 96) * torch.exp2(torch.randint(-9, 9, (64, 1)).float())
    blocks, scales = mxfp4_quant_ref(values)
    groups, step = values.view(64, 3, 32), torch.exp2(scales.float() - 127)
    assert torch.equal(step, torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1))) - 2))
    grid = torch.tensor(FP4_VALUES) * step[..., None, None]
    nearest = (groups[..., None] - grid).abs().amin(-1)
    assert_close((mxfp4_dequant_ref(blocks, scales).view(64, 3, 32) - groups).abs(), nearest, FP32_OP)


def test_quantising_zeros_gives_zeros():
    assert not mxfp4_dequant_ref(*mxfp4_quant_ref(torch.zeros(2, 64))).any()


# FP8


@pytest.mark.parametrize("scale_pow2", [False, True])
@pytest.mark.parametrize("columns", [1, 127, 128, 129, 720, 2880])
def test_rows_in_fp8_come_back_with_zero_padding(columns: int, scale_pow2: bool):
    x = torch.randn(3, columns) * torch.tensor([[1e-4], [1.0], [1e4]])
    q, scales = fp8_quant_rows_ref(x, scale_pow2=scale_pow2)
    width = -(-columns // 128)
    assert q.dtype == torch.float8_e4m3fn
    assert (q.shape, scales.shape) == ((3, width * 128), (3, width))
    assert not q[:, columns:].float().any()
    assert_calc_diff(fp8_dequant_rows_ref(q, scales, columns), x, FP8_GEMM_DIFF, columns)
    if scale_pow2:
        assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))


@pytest.mark.parametrize("column", [0, 127, 128, 719, 720, 1439, 1440, 2159, 2815, 2816, 2879])
def test_a_large_value_scales_its_own_block_only(column: int):
    """2880 columns are 22.5 blocks; 720, 1440 and 2160 are where 4 ranks would cut."""
    x = torch.full((2, 2880), 1.0)
    x[0, column] = 4096.0
    q, scales = fp8_quant_rows_ref(x, scale_pow2=True)
    assert scales.shape[1] == 23
    plain = scales[1, 0]
    expected = torch.full((2, 23), plain.item())
    expected[0, column // 128] = 2.0 ** math.ceil(math.log2(4096 / FP8_MAX))
    assert torch.equal(scales, expected)
    assert torch.equal(fp8_dequant_rows_ref(q, scales, 2880), x)
    matrix = x[0].repeat(3, 1)
    values, block_scales = fp8_quant_blocks_ref(matrix)
    assert torch.equal(block_scales[0], expected[0])
    assert torch.equal(fp8_dequant_blocks_ref(values, block_scales, 3, 2880), matrix)


def test_a_row_of_zeros_has_scale_one():
    q, scales = fp8_quant_rows_ref(torch.zeros(2, 200))
    assert not q.float().any()
    assert torch.equal(scales, torch.ones(2, 2))
    assert torch.equal(fp8_quant_blocks_ref(torch.zeros(2, 200))[1], torch.ones(1, 2))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (129, 127), (384, 256), (200, 300)])
def test_blocks_in_fp8_come_back_with_zero_padding(rows: int, columns: int):
    weight = torch.randn(2, rows, columns)
    q, scales = fp8_quant_blocks_ref(weight)
    padded = tuple(-(-size // 128) * 128 for size in (rows, columns))
    assert (q.shape, scales.shape) == ((2, *padded), (2, padded[0] // 128, padded[1] // 128))
    outside = q.float().clone()
    outside[:, :rows, :columns] = 0
    assert not outside.any()
    assert_calc_diff(fp8_dequant_blocks_ref(q, scales, rows, columns), weight, FP8_GEMM_DIFF, (rows, columns))


@pytest.mark.parametrize("octave", [-40, -9, -1, 0, 1, 30])
def test_no_value_leaves_the_range_of_e4m3_at_the_edge_of_an_octave(octave: int):
    edge = torch.tensor(FP8_MAX * 2.0**octave)
    for amax in (edge, torch.nextafter(edge, edge * 2), torch.nextafter(edge, edge / 2)):
        q, scales = fp8_quant_blocks_ref(amax.view(1, 1))
        assert torch.isfinite(q.float()).all()
        assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))
        assert q.float()[0, 0] * scales[0, 0] == pytest.approx(amax.item(), rel=2**-4)
