"""Times of single decode kernels on a GPU, beside the bytes they must move: one graph over all layers' weights, so that nothing sits in L2.

Each row: what, batch, microseconds a launch, GB/s of necessary bytes, share of the 4.3 TB/s that a device copy reaches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.decode_random import BLOCK_SIZE, randn, random_choices, shuffled_table
from kernels import decode_fused
from kernels.attention_decode import SplitWorkspace, chunk_blocks, launch_full, launch_sliding, num_chunks
from kernels.experts_prefill import experts_down, experts_gate_up
from kernels.moe_decode import launch_experts
from kernels.moe_decode_fp8 import quantize_by_expert
from kernels.sampling_cuda import SamplingRows, SamplingScratch, launch_sample
from kernels.vocabulary import MAX_SCREENED_TOKENS, ScreenScratch, choose_words
from model.config import ModelConfig
from model.decode_cuda import DecodeWeights
from model.sampling import logprob_tables

COPY_GBPS = 4300.0
Row = tuple[str, int, float, float]


def graph_us(launches: list[Callable[[], None]], repeats: int = 15) -> float:
    """Median microseconds a launch when `launches` run back to back in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in launches[:2]:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in launches:
            run()
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times[3:])


def expert_rows(config: ModelConfig, weights: DecodeWeights, batches: tuple[int, ...]) -> Iterator[Row]:
    """Both expert products; bytes: the hit experts' weights."""
    for batch in batches:
        yield from _expert_case(config, weights, batch)


def expert_launch(config: ModelConfig, weights: DecodeWeights, batch: int) -> tuple[Callable[[int], None], float, Tensor]:
    """Returns: a launch of both products of layer i; experts that a layer hits, in the mean; what a launch writes"""
    layers = weights.layers
    ids = random_choices(len(layers), batch, config)
    hit = sum(len(set(choice.flatten().tolist())) for choice in ids) / len(layers)
    x, hidden, out = randn(batch, 2880), randn(batch * 4, 2880), randn(batch, 4, 2880)
    arrived = torch.zeros(2, dtype=torch.int32, device="cuda")

    def both(i: int) -> None:
        launch_experts(x, ids[i], layers[i].experts, hidden, arrived, out, alpha=1.702, limit=7.0)

    return both, hit, out


def _expert_case(config: ModelConfig, weights: DecodeWeights, batch: int) -> Iterator[Row]:
    both, hit, _ = expert_launch(config, weights, batch)
    us = graph_us([partial(both, i) for i in range(len(weights.layers))])
    yield f"both products ({hit:.1f} experts)", batch, us, hit * 270 * 90 * 544


def fp8_expert_rows(config: ModelConfig, weights: DecodeWeights, batches: tuple[int, ...]) -> Iterator[Row]:
    """The FP8 experts as served, from bf16 tokens to bf16 rows, and each of their kernels; bytes: the hit experts' weights."""
    for batch in batches:
        yield from _fp8_case(config, weights, batch)


def _fp8_case(config: ModelConfig, weights: DecodeWeights, batch: int) -> Iterator[Row]:
    experts = [layer.experts for layer in weights.layers]
    ids = random_choices(len(experts), batch, config)
    hit = sum(len(set(choice.flatten().tolist())) for choice in ids) / len(experts)
    x, residual, norm, share = randn(batch, 2880), randn(batch, 2880), randn(2880), torch.rand(batch, 4, device="cuda")
    scratch = experts[0].scratch(batch, 4, "cuda")
    per_expert = [pair[0][0].nbytes for pair in (experts[0].gate_up, experts[0].down)]
    hit_alone, mean = len(set(ids[0].flatten().tolist())), batch * 4 / config.num_experts

    def gate_up(i):
        w = experts[i]
        experts_gate_up(scratch.rows, *w.gate_up, w.intermediate, scratch.counters, rows_per_expert=mean, out=scratch.hidden)

    def down(i):
        experts_down(scratch.hidden, *experts[i].down, scratch.rows, scratch.counters, rows_per_expert=mean, out=scratch.out)

    def combine(i):
        decode_fused.combine_norm(
            scratch.out, ids[0], share, residual, norm, eps=1e-5, first_expert=0, num_local_experts=config.num_experts, normed=x,
            rows=scratch.rows.rows,
        )  # fmt: skip

    runs = [  # each works on what the one before it left
        (
            f"both products fp8 ({hit:.1f} experts)",
            lambda i: experts[i].run(x, ids[i], scratch, alpha=1.702, limit=7.0),
            hit * sum(per_expert),
        ),
        ("fp8 rows by expert", lambda i: quantize_by_expert(x, ids[0], scratch.rows), x.nbytes + scratch.rows.q.nbytes),
        (f"fp8 gate_up ({hit_alone} experts)", gate_up, hit_alone * per_expert[0]),
        (f"fp8 down ({hit_alone} experts)", down, hit_alone * per_expert[1]),
        ("combine_norm of sorted rows", combine, 7 * residual.nbytes),
    ]
    for name, run, nbytes in runs:
        yield name, batch, graph_us([partial(run, i) for i in range(len(experts))]), nbytes


def dense_rows(config: ModelConfig, weights: DecodeWeights) -> Iterator[Row]:
    """QKV, output projection, router, vocabulary, sampling: own kernels and the library's."""
    pool = randn(1024, 2, 8, BLOCK_SIZE, 64)
    for batch in (1, 8, 16, 32, 64, 128):
        yield from _dense_case(config, weights, batch, pool)
        yield from _vocabulary_case(config, weights, batch)


def _dense_case(config: ModelConfig, weights: DecodeWeights, batch: int, pool) -> Iterator[Row]:
    layers, experts = weights.layers, config.num_experts
    x, a, residual, normed, q = (randn(batch, *n) for n in ((2880,), (4096,), (2880,), (2880,), (64, 64)))
    slots, cos_sin = torch.randperm(16384, device="cuda")[:batch].int(), torch.rand(batch, 32, 2, device="cuda")
    qkv, projected, pairs = randn(batch, 5120), randn(batch, 2880), randn(batch, 4, 2880)
    ids, expert_weights = random_choices(1, batch, config)[0], torch.rand(batch, 4, device="cuda")
    logits, arrived = torch.empty(batch, experts, device="cuda"), torch.zeros(16, dtype=torch.int32, device="cuda")

    def norm_route(i):
        w = layers[i]
        decode_fused.norm_route(
            residual, w.mlp_norm, w.router, w.router_bias, slots, eps=1e-5, normed=normed, logits=logits, arrived=arrived, expert_ids=ids,
            expert_weights=expert_weights,
        )  # fmt: skip

    def combine(i):
        decode_fused.combine_norm(
            pairs, ids, expert_weights, residual, layers[i].attn_norm, eps=1e-5, first_expert=0, num_local_experts=experts, normed=normed
        )

    qkv_bytes, o_bytes = 5120 * 2880 * 2, 4096 * 2880 * 2
    runs = [
        ("qkv cublas", lambda i: torch.mm(x, layers[i].qkv.t(), out=qkv), qkv_bytes),
        ("rotate_write", lambda i: decode_fused.launch_rotate_write(qkv, layers[i].qkv_bias, pool, slots, cos_sin, q), 2 * qkv.nbytes),
        ("o cublas", lambda i: torch.mm(a, layers[i].o.t(), out=projected), o_bytes),
        ("bias_residual", lambda i: decode_fused.launch_add_bias_residual(projected, layers[i].o_bias, residual), 3 * residual.nbytes),
        ("norm_route", norm_route, experts * 2880 * 2),
        ("combine_norm", combine, 7 * residual.nbytes),
    ]
    if batch <= decode_fused.MAX_STREAMED_TOKENS:
        runs += [
            ("qkv own", lambda i: decode_fused.launch_qkv(x, layers[i].qkv, layers[i].qkv_bias, pool, slots, cos_sin, q), qkv_bytes),
            ("o own", lambda i: decode_fused.launch_projection(a, layers[i].o, layers[i].o_bias, residual, residual), o_bytes),
        ]
    for name, run, nbytes in runs:
        yield name, batch, graph_us([partial(run, i) for i in range(len(layers))]), nbytes


def _vocabulary_case(config: ModelConfig, weights: DecodeWeights, batch: int) -> Iterator[Row]:
    x, out, head = randn(batch, 2880), torch.empty(batch, config.vocab_size, device="cuda"), weights.vocabulary.weight
    yield "logits cublas", batch, graph_us([lambda: torch.mm(x, head.t(), out_dtype=torch.float32, out=out)] * 3), head.nbytes
    lens = torch.full((batch,), 8192, dtype=torch.int32, device="cuda")
    tokens, scratch, rows = torch.zeros_like(lens), SamplingScratch.allocate(batch, "cuda"), SamplingRows.greedy(batch, "cuda")
    if batch <= MAX_SCREENED_TOKENS:
        screen, own = weights.vocabulary.screen, ScreenScratch.allocate(batch, "cuda")
        for temperature in (0.0, 1.0):
            rows.temperature.fill_(temperature)
            run = partial(choose_words, x, head, screen, rows, lens, bounds=out, scratch=own, tokens=tokens, best=scratch.best)
            yield f"screened words, temperature {temperature:.0f}", batch, graph_us([run] * 3), screen.codes.nbytes
        rows.temperature.fill_(0.0)
    out.normal_()
    yield "greedy", batch, graph_us([lambda: launch_sample(out, rows, lens, tokens, scratch, True)] * 10), out.nbytes
    rows.temperature.fill_(1.0)
    yield "sample", batch, graph_us([lambda: launch_sample(out, rows, lens, tokens, scratch, True)] * 10), out.nbytes
    yield "log-probabilities of all rows", batch, graph_us([partial(logprob_tables, out, tokens, 20)] * 3), out.nbytes
    rows.top_k.fill_(50)
    rows.top_p.fill_(0.95)
    yield "sample top-k top-p", batch, graph_us([lambda: launch_sample(out, rows, lens, tokens, scratch, False)] * 10), out.nbytes


def attention_rows() -> Iterator[Row]:
    """Sliding and full attention over distinct pools; bytes: the keys and values."""
    for batch, context in ((1, 8192), (8, 8192), (32, 8192), (64, 8192), (128, 8192), (1, 32768), (32, 32768), (1, 131072), (32, 1024)):
        yield from _attention_case(batch, context)


def full_case(batch: int, context: int, layers: int = 8):
    """A launch of full attention over pool i, and its operands."""
    blocks = context // BLOCK_SIZE
    pools = [randn(batch * blocks, 2, 8, BLOCK_SIZE, 64) for _ in range(max(1, min(layers, 8 * 8192 * 32 // (batch * context))))]
    q, out, sink = randn(batch, 64, 64), randn(batch, 64, 64), randn(64, dtype=torch.float32)
    lens, table = torch.full((batch,), context, dtype=torch.int32, device="cuda"), shuffled_table(batch, blocks)
    workspace = SplitWorkspace.allocate(batch, 8, batch * context, "cuda")
    workspace.cu_chunks.copy_(torch.arange(batch + 1) * num_chunks(context, chunk_blocks(batch, 8)))

    def full(i):
        pool = pools[i % len(pools)]
        launch_full(q, pool, table, lens, sink, out, workspace, sm_scale=0.125, group=8)

    return full, (q, out, sink, lens, table, pools)


def _attention_case(batch: int, context: int, layers: int = 8) -> Iterator[Row]:
    full, (q, out, sink, lens, table, pools) = full_case(batch, context, layers)
    us = graph_us([partial(full, i) for i in range(layers)])
    yield f"full context {context}", batch, us, batch * context * 2048
    if context == 8192:
        start, near = torch.full_like(lens, context - 128), table[:, -9:].contiguous()

        def sliding(i):
            launch_sliding(q, pools[i % len(pools)], near, start, lens, sink, out, window=128, sm_scale=0.125, group=8)

        yield "sliding", batch, graph_us([partial(sliding, i) for i in range(layers)]), batch * 128 * 2048
