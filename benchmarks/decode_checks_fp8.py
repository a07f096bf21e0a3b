"""Correctness of decode with FP8 experts on a GPU at real shapes, as `decode_checks` does for all that does not depend on their format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.decode_checks import ALPHA, BATCHES, LIMIT, check_served_model, check_step, errors, nans
from benchmarks.decode_random import fp8_experts, randn, random_choices
from benchmarks.prefill_random import gpt_oss_config
from kernels import cuda_library
from kernels.decode_fused import combine_norm
from kernels.experts_prefill import down_order, gate_up_order, restore_rows
from kernels.gemm_fp8 import dequant_weight
from kernels.moe_decode_fp8 import Fp8ExpertWeights, Fp8Scratch, quantize_by_expert
from kernels.moe_prefill import ExpertRows
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from kernels.reference import rms_norm_ref, swiglu_ref
from model.config import ModelConfig


def poisoned(weights: Fp8ExpertWeights, tokens: int) -> Fp8Scratch:
    """Every byte that a step writes before it reads is NaN, or a row that does not exist."""
    scratch = weights.scratch(tokens, 4, "cuda")
    for tensor in (scratch.rows.q, scratch.hidden):
        tensor.view(torch.uint8).fill_(0xFF)
    for tensor in (scratch.rows.scales, scratch.out):
        tensor.fill_(float("nan"))
    for tensor in (scratch.rows.ends, scratch.rows.rows):
        tensor.fill_(777777)
    return scratch


def on_cpu(rows: ExpertRows) -> ExpertRows:
    return ExpertRows(rows.q.cpu(), rows.scales.cpu(), rows.ends.cpu(), rows.rows.cpu())


def check_rows_by_expert() -> str:
    """Against the twin on the same poisoned buffers: all bytes equal, also where nothing is written; and the bits of prefill's pass."""
    cases = 0
    for experts, first, of in ((32, 0, "20b"), (128, 0, "120b"), (16, 64, "120b"), (4, 28, "20b")):
        for tokens in BATCHES:
            x, ids = randn(tokens, 2880), random_choices(1, tokens, gpt_oss_config(of))[0]
            x *= torch.exp2(torch.randint(-12, 8, (tokens, 1), device="cuda"))
            x[0, 5] = -448.0 * 2.0**10
            if tokens > 2:
                ids[1::4], x[-1] = -1, 0.0
            weights = Fp8ExpertWeights((x, x), (torch.empty(experts, 2880, 1, device="meta"),) * 2, 2880)
            got = poisoned(weights, tokens).rows
            want = on_cpu(got)
            quantize_by_expert(x, ids, got, first_expert=first)
            quantize_by_expert(x.cpu(), ids.cpu(), want, first_expert=first)
            for name in ("rows", "ends"):
                assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), f"E{experts} B{tokens}: {name} differ"
            assert torch.equal(got.q.view(torch.uint8).cpu(), want.q.view(torch.uint8)), f"E{experts} B{tokens}: payload differs"
            assert torch.equal(got.scales.nan_to_num(-1).cpu(), want.scales.nan_to_num(-1)), f"E{experts} B{tokens}: scales differ"
            q, scales = quantize_rows(x, bias_columns=BIAS_COLUMNS)
            token = (got.rows >= 0).nonzero()[:, 0]
            row = got.rows[got.rows >= 0].long()
            assert torch.equal(got.q.view(torch.uint8)[row], q.view(torch.uint8)[token]), "not the bits of the prefill's rows"
            assert torch.equal(got.scales[row], scales[token])
            cases += 1
    return f"{cases} cases equal the twin and the prefill's pass, bit for bit"


def exact_pairs(x: Tensor, ids: Tensor, weights: Fp8ExpertWeights) -> Tensor:
    """[B, k, C] fp32: every pair's output on the dequantised weights, nothing else rounded; zeros without an expert."""
    out, inner = torch.zeros(*ids.shape, x.shape[1], device="cuda"), weights.intermediate
    for expert in ids[ids >= 0].unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate_up, down = (
            dequant_weight(restore_rows(values[expert : expert + 1], order(rows), rows)[0], scales[expert])
            for (values, scales), order, rows in ((weights.gate_up, gate_up_order, 2 * inner), (weights.down, down_order, x.shape[1]))
        )
        hidden = swiglu_ref(with_ones(x[token].float()) @ gate_up.t(), alpha=ALPHA, limit=LIMIT)
        out[token, choice] = with_ones(hidden) @ down.t()
    return out


def with_ones(x: Tensor) -> Tensor:
    """Rows with their bias columns, padded as the weights are."""
    out = torch.zeros(x.shape[0], -(-(x.shape[1] + BIAS_COLUMNS) // 128) * 128, device=x.device)
    out[:, : x.shape[1]], out[:, x.shape[1] : x.shape[1] + BIAS_COLUMNS] = x, 1.0
    return out


def check_experts(name: str, batches: tuple[int, ...]) -> str:
    """Against the twins (FP8 rows, fp32 sums) and against fp32; runs, batches and poison change nothing; then the sum over choices.

    A hidden value between two of FP8 may go either way, an eighth apart, and one token has few enough of them that chance shows (1.13e-2
    once): so small batches are drawn again until eight tokens are compared at a time. 8.4e-3 on an H200, where prefill's check has 1.1e-2.
    """
    config = gpt_oss_config(name)
    weights = next(fp8_experts(config))
    lines, cosines = [], []
    for tokens in batches:
        draws = [_draw_experts(weights, config, tokens) for _ in range(-(-8 // tokens))]
        got, twin = (torch.cat([draw[i] for draw in draws]) for i in (0, 1))
        lines.append(errors(got, twin, f"{name} B{tokens}", 3e-2, 1.1e-2))
        cosines.append(min(draw[2] for draw in draws))
        assert cosines[-1] > 0.997, f"{name} B{tokens}: cosine {cosines[-1]} to fp32"
    return f"{len(lines)} batches, worst {max(lines)} against the twins, least cosine {min(cosines):.5f} to fp32; runs and batches equal"


def _draw_experts(weights: Fp8ExpertWeights, config: ModelConfig, tokens: int) -> tuple[Tensor, Tensor, float]:
    """Random tokens through the experts. Returns: the kernels' outputs and the twins' [B, k, C]; the least cosine to fp32"""
    x, ids = randn(tokens, 2880), random_choices(1, tokens, config)[0]
    if tokens > 2:
        ids = torch.where(ids == 5, -1, ids)
        ids[1] = -1
    local = ids >= 0

    def run(part: slice) -> tuple[Tensor, Fp8Scratch]:
        scratch = poisoned(weights, tokens)
        pairs, rows = weights.run(x[part].contiguous(), ids[part].contiguous(), scratch, alpha=ALPHA, limit=LIMIT)
        assert not scratch.counters.any(), "a kernel left its counters raised"
        return torch.where((rows >= 0)[..., None], pairs[rows.clamp(min=0).long()], 0.0), scratch

    got, scratch = run(slice(tokens))
    assert scratch.out[int(local.sum()) :].isnan().all(), "rows without an expert were written"
    assert torch.equal(run(slice(tokens))[0], got), f"B{tokens}: two runs differ"
    for part in (slice(0, 1), slice(tokens // 2, min(tokens, tokens // 2 + 16))):
        assert torch.equal(run(part)[0], got[part]), f"B{tokens}: a token's experts depend on its batch"
    runs, cuda_library.runs = cuda_library.runs, lambda tensor: False
    try:
        twin = run(slice(tokens))[0]
    finally:
        cuda_library.runs = runs
    _check_combine(scratch, got, ids, config)
    exact = exact_pairs(x, ids, weights)[local]
    return got, twin, float(torch.nn.functional.cosine_similarity(got[local].float(), exact, dim=-1).min())


def _check_combine(scratch: Fp8Scratch, got: Tensor, ids: Tensor, config: ModelConfig) -> None:
    """The weighted sum over a token's choices, from the rows that the experts left."""
    tokens = len(ids)
    residual, norm, share, normed = randn(tokens, 2880), 1 + randn(2880, std=0.1), torch.rand(tokens, 4, device="cuda"), nans(tokens, 2880)
    want = residual.float() + (got.float() * share[..., None]).sum(1)
    combine_norm(
        scratch.out, ids, share, residual, norm, eps=1e-5, first_expert=0, num_local_experts=config.num_experts, normed=normed,
        rows=scratch.rows.rows,
    )  # fmt: skip
    errors(residual, want, "combine", 1e-2, 4e-3)
    errors(normed, rms_norm_ref(residual, norm, 1e-5), "norm after combine", 1e-2, 2e-3)


CHECKS_FP8: dict[str, Callable[[], str]] = {
    "rows by expert": check_rows_by_expert,
    "experts 20b fp8": partial(check_experts, "20b", BATCHES),
    "experts 120b fp8": partial(check_experts, "120b", (1, 8, 33, 128)),
    "whole step fp8": partial(check_step, "fp8", 1.5e-1, 8e-2),  # a bf16 difference can move a token's value to its other FP8 neighbour
    "tiny model served fp8": partial(check_served_model, "fp8"),
}
