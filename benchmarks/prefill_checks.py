"""Correctness of the prefill kernels on a GPU at real shapes: each against its fp32 twin on fresh random inputs with poisoned outputs.

Each check returns a short line for the table and raises AssertionError where a tolerance of the house table is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.prefill_random import BLOCK_SIZE, RandomWeights, gpt_oss_config, make_cache, random_prompt, uniform_logits
from kernels.attention_prefill import AttentionHeads, PrefillAttention, attention_workspace
from kernels.attention_prompt import PromptAttention, window_attention
from kernels.experts_prefill import (
    down_order,
    empty_counters,
    experts_down,
    experts_gate_up,
    gate_up_order,
    restore_rows,
)
from kernels.gemm_fp8 import dequant_weight, gemm_fp8
from kernels.moe_prefill import ExpertRows, combine, combine_norm_quantize, permute_rows
from kernels.norm import add_norm, add_norm_quantize
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from kernels.reference import (
    apply_rope_ref,
    combine_rows_ref,
    experts_ref,
    fp8_dequant_rows_ref,
    fp8_quant_hidden_ref,
    fp8_quant_rows_bias_ref,
    hidden_scale,
    paged_attention_ref,
    rms_norm_ref,
    rope_cos_sin_ref,
    route_ref,
    swiglu_ref,
    write_kv_ref,
    yarn_inv_freq_ref,
)
from kernels.rope_kv import rope_table, rope_write_kv
from kernels.router import Routing, fold_router, route
from model.parallel import LocalGroup
from model.prefill_cuda import CudaPrefill
from model.prefill_graph import PrefillGraph
from model.prefill_inputs import ChunkInputs, PagedAttention
from model.prefill_projections import add_output, project_output
from model.prefill_weights import SERVED_PROJECTIONS, Fp8Weight, PrefillWeights, Projections

DEVICE = "cuda"
HIDDEN, EXPERTS, TOP_K = 2880, 128, 4
SIZES = (1, 127, 128, 129, 2879)
HEADS = AttentionHeads(64, 8, 64)
LAYER_COSINE = 0.999


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 <x, y> / (|x|^2 + |y|^2), in fp64. Source: DeepGEMM"""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))


def poison_memory() -> None:
    """Fills what the allocator hands out next with NaN bytes (0xFF is NaN in fp8, bf16 and fp32), so that an unwritten output shows."""
    blocks = [torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(0xFF) for size in (1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 28)]
    del blocks


def check_rows(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], label: str) -> float:
    """FP8 rows equal to the twin's but for single rounding steps. Returns: share of payload bytes that differ"""
    torch.testing.assert_close(got[1], expected[1], rtol=2e-3, atol=0, msg=lambda m: f"{label} scales: {m}")
    value, reference = (fp8_dequant_rows_ref(*rows, rows[0].shape[1]) for rows in (got, expected))
    bad = ~((value - reference).abs() <= 0.13 * reference.abs() + _per_column(expected) * 2.0**-8)
    assert not bad.any(), f"{label}: {int(bad.sum())} bad, first {bad.nonzero()[0].tolist()}: {value[bad][0]} against {reference[bad][0]}"
    differs = float((got[0].float() != expected[0].float()).float().mean())
    assert differs < 2e-2, f"{label}: {differs:.4f} of the payload differs"
    return differs


def _per_column(rows: tuple[Tensor, Tensor]) -> Tensor:
    """Scales [T, P], of rows with one scale for 128 columns or for all"""
    return rows[1].repeat_interleave(rows[0].shape[1] // rows[1].shape[1], 1)


def normal(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * std).bfloat16()


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


def in_plain_order(weight: Fp8Weight, order: Callable[[int], Tensor]) -> Fp8Weight:
    """Experts' rows as the checkpoint has them; sizes whose rows need no padding."""
    rows = weight.values.shape[1]
    return Fp8Weight(restore_rows(weight.values, order(rows), rows), weight.scales)


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


def check_attention() -> str:
    worst = 0.0
    workspace = attention_workspace(DEVICE)
    for window in (None, 128):
        attention = PrefillAttention(HEADS, BLOCK_SIZE, window_tokens=window, workspace=workspace)
        for queries, cached in ((1, 0), (127, 0), (129, 0), (1000, 0), (1, 777), (200, 1003), (2879, 0)):
            seq_len = queries + cached
            blocks = -(-seq_len // BLOCK_SIZE)
            pool = normal(blocks + 3, 2, 8, BLOCK_SIZE, 64)
            table = torch.randperm(blocks + 3, device=DEVICE)[:blocks].int()
            q, sinks = normal(queries, 64, 64), torch.randn(64, device=DEVICE)
            attention.plan(queries, seq_len, table)
            got = attention.run(q, pool, sinks)
            expected = paged_attention_ref(
                q.float(), pool, table[None], *(torch.tensor(v, device=DEVICE) for v in ([0], [seq_len], [0, queries])), sinks,
                window=window, sm_scale=0.125,
            )  # fmt: skip
            error = float((got.float() - expected).norm() / expected.norm())
            assert error < 1e-2, f"window {window}, {queries} after {cached}: relative error {error}"
            worst = max(worst, error)
    return f"relative error {worst:.1e}"


def check_planted_keys() -> str:
    """One key answers the query; its value marks the output. Then equal keys against a sink of known share."""
    workspace = attention_workspace(DEVICE)
    for window in (128, None):
        attention = PrefillAttention(HEADS, BLOCK_SIZE, window_tokens=window, workspace=workspace)
        for seq_len, queries in ((300, 300), (1000, 40)):
            table = torch.randperm(-(-seq_len // BLOCK_SIZE), device=DEVICE).int()
            attention.plan(queries, seq_len, table)
            q = torch.full((queries, 64, 64), 4.0, dtype=torch.bfloat16, device=DEVICE)
            for distance, expected in ((129, 1.0 if window is None else 0.0), (128, 1.0), (1, 1.0)):
                pool = torch.zeros(table.numel(), 2, 8, BLOCK_SIZE, 64, dtype=torch.bfloat16, device=DEVICE)
                place = seq_len - distance
                block, offset = int(table[place // BLOCK_SIZE]), place % BLOCK_SIZE
                pool[block, 0, :, offset], pool[block, 1, :, offset] = 4.0, 1.0
                marked = attention.run(q, pool, torch.full((64,), -50.0, device=DEVICE))[-1].float()
                assert float((marked - expected).abs().max()) < 1e-2, f"window {window}: key at L-{distance} weighs {marked.flatten()[:4]}"
            pool[:, 0], pool[:, 1] = 0.0, 1.0
            visible = seq_len if window is None else min(window, seq_len)
            out = attention.run(q, pool, torch.full((64,), math.log(visible), device=DEVICE))[-1].float()
            assert float((out - 0.5).abs().max()) < 5e-3, f"window {window}: sink share {1 - out.flatten()[:4]}, expected 0.5"
    return "L-128 counts, L-129 does not; the sink counts once"


def check_attention_rows() -> str:
    """Both kinds over contiguous rows, padding rows included in the plan, and the window's edge."""
    worst = 0.0
    full = PromptAttention(HEADS, workspace=attention_workspace(DEVICE))
    for tokens in (1, 127, 129, 1000, 2879, 4096):
        q, k, v = normal(tokens, 64, 64), normal(tokens, 8, 64), normal(tokens, 8, 64)
        sinks = torch.randn(64, device=DEVICE)
        pool = torch.stack((k, v)).transpose(1, 2)[None].contiguous().float()
        table, bounds = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.tensor([0, tokens], device=DEVICE)
        poison_memory()
        full.plan(tokens)
        for window, got in ((None, full.run(q, k, v, sinks)), (128, window_attention(q, k, v, sinks, 128))):
            expected = paged_attention_ref(
                q.float(), pool, table, bounds[:1], bounds[1:], bounds, sinks, window=window, sm_scale=0.125
            )  # fmt: skip
            error = float((got.float() - expected).norm() / expected.norm())
            assert error < 1e-2, f"window {window}, {tokens} tokens: relative error {error}"
            worst = max(worst, error)
    for distance, weight in ((127, 1.0), (128, 0.0)):
        q = torch.full((300, 64, 64), 4.0, dtype=torch.bfloat16, device=DEVICE)
        k, v = torch.zeros(2, 300, 8, 64, dtype=torch.bfloat16, device=DEVICE).unbind()
        k[299 - distance], v[299 - distance] = 4.0, 1.0
        out = window_attention(q, k, v, torch.full((64,), -50.0, device=DEVICE), 128)[-1].float()
        assert float((out - weight).abs().max()) < 1e-2, f"key {distance} left of the query weighs {out.flatten()[:4]}"
    return f"relative error {worst:.1e}"


def check_layer() -> str:
    """One whole 120b layer against fp32 with unquantised projections and the same expert choice, MXFP4-exact expert weights.

    The gate is on the layer's output with a residual stream of unit variance, for each choice of projections. A stream four times as
    large is reported beside it and decides nothing: which of the two a trained model resembles has not been measured.
    """
    lines, passed = [], []
    for projections in ("fp8", "bf16_qkv", "bf16"):
        unit, larger = layer_cosines(projections, 1.0), layer_cosines(projections, 4.0)
        if unit[2] >= LAYER_COSINE:
            passed.append(projections)
        shown = " ".join(f"{cosine:.5f}" for cosine in unit)
        lines.append(f"{projections} {'passes' if projections in passed else 'FAILS'}: {shown} (stream x4: {larger[2]:.5f})")
    text = "cosine of attention block, MoE block, output: " + "; ".join(lines)
    assert SERVED_PROJECTIONS in passed, f"the default projections are below {LAYER_COSINE}: {text}"
    return text


def layer_cosines(projections: Projections, scale: float) -> tuple[float, float, float]:
    """Sliding layer of 120b on 1,024 tokens. Returns: cosine to fp32 of the attention block, the MoE block, the layer's output"""
    tokens = 1024
    torch.manual_seed(17)
    config = gpt_oss_config("120b", 2)
    layer, originals = RandomWeights(config, DEVICE, 11).layer_with_originals(projections)
    embed = normal(config.vocab_size, HIDDEN, std=scale)
    weights = PrefillWeights(embed, (layer, layer), normal(HIDDEN), normal(config.vocab_size, HIDDEN, std=0.02))
    prefill = CudaPrefill(config, weights, LocalGroup(), block_size=BLOCK_SIZE, device=DEVICE, max_positions=8192, contiguous=False)
    batch, blocks = random_prompt(config, tokens, 5)
    inputs = ChunkInputs.empty(tokens, DEVICE)
    inputs.fill(batch)
    attention = PagedAttention(config, prefill.heads, BLOCK_SIZE, prefill.workspace)
    attention.plan(batch, tokens, DEVICE)
    pool = make_cache(config, blocks, DEVICE).layer(0)
    residual = weights.embed[inputs.token_ids.long()]
    before = residual.float()
    norm = add_norm_quantize if isinstance(layer.qkv, Fp8Weight) else add_norm
    q, _ = prefill._write_kv(0, norm(residual, layer.attn_norm, 1e-5), inputs, pool, attention, None)
    attended = attention.attend(True, q, None, pool, layer.sinks)
    if prefill.adds_output:
        assert isinstance(layer.o, Tensor)
        residual += layer.o_bias
        middle = residual.clone()
        add_output(middle, attended, layer.o)
    else:
        middle = (before + project_output(attended, layer.o).float() + layer.o_bias.float()).bfloat16()
    prefill.after_attention(0, residual, attended, torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE), inputs.num_tokens)
    output = residual.float() - (layer.o_bias.float() if prefill.adds_output else 0.0)  # of the layer that follows, the same one here

    x = rms_norm_ref(before, layer.attn_norm, 1e-5)
    qkv = (x @ originals["qkv"].float().t() + layer.qkv_bias.float()).view(tokens, 80, 64)
    cos, sin = prefill.cos_sin[inputs.positions.long()].chunk(2, dim=1)
    exact_pool = torch.zeros_like(pool, dtype=torch.float32)
    write_kv_ref(apply_rope_ref(qkv[:, 64:72], cos, sin), qkv[:, 72:], exact_pool, inputs.sliding_slots.long())
    exact = paged_attention_ref(
        apply_rope_ref(qkv[:, :64], cos, sin), exact_pool, batch.sliding.block_table.to(DEVICE), batch.sliding.kv_start, batch.seq_lens,
        batch.cu_seqlens_q, layer.sinks, window=128, sm_scale=0.125,
    )  # fmt: skip
    after = before + exact.flatten(1) @ originals["o"].float().t() + layer.o_bias.float()
    inverse = torch.rsqrt(middle.float().square().mean(1) + 1e-5)
    routing = route(middle, inverse, layer.router, layer.router_bias, TOP_K, torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE))
    normed = rms_norm_ref(after, layer.mlp_norm, 1e-5)
    exact_logits = normed @ originals["router"].float().t() + layer.router_bias.float()
    ids = routing.expert_ids.long()
    shares = torch.softmax(exact_logits.gather(1, ids), dim=1)
    gate_up = torch.stack([dequant_weight(v, s)[:, :HIDDEN] for v, s in zip(*in_plain_order(layer.gate_up, gate_up_order), strict=True)])
    down = torch.stack([dequant_weight(v, s)[:, :HIDDEN] for v, s in zip(*in_plain_order(layer.down, down_order), strict=True)])
    moe = experts_ref(normed, ids, shares, gate_up, originals["gate_up_bias"], down, originals["down_bias"])

    def cosine(got: Tensor, expected: Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(got.flatten().double(), expected.flatten().double(), dim=0))

    return (
        cosine(middle.float() - before, after - before),
        cosine(output - middle.float(), moe),
        cosine(output, after + moe),
    )


def check_graph() -> str:
    """A padded CUDA graph against the eager forward of the same chunk: same logits, same KV."""
    config = gpt_oss_config("20b", 4)
    prefill = CudaPrefill(
        config, RandomWeights(config, DEVICE, 12).model(), LocalGroup(), block_size=BLOCK_SIZE, device=DEVICE, max_positions=8192
    )
    prefill.logit_offset = uniform_logits(config, 512, DEVICE, 1)
    warm, blocks = random_prompt(config, 512, 6)
    graph_kv, kv = make_cache(config, blocks, DEVICE), make_cache(config, blocks, DEVICE)
    graph = PrefillGraph(prefill, 512, warm, graph_kv)
    worst = 0.0
    for tokens in (512, 333, 1):
        batch, _ = random_prompt(config, tokens, 7)
        graph_kv.buffer.zero_()
        kv.buffer.zero_()
        expected = prefill.forward(batch, kv)
        got = graph.forward(batch)
        assert bool(got.isfinite().all())
        worst = max(worst, calc_diff(got, expected), calc_diff(graph_kv.full, kv.full), calc_diff(graph_kv.sliding, kv.sliding))
        assert int(got.argmax()) == int(expected.argmax()), f"T{tokens}: another token"
    assert worst < 1e-3, f"diff {worst}"
    return f"diff to eager {worst:.1e}"


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
    "attention rows": check_attention_rows,
    "120b layer": check_layer,
    "graph": check_graph,
}
