"""Whole layers and forwards of prefill on a GPU: one real-shaped layer against fp32, and a CUDA graph against the eager forward."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.prefill_check_tools import DEVICE, EXPERTS, HIDDEN, TOP_K, calc_diff, in_plain_order, normal
from benchmarks.prefill_random import BLOCK_SIZE, RandomWeights, gpt_oss_config, make_cache, random_prompt, uniform_logits
from kernels.experts_prefill import down_order, gate_up_order
from kernels.gemm_fp8 import dequant_weight
from kernels.norm import add_norm, add_norm_quantize
from kernels.reference import apply_rope_ref, experts_ref, paged_attention_ref, rms_norm_ref, write_kv_ref
from kernels.router import route
from model.parallel import LocalGroup
from model.prefill_cuda import CudaPrefill
from model.prefill_graph import PrefillGraph
from model.prefill_inputs import ChunkInputs, PagedAttention
from model.prefill_projections import add_output, project_output
from model.prefill_weights import SERVED_PROJECTIONS, Fp8Weight, PrefillWeights, Projections

LAYER_COSINE = 0.999


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
