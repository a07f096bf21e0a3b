"""The fused dense kernels of a decode step: their own source, run on the CPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels import decode_fused as fused
from kernels.reference import apply_rope_ref, rms_norm_ref, rope_cos_sin_ref, route_ref, write_kv_ref, yarn_inv_freq_ref
from tests.support.emulated_cuda import emulated  # noqa: F401

C, D, S = 256, 64, 16
BATCHES = (1, 2, 3, 7, 8, 16, 33, 128)  # above 16 the library's product and a small kernel after it


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator).bfloat16()


def nans(*shape):
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def assert_close(got, want, tolerance=1e-2):
    error = (got.float() - want.float()).abs().max()
    assert not got.isnan().any()
    assert error <= tolerance * want.abs().max(), f"{error} of {want.abs().max()}"


def test_qkv_row_order_round_trips():
    rows = torch.arange(3 * D * 5).view(3 * D, 5)
    packed = fused.pack_qkv(rows)
    assert torch.equal(fused.unpack_qkv(packed), rows)
    assert [int(packed[i, 0]) // 5 for i in (0, 7, 8, 16)] == [0, 7, 32, 8]


def qkv_case(tokens, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(tokens)
    rows = (heads + 2 * kv_heads) * D
    x, weight, bias = randn(generator, tokens, C), randn(generator, rows, C) / 16, randn(generator, rows)
    inv_freq, concentration = yarn_inv_freq_ref(D, 150000.0, 32.0, 4096, 32.0, 1.0)
    cos, sin = rope_cos_sin_ref(torch.randint(0, 9000, (tokens,), generator=generator), inv_freq, concentration)
    slots = torch.randperm(9 * S, generator=generator)[:tokens].int()
    if tokens > 2:
        slots[1] = -1
    parts = (x.float() @ weight.float().t() + bias.float()).view(tokens, -1, D).split((heads, kv_heads, kv_heads), dim=1)
    pool = torch.full((9, 2, kv_heads, S, D), float("nan"))
    write_kv_ref(apply_rope_ref(parts[1], cos, sin), parts[2], pool, slots.long())
    return x, weight, bias, slots, torch.stack((cos, sin), -1), apply_rope_ref(parts[0], cos, sin), pool


@pytest.mark.parametrize("tokens", BATCHES)
def test_qkv_rope_write_matches_reference(emulated, tokens):  # noqa: F811
    x, weight, bias, slots, cos_sin, want_q, want_pool = qkv_case(tokens)
    q, pool = nans(*want_q.shape), torch.full(want_pool.shape, float("nan"), dtype=torch.bfloat16)
    scratch = nans(tokens, weight.shape[0])
    fused.qkv_rope_write(x, fused.pack_qkv(weight), fused.pack_qkv(bias), pool, slots, cos_sin, q, scratch=scratch)
    assert_close(q, want_q)
    assert torch.equal(pool.isnan(), want_pool.isnan())
    assert_close(pool.nan_to_num(), want_pool.nan_to_num())


@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 4, 2), (7, 3, 1), (2, 160, 10)])  # the last: more pieces than threads
def test_rotate_write_matches_reference(emulated, tokens, heads, kv_heads):  # noqa: F811
    x, weight, bias, slots, cos_sin, want_q, want_pool = qkv_case(tokens, heads, kv_heads)
    q, pool = nans(*want_q.shape), torch.full(want_pool.shape, float("nan"), dtype=torch.bfloat16)
    product = (x.float() @ fused.pack_qkv(weight).float().t()).bfloat16()
    fused.launch_rotate_write(product, fused.pack_qkv(bias), pool, slots, cos_sin, q)
    assert_close(q, want_q)
    assert torch.equal(pool.isnan(), want_pool.isnan())
    assert_close(pool.nan_to_num(), want_pool.nan_to_num())


@pytest.mark.parametrize("tokens", BATCHES)
def test_projection_matches_reference(emulated, tokens):  # noqa: F811
    generator = torch.Generator().manual_seed(tokens)
    x, weight, bias = randn(generator, tokens, 512), randn(generator, C, 512) / 16, randn(generator, C)
    residual = randn(generator, tokens, C)
    want = residual.float() + x.float() @ weight.float().t() + bias.float()
    other = residual.clone()
    fused.launch_add_bias_residual((x.float() @ weight.float().t()).bfloat16(), bias, other)
    fused.output_projection(x, weight, bias, residual, scratch=nans(tokens, C))
    assert_close(residual, want)
    assert_close(other, want, 2e-2)


def test_dense_rows_do_not_depend_on_the_batch(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(21)
    x, weight, bias = randn(generator, 16, C), randn(generator, 1024, C), randn(generator, 1024)
    whole = nans(16, 1024)
    fused.launch_projection(x, weight, bias, None, whole)
    assert_close(whole, x.float() @ weight.float().t() + bias.float())
    for first, last in ((0, 1), (3, 10), (2, 16)):  # up to eight tokens in items of eight rows, above in items of 16
        part = nans(last - first, 1024)
        fused.launch_projection(x[first:last].contiguous(), weight, bias, None, part)
        assert torch.equal(part, whole[first:last])


def route(x, norm_weight, weight, bias, slots, override=None):
    tokens, experts = x.shape[0], weight.shape[0]
    out = {
        "normed": nans(tokens, C),
        "logits": torch.full((tokens, experts), float("nan")),
        "arrived": torch.zeros(16, dtype=torch.int32),
        "expert_ids": torch.full((tokens, 4), 999, dtype=torch.int32),
        "expert_weights": torch.full((tokens, 4), float("nan")),
    }
    fused.norm_route(x, norm_weight, weight, bias, slots, eps=1e-5, logits_override=override, **out)
    assert not out["arrived"].any()
    return out


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 33, 128])
@pytest.mark.parametrize("experts", [32, 128])
def test_norm_route_matches_reference(emulated, tokens, experts):  # noqa: F811
    generator = torch.Generator().manual_seed(tokens)
    x, norm_weight = randn(generator, tokens, C), randn(generator, C)
    weight, bias = randn(generator, experts, C) / 16, randn(generator, experts)
    slots = torch.arange(tokens, dtype=torch.int32)
    slots[tokens // 2 + 1 :: 4] = -1
    out = route(x, norm_weight, weight, bias, slots)
    normed = rms_norm_ref(x, norm_weight, 1e-5)
    assert_close(out["normed"], normed)
    assert_close(out["logits"], out["normed"].float() @ weight.float().t() + bias.float(), 1e-5)
    ids, weights = route_ref(out["logits"], 4)
    padded = slots < 0
    assert torch.equal(out["expert_ids"][~padded], ids[~padded].int())
    assert torch.allclose(out["expert_weights"][~padded], weights[~padded], atol=1e-6)
    assert (out["expert_ids"][padded] == -1).all()
    assert not out["expert_weights"][padded].any()


def test_route_ties_go_to_the_lower_id_and_nan_last(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(3)
    args = randn(generator, 3, C), randn(generator, C), randn(generator, 32, C), randn(generator, 32), torch.arange(3, dtype=torch.int32)
    override = torch.zeros(3, 32)
    override[1, 31], override[1, 0] = 5.0, float("nan")
    override[2] = float("nan")
    override[0, :4] = -0.0  # equal to 0
    out = route(*args, override)
    assert out["expert_ids"].tolist() == [[0, 1, 2, 3], [31, 1, 2, 3], [0, 1, 2, 3]]
    assert torch.allclose(out["expert_weights"][0], torch.full((4,), 0.25))
    assert out["expert_weights"][2].isnan().all()


def test_route_orders_logits_of_any_size_and_sign(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(6)
    args = randn(generator, 9, C), randn(generator, C), randn(generator, 128, C), randn(generator, 128)
    override = torch.randn(9, 128, generator=generator) * torch.tensor([1e-40, 1e-3, 1, 30, 1e4, 1e20, 1, 1, 1])[:, None]
    override[6] = -override[6].abs()
    override[7, 100:] = float("-inf")
    override[8, 3:] = float("-inf")  # a choice among nothing but minus infinity
    ids, weights = route_ref(override, 4)
    out = route(*args, torch.arange(9, dtype=torch.int32), override)
    assert torch.equal(out["expert_ids"][:8], ids[:8].int())
    assert torch.equal(out["expert_ids"][8, :3], ids[8, :3].int())
    assert out["expert_ids"][8, 3] == 3
    assert torch.allclose(out["expert_weights"], weights, atol=1e-6)


def test_combine_norm_matches_reference(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(4)
    tokens = 5
    pairs, residual, norm_weight = randn(generator, tokens, 4, C), randn(generator, tokens, C), randn(generator, C)
    ids = torch.randint(0, 12, (tokens, 4), generator=generator, dtype=torch.int32)
    ids[3] = -1
    weights = torch.rand(tokens, 4, generator=generator)
    local = (ids >= 4) & (ids < 8)
    assert local.any()
    pairs[~local] = float("nan")
    want = residual.float() + torch.where(local[..., None], pairs.float() * weights[..., None], 0.0).sum(1)
    normed = nans(tokens, C)
    fused.combine_norm(pairs, ids, weights, residual, norm_weight, eps=1e-5, first_expert=4, num_local_experts=4, normed=normed)
    assert_close(residual, want)
    assert_close(normed, rms_norm_ref(residual, norm_weight, 1e-5))


def test_embed_norm_takes_any_token_id(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(5)
    embedding, norm_weight = randn(generator, 50, C), randn(generator, C)
    residual, normed = nans(4, C), nans(4, C)
    fused.embed_norm(torch.tensor([49, 0, -1, 7], dtype=torch.int32), embedding, norm_weight, eps=1e-5, residual=residual, normed=normed)
    assert torch.equal(residual, embedding[[49, 0, 0, 7]])
    assert_close(normed, rms_norm_ref(residual, norm_weight, 1e-5))
