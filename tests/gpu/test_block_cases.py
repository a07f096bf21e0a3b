"""M07 of the public faults, on the FP8 kernels of prefill: sizes that are no multiple of a block of 128, whole and cut over ranks.

2880 columns are 22.5 blocks. Decode has whole experts and bf16 for all else; the vocabulary's rows stay bf16.
"""

from __future__ import annotations

import pytest
import torch

from kernels.gemm_fp8 import dequant_weight, gemm_fp8
from kernels.quantize import quantize_rows
from kernels.reference import fp8_dequant_rows_ref, mxfp4_dequant_ref, mxfp4_quant_ref
from model.layout import cut_for_rank
from model.prefill_weights import quantize_projection
from tests.gpu.fp8_experts import TOP_K, TWO_FP8_SIDES_DIFF, config_on, dense_experts, exact, poison, run_prefill
from tests.support.tolerance import FP8_GEMM_DIFF, assert_calc_diff

EDGES = (719, 720, 1439, 1440, 2159, 2160, 2815, 2816, 2879)  # where four ranks would cut 2880, and around its last, half block


@pytest.mark.parametrize("column", EDGES)
def test_m07_a_large_value_scales_its_own_block_only(device: str, column: int):
    x = torch.ones(5, 2880, dtype=torch.bfloat16, device=device)
    x[2, column] = 4096.0
    poison(device)
    q, scales = quantize_rows(x)
    assert (q.shape, scales.shape) == ((5, 2944), (5, 23))
    assert not q[:, 2880:].float().any()
    expected = torch.full((5, 23), 1 / 448)
    expected[2, column // 128] = 4096 / 448
    torch.testing.assert_close(scales.cpu(), expected, rtol=1e-6, atol=0)
    values = fp8_dequant_rows_ref(q, scales, 2880)
    others = torch.arange(2880, device=device) // 128 != column // 128
    torch.testing.assert_close(values[:, others], x[:, others].float())
    assert float(values[2, column]) == pytest.approx(4096.0)


def test_m07_products_over_2880_columns_take_each_block_s_own_scale(device: str):
    """An activation planted before a weight of zero must not disturb what the other columns give."""
    rows = 5120 if device == "cuda" else 200
    torch.manual_seed(7)
    dense = mxfp4_dequant_ref(*mxfp4_quant_ref(torch.randn(rows, 2880, device=device) * 0.02))
    dense[:, list(EDGES)] = 0.0
    weight = quantize_projection(dense)
    x = torch.randn(len(EDGES), 2880, device=device).bfloat16()
    for row, column in enumerate(EDGES):
        x[row, column] = 4096.0
    q, scales = quantize_rows(x)
    poison(device)
    got = gemm_fp8(q, scales, *weight)
    assert_calc_diff(got, fp8_dequant_rows_ref(q, scales, 2880) @ dequant_weight(*weight)[:, :2880].t(), FP8_GEMM_DIFF)
    kept = torch.ones(len(EDGES), 2880, dtype=torch.bool, device=device)
    for row, column in enumerate(EDGES):
        kept[row, column // 128 * 128 : (column // 128 + 1) * 128] = False  # the planted block itself loses its small values
    far = (fp8_dequant_rows_ref(q, scales, 2880) * kept) @ dense.t()
    assert_calc_diff(far, (x.float() * kept) @ dense.t(), 2e-3)  # one side rounded to FP8


def test_m07_four_ranks_give_what_one_gives(device: str):
    """Experts cut inside blocks' multiples, the last rank's piece shorter, with large weights at every edge."""
    config = config_on(device, TOP_K, hidden=320, intermediate=352)
    experts = dense_experts(config, device)
    i, c = config.intermediate_size, config.hidden_size
    cuts = [cut_for_rank(config, tp=4, ep=1, rank=rank, granule=128).intermediate for rank in range(4)]
    edges = sorted({k for cut in cuts if cut for k in (cut.start, cut.stop - 1)} | {i * rank // 4 for rank in range(4)} | {i - 1})
    experts.down[:, :, edges] *= 8
    experts.gate_up[:, :, [c - 65, c - 64, c - 1]] *= 8
    x = torch.randn(11, c, device=device).bfloat16()
    logits = torch.randn(11, TOP_K, device=device)
    alone = run_prefill(x, logits, experts.rank(config, 1, 1, 0))
    together = sum(run_prefill(x, logits, experts.rank(config, 4, 1, rank)) for rank in range(4))
    assert_calc_diff(alone, exact(x, logits, experts), TWO_FP8_SIDES_DIFF)
    assert_calc_diff(together, alone, 1e-4)  # sums in bf16 on each rank
