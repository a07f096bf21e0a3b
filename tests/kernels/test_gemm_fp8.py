import pytest
import torch

from common.errors import ShapeError
from kernels.gemm_fp8 import dequant_weight, fold_bias, gemm_fp8
from kernels.quantize import quantize_rows
from kernels.reference import (
    fp8_dequant_blocks_ref,
    fp8_dequant_rows_ref,
    fp8_quant_blocks_ref,
    mxfp4_dequant_ref,
    mxfp4_quant_ref,
)


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


def test_scales_become_even_and_small_values_stay_exact_or_within_the_least_step():
    weight = torch.randn(2, 200, 320) * torch.exp2(-4.0 * (torch.arange(320) // 128))
    wq, ws = fp8_experts(weight)
    before = torch.stack([dequant_weight(q, s) for q, s in zip(wq, ws, strict=True)])
    bias = torch.randn(2, 200)
    fold_bias(wq, ws, bias, 320, 32)
    assert torch.equal(ws, ws[:, :, :1].expand_as(ws))
    assert torch.equal(ws, ws.log2().round().exp2())
    after = torch.stack([dequant_weight(q, s) for q, s in zip(wq, ws, strict=True)])
    scale = ws[:, :, :1].repeat_interleave(128, 1)[:, :200]
    error = (after - before)[:, :, :320].abs()
    assert bool((error <= scale * 2.0**-10).all())
    assert float((error == 0).float().mean()) > 0.9
    assert bool(((after[:, :, 320:].sum(2) - bias).abs() <= scale[..., 0] * 2.0**-10).all())


def test_a_bias_that_the_terms_cannot_hold_makes_the_scale_larger():
    wq, ws = fp8_experts(torch.randn(1, 256, 192))
    bias = torch.zeros(1, 256)
    bias[0, 200] = 1e6
    first = ws.clone()
    fold_bias(wq, ws, bias, 192, 32)
    assert torch.equal(ws[0, 0], first[0, 0].amax().expand(2))
    assert float(ws[0, 1, 0]) > float(first[0, 1].max())
    assert float(dequant_weight(wq[0], ws[0])[200, 192:].sum()) == pytest.approx(1e6, rel=1e-5)
