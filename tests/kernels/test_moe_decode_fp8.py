"""A step's tokens on their way through the FP8 experts: the kernels' own source, run on the CPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels import cuda_library
from kernels import decode_fused as fused
from kernels.experts_prefill import down_order, gate_up_order, split_tokens
from kernels.moe_decode_fp8 import Fp8ExpertWeights, quantize_by_expert
from kernels.moe_prefill import ExpertRows
from kernels.quantize import BIAS_COLUMNS, empty_fp8_rows, quantize_rows
from kernels.reference import experts_ref, fp8_dequant_blocks_ref, fp8_quant_blocks_ref, rms_norm_ref
from model.decode_cuda import BUCKETS
from model.fp8_experts import pack_experts
from model.shards import Fp8Matrix
from tests.support.emulated_cuda import emulated  # noqa: F401

C, INNER, K = 256, 96, 4
BATCHES = (1, 2, 3, 7, 8, 33, 128)


def poisoned(tokens, experts, columns=C, k=K) -> ExpertRows:
    q, scales = empty_fp8_rows(tokens * k, columns, "cpu", BIAS_COLUMNS)
    q.view(torch.uint8).fill_(0xFF)
    return ExpertRows(
        q, scales.fill_(float("nan")), torch.full((experts,), 777, dtype=torch.int32), torch.full((tokens, k), 777, dtype=torch.int32)
    )


def choices(tokens, experts, generator, k=K):
    """Distinct experts of every token; some tokens are padding."""
    ids = torch.rand(tokens, experts, generator=generator).topk(k, dim=1).indices.int()
    if tokens > 2:
        ids[1::4] = -1
    return ids


def tokens_of_all_sizes(tokens, generator, columns=C):
    """Rows whose largest values differ; one is zero, one is exactly a power of two times 448."""
    x = torch.randn(tokens, columns, generator=generator) * torch.exp2(torch.randint(-12, 8, (tokens, 1), generator=generator))
    x[-1] = 0.0
    x[0] = x[0].clamp(-300, 300)
    x[0, 3] = -448.0
    return x.bfloat16()


@pytest.mark.parametrize("tokens", BATCHES)
@pytest.mark.parametrize(("first", "experts", "all_experts"), [(0, 128, 128), (8, 8, 32), (4, 1, 5)])
def test_rows_are_quantised_once_and_in_order_by_expert_then_token(emulated, tokens, first, experts, all_experts):  # noqa: F811
    generator = torch.Generator().manual_seed(tokens)
    x, ids = tokens_of_all_sizes(tokens, generator), choices(tokens, all_experts, generator)
    got, want = poisoned(tokens, experts), poisoned(tokens, experts)
    quantize_by_expert(x, ids, got, first_expert=first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_library, "runs", lambda tensor: False)
        quantize_by_expert(x, ids, want, first_expert=first)
    assert torch.equal(got.rows, want.rows)
    assert torch.equal(got.ends, want.ends)
    assert torch.equal(got.q.view(torch.uint8), want.q.view(torch.uint8))  # what is past the last row is as it was
    assert torch.equal(got.scales.nan_to_num(-1), want.scales.nan_to_num(-1))
    q, scales = quantize_rows(x, bias_columns=BIAS_COLUMNS)
    for token, row in zip(*(t.tolist() for t in ((got.rows >= 0).nonzero()[:, 0], got.rows[got.rows >= 0])), strict=True):
        assert torch.equal(got.q[row].view(torch.uint8), q[token].view(torch.uint8))
        assert got.scales[row] == scales[token]


def test_rows_of_the_published_width(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(3)
    x, ids = tokens_of_all_sizes(3, generator, 2880), choices(3, 32, generator)
    rows = poisoned(3, 32, 2880)
    quantize_by_expert(x, ids, rows)
    q, scales = quantize_rows(x, bias_columns=BIAS_COLUMNS)
    assert torch.equal(rows.q[rows.rows[2].long()].view(torch.uint8), q[[2] * K].view(torch.uint8))
    assert torch.equal(rows.scales[rows.rows[0].long()], scales[[0] * K])


def test_a_row_that_is_not_finite_stays_so_and_alone(emulated):  # noqa: F811
    x = torch.ones(3, C).bfloat16()
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    rows = poisoned(3, 8)
    quantize_by_expert(x, torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3]], dtype=torch.int32), rows)
    values = rows.q.float()[:, :C] * rows.scales
    assert not values[rows.rows[0].long()].isfinite().all(1).any()
    assert not values[rows.rows[1].long()].isfinite().all(1).any()
    assert values[rows.rows[2].long()].isfinite().all()


def layer(experts, seed, first_expert=0):
    """Random experts of a rank. Returns: packed, and (gate_up, gate_up_bias, down, down_bias) as they are in FP8, dequantised"""
    g = torch.Generator().manual_seed(seed)
    packed, plain = [], []
    for rows, columns, order in ((2 * INNER, C, gate_up_order(2 * INNER)), (C, INNER, down_order(C))):
        matrix = Fp8Matrix(*fp8_quant_blocks_ref(torch.randn(experts, rows, columns, generator=g) / columns**0.5), rows, columns)
        bias = torch.randn(experts, rows, generator=g) * 0.3
        packed.append(tuple(pack_experts(matrix, bias, order, "cpu")))
        values = [fp8_dequant_blocks_ref(*pair, rows, columns) for pair in zip(matrix.values, matrix.scales, strict=True)]
        plain += [torch.stack(values), bias]
    return Fp8ExpertWeights(*packed, INNER, first_expert), plain


def poisoned_scratch(weights, tokens):
    scratch = weights.scratch(tokens, K, "cpu")
    for tensor in (scratch.rows.q, scratch.hidden):
        tensor.view(torch.uint8).fill_(0xFF)
    scratch.out.fill_(float("nan"))
    scratch.rows.scales.fill_(float("nan"))
    return scratch


@pytest.mark.parametrize(("tokens", "first", "experts"), [(1, 0, 8), (3, 4, 4), (33, 2, 5)])
def test_experts_and_their_sum_approach_fp32(emulated, tokens, first, experts):  # noqa: F811
    generator = torch.Generator().manual_seed(tokens)
    weights, plain = layer(experts, 7, first)
    x, ids = torch.randn(tokens, C, generator=generator).bfloat16(), choices(tokens, 8, generator)
    residual, norm, share = torch.randn(tokens, C, generator=generator).bfloat16(), torch.ones(C).bfloat16(), torch.rand(tokens, K)
    local = (ids >= first) & (ids < first + experts)
    moe = experts_ref(x.float(), ids.long(), share * local, *plain, first_expert=first)
    want, normed = residual.float() + moe, torch.empty_like(residual)
    scratch = poisoned_scratch(weights, tokens)
    outputs = weights.run(x, ids, scratch, alpha=1.702, limit=7.0)
    assert scratch.counters.tolist() == [0, 0]
    fused.combine_norm(
        outputs.pairs, ids, share, residual, norm, eps=1e-5, first_expert=first, num_local_experts=experts, normed=normed, rows=outputs.rows
    )
    got = residual.float()
    untouched = ~local.any(1)
    assert torch.equal(got[untouched], want[untouched])
    cosine = torch.nn.functional.cosine_similarity(got - (want - moe), moe, dim=1)[~untouched]
    assert (cosine > 0.995).all(), cosine  # FP8 tokens and hidden rows, and a bf16 residual
    assert (normed.float() - rms_norm_ref(residual, norm, 1e-5)).abs().max() < 2e-2


def test_a_token_does_not_depend_on_the_others(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(5)
    weights, _ = layer(8, 9)
    x, ids = torch.randn(17, C, generator=generator).bfloat16(), choices(17, 8, generator)
    ids[1::4] = ids[0]

    def outputs(tokens):
        out = weights.run(x[tokens].contiguous(), ids[tokens].contiguous(), poisoned_scratch(weights, 17), alpha=1.702, limit=7.0)
        return out.pairs[out.rows.long()]

    whole = outputs(slice(0, 17))
    for part in (slice(0, 1), slice(3, 10), slice(1, 17)):
        assert torch.equal(outputs(part), whole[part])


def test_all_buckets_have_the_same_form_of_the_products():
    """The most rows an expert can have, since a token's choices are distinct."""
    assert {split_tokens(bucket) for bucket in BUCKETS} == {False}


def test_sorted_rows_are_summed_where_they_lie(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(4)
    tokens = 5
    values, residual = torch.randn(20, C, generator=generator).bfloat16(), torch.randn(tokens, C, generator=generator).bfloat16()
    norm, weights = torch.randn(C, generator=generator).bfloat16(), torch.rand(tokens, K, generator=generator)
    rows = torch.randperm(20, generator=generator).int().view(tokens, K)
    rows[3], rows[0, 2] = -1, -1
    terms = torch.where((rows >= 0)[..., None], values[rows.clamp(min=0).long()].float() * weights[..., None], 0.0)
    want, normed = residual.float() + terms.sum(1), torch.empty_like(residual)
    fused.combine_norm(
        values, torch.full_like(rows, 99), weights, residual, norm, eps=1e-5, first_expert=0, num_local_experts=4, normed=normed, rows=rows
    )
    assert (residual.float() - want).abs().max() < 1e-2 * want.abs().max()
    assert (normed.float() - rms_norm_ref(residual, norm, 1e-5)).abs().max() < 2e-2 * norm.abs().max()
