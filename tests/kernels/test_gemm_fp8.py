import pytest
import torch

from common.errors import ShapeError
from kernels.gemm_fp8 import fold_bias, gemm_fp8, grouped_gemm_fp8
from kernels.moe_prefill import combine, permute_rows, swiglu_quantize
from kernels.quantize import quantize_rows
from kernels.reference import (
    experts_ref,
    fp8_dequant_blocks_ref,
    fp8_dequant_rows_ref,
    fp8_quant_blocks_ref,
    mxfp4_dequant_ref,
    mxfp4_quant_ref,
)
from kernels.router import fold_router, route


def mxfp4_exact(*shape: int, seed: int = 0, spread: float = 0.1) -> torch.Tensor:
    """Weights that MXFP4, and so FP8 with power-of-two block scales, holds exactly."""
    return mxfp4_dequant_ref(*mxfp4_quant_ref(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread))


def fp8_experts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 blocks of [E, R, C] with rows cut back to R, as the prefill weights hold them."""
    q, scales = fp8_quant_blocks_ref(weight)
    return q[:, : weight.shape[1]].contiguous(), scales


def test_dense_gemm_on_cpu_is_the_dequantised_product():
    x, weight = torch.randn(7, 192), mxfp4_exact(130, 192)
    q, scales = quantize_rows(x)
    wq, ws = fp8_quant_blocks_ref(weight)
    got = gemm_fp8(q, scales, wq[:130], ws)
    torch.testing.assert_close(got, fp8_dequant_rows_ref(q, scales, 192) @ weight.t(), rtol=1e-4, atol=1e-4)


def test_columns_of_both_sides_must_match():
    q, scales = quantize_rows(torch.randn(2, 192))
    with pytest.raises(ShapeError, match="256 columns, weight 128"):
        gemm_fp8(q, scales, q[:, :128], scales[:, :1])


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 60.0, 4000.0])
def test_folded_bias_reaches_every_output(magnitude):
    weight = mxfp4_exact(2, 200, 192, spread=0.05)
    wq, ws = fp8_experts(weight)
    bias = torch.randn(2, 200) * magnitude
    fold_bias(wq, ws, bias, 192, 32)
    for e in range(2):
        q, scales = quantize_rows(torch.randn(3, 192), bias_columns=32)
        x = fp8_dequant_rows_ref(q, scales, 192)
        padded = torch.nn.functional.pad(wq[e].float(), (0, 0, 0, 56))
        whole = fp8_dequant_blocks_ref(padded, ws[e], 200, 256)
        got = fp8_dequant_rows_ref(q, scales, 256) @ whole.t()
        expected = x @ whole[:, :192].t() + bias[e]
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5 * max(magnitude, 1))
    if magnitude <= 1.0:
        assert torch.equal(whole[:, :192], weight[1]), "a small bias must not touch the weights"


@pytest.mark.parametrize("tokens", [1, 13])
def test_whole_expert_path_approaches_fp32(tokens):
    experts, hidden, inner, k = 4, 192, 320, 2
    g = torch.Generator().manual_seed(tokens)
    residual, norm = torch.randn(tokens, hidden, generator=g), torch.ones(hidden)
    gate_up, down = mxfp4_exact(experts, 2 * inner, hidden, seed=1), mxfp4_exact(experts, hidden, inner, seed=2)
    gate_up_bias, down_bias = torch.randn(experts, 2 * inner, generator=g), torch.randn(experts, hidden, generator=g)
    inverse = torch.rsqrt(residual.square().mean(-1) + 1e-5)
    folded = fold_router(torch.randn(experts, hidden, generator=g), norm)
    routing = route(residual, inverse, folded, torch.zeros(experts), k, torch.zeros(experts, dtype=torch.int32))
    x = residual * inverse[:, None]
    expected = experts_ref(x, routing.expert_ids.long(), routing.expert_weights, gate_up, gate_up_bias, down, down_bias)

    gate_up_q, down_q = fp8_experts(gate_up), fp8_experts(down)
    fold_bias(*gate_up_q, gate_up_bias, hidden, 32)
    fold_bias(*down_q, down_bias, inner, 32)
    q, scales = quantize_rows(x, bias_columns=32)
    rows = permute_rows(q, scales, routing, alignment=16)
    h = swiglu_quantize(grouped_gemm_fp8(rows.q, rows.scales, *gate_up_q, rows), rows, bias_columns=32)
    y = combine(grouped_gemm_fp8(*h, *down_q, rows), rows.rows, routing.expert_weights)
    cosine = torch.nn.functional.cosine_similarity(y, expected, dim=1)
    assert cosine.min() > 0.999, cosine
