"""Correctness of the prefill kernels on a GPU at real shapes: each against its fp32 twin on fresh random inputs with poisoned outputs.

Each check returns a short line for the table and raises AssertionError where a tolerance of the house table is broken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.prefill_attention_checks import check_attention, check_attention_rows, check_plans_ahead, check_planted_keys
from benchmarks.prefill_check_tools import (
    DEVICE,
    EXPERTS,
    HIDDEN,
    SIZES,
    TOP_K,
    calc_diff,
    check_rows,
    in_plain_order,
    normal,
    poison_memory,
)
from benchmarks.prefill_layer_checks import check_graph, check_layer
from benchmarks.prefill_random import BLOCK_SIZE, RandomWeights, gpt_oss_config
from kernels.experts_prefill import down_order, empty_counters, experts_down, experts_gate_up, gate_up_order
from kernels.gemm_fp8 import dequant_weight, gemm_fp8
from kernels.moe_prefill import ExpertRows, combine, combine_norm_quantize, permute_rows
from kernels.norm import add_norm_quantize
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from kernels.reference import (
    apply_rope_ref,
    combine_rows_ref,
    fp8_dequant_rows_ref,
    fp8_quant_hidden_ref,
    fp8_quant_rows_bias_ref,
    hidden_scale,
    rms_norm_ref,
    rope_cos_sin_ref,
    route_ref,
    swiglu_ref,
    write_kv_ref,
    yarn_inv_freq_ref,
)
from kernels.rope_kv import rope_table, rope_write_kv
from kernels.router import Routing, fold_router, route
from model.prefill_weights import Fp8Weight


def check_quantize() -> str:
    worst = 0.0
    for tokens in SIZES:
        x = normal(tokens, 4096)
        poison_memory()
        worst = max(worst, check_rows(quantize_rows(x), fp8_quant_rows_bias_ref(x, 0), f"T{tokens}"))
    return f"payload differs in {worst:.1e}"


def check_norm() -> str:
    worst = 0.0
    for tokens in SIZES:
        residual, delta, bias, weight = normal(tokens, HIDDEN), normal(tokens, HIDDEN), normal(HIDDEN), normal(HIDDEN)
        total = (residual.float() + delta.float() + bias.float()).bfloat16()
        poison_memory()
        inverse = torch.full((tokens,), float("nan"), device=DEVICE)
        got = add_norm_quantize(residual, weight, 1e-5, delta=delta, delta_bias=bias, bias_columns=BIAS_COLUMNS, inverse_rms=inverse)
        torch.testing.assert_close(inverse, torch.rsqrt(total.float().square().mean(1) + 1e-5), rtol=1e-5, atol=0)
        assert torch.equal(residual, total), f"T{tokens}: residual differs"
        expected = fp8_quant_rows_bias_ref(rms_norm_ref(total.float(), weight, 1e-5), BIAS_COLUMNS)
        worst = max(worst, check_rows(got, expected, f"T{tokens}"))
    return f"payload differs in {worst:.1e}"


def check_rope() -> str:
    inv_freq, concentration = yarn_inv_freq_ref(64, 150000.0, 32.0, 4096, 32.0, 1.0)
    table = rope_table(131072, inv_freq.to(DEVICE), concentration)
    worst = 0.0
    for tokens in SIZES:
        blocks = tokens // BLOCK_SIZE + 2
        qkv, bias = normal(tokens, 5120), normal(5120)
        slots = torch.randperm(blocks * BLOCK_SIZE, device=DEVICE)[:tokens].int()
        slots[::17] = -1
        positions = torch.randint(0, 131072, (tokens,), device=DEVICE, dtype=torch.int32)
        pool = torch.full((blocks, 2, 8, BLOCK_SIZE, 64), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        expected_pool = pool.clone()
        poison_memory()
        kv_rows = torch.empty(2, tokens, 8, 64, dtype=torch.bfloat16, device=DEVICE).fill_(float("nan")).unbind()
        q = rope_write_kv(qkv, bias, table, positions, slots, pool, 64, kv_rows=kv_rows)
        x = (qkv.float() + bias.float()).view(tokens, 80, 64)
        cos, sin = rope_cos_sin_ref(positions, inv_freq.to(DEVICE), concentration)
        write_kv_ref(apply_rope_ref(x[:, 64:72], cos, sin), x[:, 72:], expected_pool, slots.long())
        torch.testing.assert_close(kv_rows[0].float(), apply_rope_ref(x[:, 64:72], cos, sin), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(kv_rows[1].float(), x[:, 72:], rtol=1e-2, atol=1e-3)
        expected_q = apply_rope_ref(x[:, :64], cos, sin)
        torch.testing.assert_close(q.float(), expected_q, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(pool.float(), expected_pool.float(), rtol=1e-2, atol=1e-3, equal_nan=True)
        worst = max(worst, float((q.float() - expected_q).abs().max()))
    return f"max error {worst:.1e}"


def random_routing(tokens: int, pattern: str, experts: int = EXPERTS) -> Routing:
    """Routes through the real kernel with zero router weights; pattern: random, empty (half the experts) or one (all to expert 5)."""
    offset = torch.randn(tokens, experts, device=DEVICE)
    if pattern == "empty":
        offset[:, ::2] -= 100.0
    if pattern == "one":
        offset[:, 5] += 100.0
    zeros = torch.zeros(2 * experts, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    counts = torch.zeros(experts, dtype=torch.int32, device=DEVICE)
    ones = torch.ones(tokens, device=DEVICE)
    return route(normal(tokens, HIDDEN), ones, zeros, zeros[:experts, 0], TOP_K, counts, logit_offset=offset)


def check_route() -> str:
    flips = 0
    for tokens in (*SIZES, 8192):
        residual, norm, weight = normal(tokens, HIDDEN), normal(HIDDEN), normal(EXPERTS, HIDDEN, std=0.02)
        bias = normal(EXPERTS)
        counts = torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE)
        poison_memory()
        inverse = torch.rsqrt(residual.float().square().mean(1) + 1e-5)
        got = route(residual, inverse, fold_router(weight, norm), bias, TOP_K, counts)
        exact = rms_norm_ref(residual.float(), norm, 1e-5).double() @ weight.double().t() + bias.double()
        ids, shares = route_ref(exact, TOP_K)
        top = exact.sort(dim=1, descending=True).values
        clear = (top[:, :TOP_K] - top[:, 1 : TOP_K + 1]).amin(1) > 2e-5 * top.abs().amax(1)
        same = (got.expert_ids == ids).all(1)
        assert bool(same[clear].all()), f"T{tokens}: {int((~same & clear).sum())} choices differ where fp64's margin is clear"
        torch.testing.assert_close(got.expert_weights[same], shares[same].float(), rtol=1e-4, atol=1e-5)
        assert torch.equal(counts.long(), torch.bincount(got.expert_ids.flatten().long(), minlength=EXPERTS)), f"T{tokens}: counts"
        places = (got.expert_ids.long() * 100000 + got.ranks).flatten()
        assert places.unique().numel() == places.numel(), f"T{tokens}: two rows in one place"
        assert int((got.ranks - counts[got.expert_ids.long()]).max()) < 0, f"T{tokens}: a rank outside its expert"
        flips += int((~same).sum())
    return f"{flips} near-ties of {sum(SIZES) + 8192} tokens differ from fp64"


def check_expert_rows() -> str:
    for tokens in SIZES:
        for pattern in ("random", "empty", "one"):
            label = f"T{tokens}-{pattern}"
            routing = random_routing(tokens, pattern)
            q, scales = quantize_rows(normal(tokens, HIDDEN), bias_columns=BIAS_COLUMNS)
            poison_memory()
            rows = permute_rows(q, scales, routing)
            flat = rows.rows.flatten().long()
            assert flat.unique().numel() == tokens * TOP_K, f"{label}: rows collide"
            assert torch.equal(rows.q.view(torch.uint8)[flat], q.view(torch.uint8).repeat_interleave(TOP_K, 0)), f"{label}: payload"
            assert torch.equal(rows.scales[flat], scales.repeat_interleave(TOP_K, 0)), f"{label}: scales"
            y = torch.full((rows.q.shape[0], HIDDEN), float("nan"), dtype=torch.bfloat16, device=DEVICE)
            y[flat] = normal(flat.numel(), HIDDEN)
            residual, norm = normal(tokens, HIDDEN), normal(HIDDEN)
            shares = combine_rows_ref(y, rows.rows, routing.expert_weights)
            torch.testing.assert_close(combine(y, rows.rows, routing.expert_weights).float(), shares, rtol=1e-2, atol=1e-3)
            total = residual.float() + shares
            got = combine_norm_quantize(residual, y, rows.rows, routing.expert_weights, norm, 1e-5)
            torch.testing.assert_close(residual.float(), total, rtol=1e-2, atol=1e-2)
            check_rows(got, fp8_quant_rows_bias_ref(rms_norm_ref(residual.float(), norm, 1e-5), 0), f"{label} combine")
    return "permute bitwise"


def check_dense_gemm() -> str:
    worst = 0.0
    random = RandomWeights(gpt_oss_config("20b", 2), DEVICE, 3)
    layer = random.layer()
    for weight, columns in ((layer.qkv, HIDDEN), (layer.o, 4096)):
        dense = dequant_weight(*weight)[:, :columns]
        for tokens in (1, 129, 2879, 8192):
            q, scales = quantize_rows(normal(tokens, columns))
            poison_memory()
            worst = max(worst, calc_diff(gemm_fp8(q, scales, *weight), fp8_dequant_rows_ref(q, scales, columns) @ dense.t()))
    assert worst < 1e-3, f"diff {worst}"
    return f"diff {worst:.1e}"


def check_experts(model: str) -> str:
    """Both products against fp32, expert by expert: few tokens, half the experts empty, all tokens with one expert, a real prompt."""
    config = gpt_oss_config(model, 2)
    layer = RandomWeights(config, DEVICE, 4).layer()
    gate_up, down = in_plain_order(layer.gate_up, gate_up_order), in_plain_order(layer.down, down_order)
    counters = empty_counters(DEVICE)
    worst = {"hidden": 0.0, "down": 0.0}
    for tokens, pattern in ((1, "random"), (77, "one"), (300, "random"), (2879, "empty"), (8192, "random")):
        routing = random_routing(tokens, pattern, config.num_experts)
        rows = permute_rows(*quantize_rows(normal(tokens, HIDDEN), bias_columns=BIAS_COLUMNS), routing)
        counts = routing.counts.tolist()
        rising = [expert for expert in sorted(range(len(counts)), key=counts.__getitem__) if counts[expert]]
        for mean in (1.0, 1000.0):  # both ways to divide the work
            poison_memory()
            q = experts_gate_up(rows, *layer.gate_up, config.intermediate_size, counters, rows_per_expert=mean)
            y = experts_down(q, *layer.down, rows, counters, rows_per_expert=mean)
            assert counters.tolist() == [0, 0]
            for expert in {rising[0], *rising[-3:]}:
                label = f"{model} mean {mean} T{tokens} {pattern} expert {expert}"
                product, where = exact_product(rows.q, rows.scales, gate_up, rows, expert)
                expected = fp8_quant_hidden_ref(swiglu_ref(product), hidden_scale(7.0), BIAS_COLUMNS).float()
                hidden = calc_diff(q[where, :HIDDEN].float(), expected[:, :HIDDEN])
                assert bool((q[where, HIDDEN:].float() == expected[:, HIDDEN:]).all()), f"{label}: bias columns"
                scales = torch.full_like(rows.scales, hidden_scale(7.0))
                error = calc_diff(y[where].float(), exact_product(q, scales, down, rows, expert)[0])
                assert max(hidden, error) < 1e-3, f"{label}: hidden {hidden:.1e}, down {error:.1e}"
                worst = {"hidden": max(worst["hidden"], hidden), "down": max(worst["down"], error)}
            again = experts_down(q, *layer.down, rows, counters, rows_per_expert=mean)
            assert torch.equal(y[: sum(counts)], again[: sum(counts)]), f"mean {mean} T{tokens}: two launches differ"
    return f"{model}: diff to fp32 of hidden rows {worst['hidden']:.1e}, of down {worst['down']:.1e}"


def exact_product(q: Tensor, scales: Tensor, weight: Fp8Weight, rows: ExpertRows, expert: int) -> tuple[Tensor, slice]:
    """One expert's product in fp32. Returns: [its tokens, R] and where its rows lie"""
    ends = [0, *rows.ends.tolist()]
    where = slice(ends[expert], ends[expert + 1])
    dense = dequant_weight(weight.values[expert], weight.scales[expert])
    return fp8_dequant_rows_ref(q[where], scales[where], q.shape[1]) @ dense.t(), where


CHECKS: dict[str, Callable[[], str]] = {
    "quantize": check_quantize,
    "norm": check_norm,
    "rope_kv": check_rope,
    "router": check_route,
    "expert rows": check_expert_rows,
    "dense gemm": check_dense_gemm,
    "experts": lambda: check_experts("120b"),
    "attention": check_attention,
    "planted keys": check_planted_keys,
    "plans ahead": check_plans_ahead,
    "attention rows": check_attention_rows,
    "120b layer": check_layer,
    "graph": check_graph,
}
