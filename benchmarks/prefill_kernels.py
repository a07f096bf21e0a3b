"""Times single prefill kernels beside their floors: the tile, layout and precision choices that the code has made, measured again.

Floors: bytes over the copy bandwidth and FLOPs over the matrix rates measured on one H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.prefill_random import BLOCK_SIZE, RandomWeights, gpt_oss_config
from kernels.attention_prefill import AttentionHeads, PrefillAttention, attention_workspace
from kernels.attention_prompt import PromptAttention, window_attention
from kernels.experts_prefill import empty_counters, experts_down, experts_gate_up
from kernels.gemm_fp8 import gemm_fp8
from kernels.moe_prefill import combine_norm_quantize, permute_rows
from kernels.norm import add_norm_quantize
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from kernels.reference import yarn_inv_freq_ref
from kernels.rope_kv import rope_table, rope_write_kv
from kernels.router import route

BANDWIDTH = 4.3e12  # B/s, read + write
FP8_RATE, BF16_RATE, FA3_RATE = 1.37e15, 0.785e15, 0.53e15  # FLOP/s
DEVICE = "cuda"


def time_us(run: Callable[[], object], repeats: int = 20) -> float:
    """Median over `repeats` launches between events, after warm-up; the caches are flushed in between."""
    flush = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=DEVICE)
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[repeats // 2]


def floor(num_bytes: float = 0.0, flops: float = 0.0, rate: float = FP8_RATE) -> float:
    """The least time of so many bytes and operations [us]."""
    return max(num_bytes / BANDWIDTH, flops / rate) * 1e6


def attention_rows(random: RandomWeights, sinks: Tensor, pool: Tensor, tokens: int) -> Iterator[tuple[str, float, float]]:
    """The attention kernels' part of `kernel_rows`."""
    q, workspace = random.normal(tokens, 64, 64), attention_workspace(DEVICE)
    for name, window, flops in (("full", None, 2 * tokens * tokens * 4096), ("sliding", 128, 4 * tokens * 128 * 4096)):
        attention = PrefillAttention(AttentionHeads(64, 8, 64), BLOCK_SIZE, window_tokens=window, workspace=workspace)
        attention.plan(tokens, tokens, torch.arange(tokens // BLOCK_SIZE, device=DEVICE, dtype=torch.int32))
        run = attention.run
        yield f"attention {name}", floor(2 * 8192 * tokens, flops, FA3_RATE), time_us(lambda run=run: run(q, pool, sinks))
    k, v = random.normal(tokens, 8, 64), random.normal(tokens, 8, 64)
    prompt = PromptAttention(AttentionHeads(64, 8, 64), workspace=workspace)
    prompt.plan(tokens)
    least = floor(2 * 8192 * tokens, 2 * tokens * tokens * 4096, FA3_RATE)
    yield "attention full, rows (predicted 1,050 at 8,192)", least, time_us(lambda: prompt.run(q, k, v, sinks))
    least = floor(2 * 8192 * tokens, 4 * tokens * 128 * 4096, FA3_RATE)
    yield "attention sliding, rows (predicted 100)", least, time_us(lambda: window_attention(q, k, v, sinks, 128))
    for block_m, block_n, warps in ((128, 64, 8), (64, 64, 4), (128, 128, 8)):
        yield (
            f"attention sliding, rows {block_m}x{block_n} {warps} warps",
            least,
            time_us(window_run(q, k, v, sinks, block_m, block_n, warps)),
        )


def kernel_rows(model: str, tokens: int) -> Iterator[tuple[str, float, float]]:
    """Yields (kernel, floor us, measured us) for one layer of the model at this length. Events include a few us of launch each."""
    config = gpt_oss_config(model, 2)
    experts, hidden = config.num_experts, config.hidden_size
    random = RandomWeights(config, DEVICE, 21)
    layer, originals = random.layer_with_originals()
    x, delta = random.normal(tokens, hidden), random.normal(tokens, hidden)
    row, fp8 = 2 * hidden * tokens, 2944 * tokens

    rows = add_norm_quantize(x, layer.mlp_norm, 1e-5, bias_columns=BIAS_COLUMNS)
    yield (
        "add_norm_quantize",
        floor(3 * row + fp8),
        time_us(lambda: add_norm_quantize(x, layer.mlp_norm, 1e-5, delta=delta, delta_bias=layer.o_bias, bias_columns=BIAS_COLUMNS)),
    )
    placed_rows, rows = rows, quantize_rows(x)
    yield "qkv gemm fp8", floor(fp8 + 10240 * tokens, 2 * tokens * 5120 * 2880), time_us(lambda: gemm_fp8(*rows, *layer.qkv))
    qkv_t = originals["qkv"].t()
    yield "qkv gemm bf16", floor(row, 2 * tokens * 5120 * 2880, BF16_RATE), time_us(lambda: torch.mm(x, qkv_t))
    qkv = gemm_fp8(*rows, *layer.qkv)
    inv_freq, concentration = yarn_inv_freq_ref(64, 150000.0, 32.0, 4096, 32.0, 1.0)
    table = rope_table(tokens, inv_freq.to(DEVICE), concentration)
    pool = random.normal(tokens // BLOCK_SIZE, 2, 8, BLOCK_SIZE, 64)
    positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
    yield (
        "rope_write_kv",
        floor(2 * 10240 * tokens),
        time_us(lambda: rope_write_kv(qkv, layer.qkv_bias, table, positions, positions, pool, 64)),
    )
    yield from attention_rows(random, layer.sinks, pool, tokens)
    flat = random.normal(tokens, 4096)
    yield "quantize_rows", floor(3 * 4096 * tokens), time_us(lambda: quantize_rows(flat))
    attended = quantize_rows(flat)
    yield "o gemm fp8", floor(4096 * tokens + row, 2 * tokens * 2880 * 4096), time_us(lambda: gemm_fp8(*attended, *layer.o))
    o_t = originals["o"].t()
    yield "o gemm bf16", floor(row, 2 * tokens * 2880 * 4096, BF16_RATE), time_us(lambda: torch.mm(flat, o_t))
    counts = torch.zeros(experts, dtype=torch.int32, device=DEVICE)
    offset = torch.randn(tokens, experts, device=DEVICE) * 30
    inverse = torch.rsqrt(x.float().square().mean(1) + 1e-5)

    def routed():
        counts.zero_()
        return route(x, inverse, layer.router, layer.router_bias, 4, counts, logit_offset=offset)

    yield "route (and memset)", floor(row + 4 * experts * tokens), time_us(routed)
    routing = routed()
    gate_up_bytes, down_bytes = experts * 5760 * 2944, experts * 2880 * 2944
    yield "permute_rows", floor(5 * fp8), time_us(lambda: permute_rows(*placed_rows, routing))
    placed, counters, mean = permute_rows(*placed_rows, routing), empty_counters(DEVICE), 4 * tokens / experts

    def gate_up():
        return experts_gate_up(placed, *layer.gate_up, layer.intermediate, counters, rows_per_expert=mean)

    least = floor(gate_up_bytes + 8 * fp8, 8 * tokens * 5760 * 2880)
    yield "gate_up, SwiGLU", least, time_us(gate_up)
    q8 = gate_up()

    def down():
        return experts_down(q8, *layer.down, placed, counters, rows_per_expert=mean)

    yield "down", floor(down_bytes + 4 * (fp8 + row), 8 * tokens * 2880 * 2880), time_us(down)
    y = down()
    yield (
        "combine_norm_quantize",
        floor(6 * row + fp8),
        time_us(lambda: combine_norm_quantize(x, y, placed.rows, routing.expert_weights, layer.attn_norm, 1e-5)),
    )


def gemm_rows(model: str, tokens: int) -> Iterator[torch.Tensor]:
    """Runs each FP8 projection of one layer once: what compiling ahead needs."""
    config = gpt_oss_config(model, 2)
    random = RandomWeights(config, DEVICE, 22)
    layer = random.layer()
    yield gemm_fp8(*quantize_rows(random.normal(tokens, config.hidden_size)), *layer.qkv)
    yield gemm_fp8(*quantize_rows(random.normal(tokens, 4096)), *layer.o)


def window_run(q, k, v, sinks, block_m: int, block_n: int, warps: int) -> Callable[[], object]:
    """`window_attention` with other tiles than those in use."""
    from kernels.triton_ops.window_attention import launch_window_attention

    out = torch.empty_like(q)
    return lambda: launch_window_attention(q, k, v, sinks, out, 128, 0.125, block_m=block_m, block_n=block_n, num_warps=warps)
