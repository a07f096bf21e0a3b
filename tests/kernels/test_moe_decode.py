"""The MXFP4 decode kernel's own source, run on the CPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

from common.errors import KernelError
from kernels import moe_decode
from kernels.moe_decode import GROUP_TOKENS, ExpertWeights, launch_experts, pack_mxfp4, unpack_mxfp4
from kernels.reference import experts_ref, mxfp4_dequant_ref
from tests.support.emulated_cuda import emulated  # noqa: F401

HIDDEN, INTERMEDIATE, CHOICES = 192, 192, 4
ALPHA, LIMIT = 1.702, 7.0


def make_mxfp4(generator, experts, rows, columns):
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 123, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def make_weights(seed, experts, first_expert=0):
    generator = torch.Generator().manual_seed(seed)
    gate_up = make_mxfp4(generator, experts, 2 * INTERMEDIATE, HIDDEN)
    down = make_mxfp4(generator, experts, HIDDEN, INTERMEDIATE)
    biases = [torch.randn(experts, n, generator=generator).bfloat16() for n in (2 * INTERMEDIATE, HIDDEN)]
    packed = ExpertWeights(pack_mxfp4(*gate_up, gate_up=True), biases[0], pack_mxfp4(*down, gate_up=False), biases[1], first_expert)
    return packed, (mxfp4_dequant_ref(*gate_up), biases[0].float(), mxfp4_dequant_ref(*down), biases[1].float())


def run(x, ids, weights, blocks=0, group_tokens=0):
    tokens, k = ids.shape
    hidden = torch.full((tokens * k, INTERMEDIATE), float("nan"), dtype=torch.bfloat16)
    out = torch.full((tokens, k, x.shape[1]), float("nan"), dtype=torch.bfloat16)
    arrived = torch.zeros(2, dtype=torch.int32)
    launch_experts(x, ids, weights, hidden, arrived, out, alpha=ALPHA, limit=LIMIT, blocks=blocks, group_tokens=group_tokens)
    assert not arrived.any()
    return out


def expected(x, ids, plain, first_expert=0):
    flat = ids.reshape(-1, 1).long()
    pairs = experts_ref(x.float().repeat_interleave(ids.shape[1], 0), flat, torch.ones(flat.shape), *plain, first_expert=first_expert)
    return pairs.view(*ids.shape, -1)


def assert_close(got, want, case):
    error = (got.float() - want).abs()
    largest, rms = error.max() / want.abs().max(), error.square().mean().sqrt() / want.square().mean().sqrt()
    assert largest < 2e-2, f"{case}: max relative {largest}"
    assert rms < 4e-3, f"{case}: RMS relative {rms}"


def random_ids(generator, tokens, experts):
    return torch.stack([torch.randperm(experts, generator=generator)[:CHOICES] for _ in range(tokens)]).int()


def test_packing_is_lossless():
    for gate_up in (True, False):
        blocks, scales = make_mxfp4(torch.Generator().manual_seed(1), 3, 64, 96)
        again = unpack_mxfp4(pack_mxfp4(blocks, scales, gate_up=gate_up), gate_up=gate_up)
        assert torch.equal(again[0], blocks)
        assert torch.equal(again[1], scales)


def test_packing_refuses_scales_that_bf16_cannot_hold():
    blocks, scales = make_mxfp4(torch.Generator().manual_seed(1), 1, 32, 32)
    scales[0, 3, 0] = 129
    with pytest.raises(moe_decode.ConfigError):
        pack_mxfp4(blocks, scales, gate_up=False)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 17, 33, 128])
def test_experts_match_reference(emulated, tokens):  # noqa: F811
    generator = torch.Generator().manual_seed(tokens)
    weights, plain = make_weights(tokens, 8)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = random_ids(generator, tokens, 8)
    if tokens > 2:  # some experts get nothing
        ids = torch.where(ids == 5, (ids + 1) % 8, ids)
    assert_close(run(x, ids, weights), expected(x, ids, plain), f"B{tokens}")


@pytest.mark.parametrize("tokens", [8, 19, 33])  # the last group of 16 is not full; 8: four experts of 32
def test_all_tokens_on_the_same_experts(emulated, tokens):  # noqa: F811
    weights, plain = make_weights(3, 8)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    ids = torch.tensor([7, 0, 3, 2], dtype=torch.int32).repeat(tokens, 1)
    assert_close(run(x, ids, weights), expected(x, ids, plain), "skewed")


@pytest.mark.parametrize("blocks", [1, 3, 64])
@pytest.mark.parametrize("tokens", [3, 21])  # 21: groups of 16, of more and of fewer than 8 tokens, cut among the blocks by their cost
def test_grid_size_does_not_change_a_bit(emulated, tokens, blocks):  # noqa: F811
    generator = torch.Generator().manual_seed(9)
    weights, _ = make_weights(9, 12)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = 1 + random_ids(generator, tokens, 11)
    ids[:, 1] = 0
    assert torch.equal(run(x, ids, weights, blocks=blocks), run(x, ids, weights))


def test_a_token_does_not_depend_on_its_batch(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(10)
    weights, _ = make_weights(10, 8)
    x = torch.randn(33, HIDDEN, generator=generator).bfloat16()
    ids = random_ids(generator, 33, 8)
    whole = run(x, ids, weights)
    for first, last in ((0, 1), (5, 12), (8, 27), (1, 33)):
        assert torch.equal(run(x[first:last].contiguous(), ids[first:last].contiguous(), weights), whole[first:last])


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_the_instance_does_not_change_a_bit(emulated, tokens):  # noqa: F811
    generator = torch.Generator().manual_seed(tokens)
    weights, plain = make_weights(14, 8)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = random_ids(generator, tokens, 8)
    few, many = (run(x, ids, weights, group_tokens=group_tokens) for group_tokens in GROUP_TOKENS)
    assert_close(few, expected(x, ids, plain), f"B{tokens}")
    assert torch.equal(few, many)


@pytest.mark.parametrize(("tokens", "group_tokens"), [(9, 8), (3, 24)])  # 36 pairs are too many for groups of 8
def test_an_instance_that_was_not_built_is_refused(emulated, tokens, group_tokens):  # noqa: F811
    weights, _ = make_weights(15, 8)
    x, ids = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16), torch.zeros(tokens, CHOICES, dtype=torch.int32)
    with pytest.raises(KernelError):
        run(x, ids, weights, group_tokens=group_tokens)


def test_padded_rows_and_foreign_experts_are_left_alone(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(11)
    weights, plain = make_weights(11, 4, first_expert=4)
    x = torch.randn(5, HIDDEN, generator=generator).bfloat16()
    ids = random_ids(generator, 5, 12)
    ids[3:] = -1
    got, want = run(x, ids, weights), expected(x, ids, plain, first_expert=4)
    local = (ids >= 4) & (ids < 8)
    assert local.any()
    assert torch.isnan(got[~local]).all()
    assert_close(got[local], want[local], "expert parallel")


def test_nan_in_one_token_stays_there(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(12)
    weights, _ = make_weights(12, 8)
    x = torch.randn(7, HIDDEN, generator=generator).bfloat16()
    ids = random_ids(generator, 7, 8)
    clean = run(x, ids, weights)
    x[2] = float("nan")
    dirty = run(x, ids, weights)
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(clean[others], dirty[others])
    assert torch.isnan(dirty[2]).all()


def test_cpu_tensors_take_the_reference():
    generator = torch.Generator().manual_seed(13)
    weights, plain = make_weights(13, 8)
    x = torch.randn(2, HIDDEN, generator=generator).bfloat16()
    ids = random_ids(generator, 2, 8)
    out = torch.zeros(2, CHOICES, HIDDEN)
    moe_decode.experts_decode(x, ids, weights, hidden=torch.empty(0), arrived=torch.empty(0), out=out, alpha=ALPHA, limit=LIMIT)
    assert torch.allclose(out, expected(x, ids, plain), rtol=1e-5, atol=1e-5)
