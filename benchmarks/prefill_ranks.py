"""Prefill on several GPUs of one host: one process for each rank, joined as a served group is; correctness, then times of each layout.

    python3 benchmarks/prefill_ranks.py --tp 2 --out DIR

Random weights of the true shapes as in `benchmarks/prefill.py`; what ranks share (embedding, norms, routers, router logits) is the same on
all of them. Times are rank 0's, from a CPU batch to its logits, all ranks starting together; beside them until the host had launched all of
it, and the profiler's sums of kernel times. Writes DIR/prefill_ranks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.prefill_random import BLOCK_SIZE, RandomWeights, gpt_oss_config, random_prompt, uniform_logits
from common.rank_spec import RankSpec
from kernels import cuda_library
from kernels.experts_prefill import NAME
from kernels.peers import PeerLayout, Peers
from kernels.router import fold_router
from model.batch import StepBatch
from model.config import ModelConfig
from model.group import open_group
from model.kv_cache import KVCache
from model.layout import cut_for_rank
from model.parallel import LocalGroup, ParallelGroup
from model.peer_memory import open_peers
from model.prefill_cuda import CudaPrefill
from model.prefill_graph import PrefillGraph
from model.prefill_weights import SERVED_PROJECTIONS, Fp8Weight, PrefillLayer, PrefillWeights, Projections

RUNS, WARM = 7, 2
LIMIT_S = 240
CHECKED_LAYERS, CHECKED_TOKENS, CHECKED_PROMPTS = 3, 2304, 8
NOISE = "one rank, output projection rounded before it is added"


def rank_weights(
    config: ModelConfig, *, tp: int, ep: int, rank: int, device: str, unique_layers: int, projections: Projections = SERVED_PROJECTIONS
) -> PrefillWeights:
    """One rank's share of random weights; the layers repeat `unique_layers` distinct ones."""
    cut = cut_for_rank(config, tp=tp, ep=ep, rank=rank, granule=128)
    local = replace(
        config, num_qo_heads=len(cut.qo_heads), num_kv_heads=len(cut.kv_heads), num_experts=len(cut.experts),
        intermediate_size=len(cut.intermediate),
    )  # fmt: skip
    own, shared = RandomWeights(local, device, 100 + rank), RandomWeights(config, device, 7)
    ones = torch.ones(config.hidden_size, dtype=torch.bfloat16, device=device)

    def layer() -> PrefillLayer:
        router = shared.normal(config.num_experts, config.hidden_size, std=0.02)
        return replace(
            own.layer(projections), attn_norm=ones, mlp_norm=ones, o_bias=0 * ones, router=fold_router(router, ones),
            router_bias=shared.normal(config.num_experts, std=0.1), first_expert=cut.experts.start,
        )  # fmt: skip

    distinct = [layer() for _ in range(unique_layers)]
    layers = tuple(distinct[i % unique_layers] for i in range(config.num_layers))
    return PrefillWeights(
        shared.normal(config.vocab_size, config.hidden_size), layers, ones, own.normal(len(cut.vocab), config.hidden_size, std=0.02)
    )


def slice_of(weights: PrefillWeights, config: ModelConfig, tp: int, rank: int) -> PrefillWeights:
    """A rank's part of one GPU's weights with whole experts on each rank: the same numbers, so that results can be compared."""
    cut, head = cut_for_rank(config, tp=tp, ep=tp, rank=rank, granule=128), config.head_dim
    query, kv = len(cut.qo_heads) * head, config.num_kv_heads // tp * head
    first_q, first_k = cut.qo_heads.start * head, (config.num_qo_heads + cut.kv_heads.start) * head
    first_v = first_k + config.num_kv_heads * head

    def part(layer: PrefillLayer) -> PrefillLayer:
        rows = [slice(first_q, first_q + query), slice(first_k, first_k + kv), slice(first_v, first_v + kv)]
        assert isinstance(layer.qkv, torch.Tensor)
        assert isinstance(layer.o, torch.Tensor)
        experts = slice(cut.experts.start, cut.experts.stop)
        return replace(
            layer, qkv=torch.cat([layer.qkv[r] for r in rows]), qkv_bias=torch.cat([layer.qkv_bias[r] for r in rows]),
            sinks=layer.sinks[cut.qo_heads.start : cut.qo_heads.stop].contiguous(),
            o=layer.o[:, first_q : first_q + query].contiguous(),
            gate_up=Fp8Weight(*(t[experts] for t in layer.gate_up)), down=Fp8Weight(*(t[experts] for t in layer.down)),
            first_expert=cut.experts.start, num_kv_heads=len(cut.kv_heads),
        )  # fmt: skip

    vocab = slice(cut.vocab.start, cut.vocab.stop)
    return PrefillWeights(weights.embed, tuple(part(layer) for layer in weights.layers), weights.norm, weights.lm_head[vocab])


def check_group(
    config: ModelConfig, group: ParallelGroup, device: str, tokens: int, least_piece_tokens: int, peers: Peers | None = None
) -> dict[str, float] | None:
    """Logits of the group against rank 0 alone with the same weights: over its collectives and over `peers`, on GPUs also out of a graph.

    Beside them `NOISE`: one rank against itself, where one sum of a layer is rounded at another place. FP8 experts make random layers
    amplify such a difference, so that this alone tells how far apart right results lie; a group rounds two sums of a layer elsewhere.
    Returns: on rank 0 each way's cosine, over all prompts' logits
    """
    whole = RandomWeights(config, device, 5).model(projections=SERVED_PROJECTIONS)
    prompts = [random_prompt(config, tokens, seed) for seed in range(CHECKED_PROMPTS)]
    blocks, longest = prompts[0][1], tokens + 100
    offset = uniform_logits(config, longest, device, 2)

    def logits(
        weights: PrefillWeights, ranks: ParallelGroup, over: Peers | None, in_graph: bool, adds_output: bool = True
    ) -> torch.Tensor | None:
        prefill = CudaPrefill(
            config, weights, ranks, block_size=BLOCK_SIZE, device=device, max_positions=longest, least_piece_tokens=least_piece_tokens,
            peers=over,
        )  # fmt: skip
        prefill.logit_offset = offset
        prefill.adds_output &= adds_output
        kv = KVCache(config.kv_geometry(BLOCK_SIZE, "bfloat16"), ranks.size, ranks.rank, blocks, blocks, device)
        forward: Callable[[StepBatch], torch.Tensor | None] = partial(prefill.forward, kv=kv)
        if in_graph:
            with torch.no_grad():
                forward = PrefillGraph(prefill, longest, prompts[0][0], kv).forward
        rows = []
        for batch, _ in prompts:
            row = forward(batch)
            rows.append(None if row is None else row.cpu())
        prefill.check_ranks()
        known = [row for row in rows if row is not None]
        return torch.cat(known) if known else None

    mine = slice_of(whole, config, group.size, group.rank)
    graphs = (False, True) if device == "cuda" else (False,)
    ways = [(over, in_graph) for over in dict.fromkeys((None, peers)) for in_graph in graphs]
    got = [logits(mine, group, over, in_graph) for over, in_graph in ways]
    if group.rank > 0:
        return None
    alone = logits(whole, LocalGroup(), None, False)
    named = {
        f"{'peers' if over is not None else 'collectives'}, {'graph' if in_graph else 'launched'}": each
        for (over, in_graph), each in zip(ways, got, strict=True)
    } | {NOISE: logits(whole, LocalGroup(), None, False, adds_output=False)}
    return {name: _cosine(each, alone) for name, each in named.items()}


def _cosine(got: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    assert got is not None
    assert expected is not None
    return float(torch.nn.functional.cosine_similarity(got.flatten().double(), expected.flatten().double(), dim=0))


def is_one_rank(cosines: dict[str, float]) -> bool:
    """Whether the group lies at most twice as far from one rank as its own rounding does, or within what fp32 sums leave."""
    return 1 - min(cosines.values()) <= max(2 * (1 - cosines[NOISE]), 1e-5)


def time_layout(
    model: str, tokens: int, group: ParallelGroup, ep: int, peers: Peers | None, layers: int | None, unique: int
) -> Iterator[dict]:
    """Out of a graph: sums over the group's collectives, in one piece and in two, and over `peers`; over those launched too."""
    config = gpt_oss_config(model, layers)
    weights = rank_weights(config, tp=group.size, ep=ep, rank=group.rank, device="cuda", unique_layers=unique)
    kv_blocks = -(-tokens // BLOCK_SIZE)
    kv = KVCache(config.kv_geometry(BLOCK_SIZE, "bfloat16"), group.size, group.rank, kv_blocks, kv_blocks, "cuda")
    offset = uniform_logits(config, tokens, "cuda", 2)
    prompts = [random_prompt(config, tokens, seed)[0] for seed in range(RUNS + WARM)]
    ways = [(peers, 1, True), (peers, 1, False)] if peers is not None else []
    for over, count, in_graph in [*ways, (None, 1, True), (None, 2, True)]:
        prefill = CudaPrefill(
            config, weights, group, block_size=BLOCK_SIZE, device="cuda", max_positions=tokens, pieces=count, peers=over
        )  # fmt: skip
        prefill.logit_offset = offset
        forward: Callable[[StepBatch], torch.Tensor | None] = partial(prefill.forward, kv=kv)
        if in_graph:
            with torch.no_grad():
                forward = PrefillGraph(prefill, tokens, prompts[0], kv).forward
        times, hosts = [], []
        for prompt in prompts:
            group.all_reduce(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()
            start = time.perf_counter()
            logits = forward(prompt)
            hosts.append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
            assert logits is None or bool(logits.isfinite().all()), "logits are not finite"
        kept = sorted(times[WARM:])
        yield {
            "model": f"gpt-oss-{model}", "layout": f"tp{group.size}" + (f"-ep{ep}" if ep > 1 else ""), "tokens": tokens, "pieces": count,
            "graph": in_graph, "sums": "peers" if over is not None else "nccl",
            "median_ms": round(statistics.median(kept), 3), "min_ms": round(kept[0], 3), "max_ms": round(kept[-1], 3), "runs": len(kept),
            "projections": SERVED_PROJECTIONS, "host_ms": round(statistics.median(hosts[WARM:]), 3), **_device_ms(forward, prompts[0]),
        }  # fmt: skip


def _device_ms(forward: Callable[[StepBatch], object], prompt: StepBatch) -> dict[str, float]:
    """Time of all kernels of one run, and of NCCL's, which include the wait for the other ranks."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward(prompt)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spent = {"kernels_ms": kernels, "nccl_ms": [event for event in kernels if "nccl" in event.name.lower()]}
    return {name: round(sum(event.device_time for event in events) / 1e3, 3) for name, events in spent.items()}


def _open_peers(group: ParallelGroup, tokens: int) -> Peers | None:
    if group.size != 2:
        return None
    layout = PeerLayout(group.size, tokens, gpt_oss_config("120b").hidden_size, 0)
    return open_peers(group, layout, torch.zeros(1, dtype=torch.int32, device="cuda"), timeout_s=120, exchange="cuda")


def rank_main(args: argparse.Namespace) -> None:
    spec = RankSpec(
        "bench", "g", "prefill", "", args.tp, args.tp, args.rank, args.rendezvous, 1, bytes.fromhex(args.key),
        device="cuda", weights="fp8",
    )  # fmt: skip
    links = open_group(spec)
    group = links.compute
    try:
        peers = _open_peers(group, args.tokens)
        cosines = check_group(gpt_oss_config(args.model, CHECKED_LAYERS), group, "cuda", CHECKED_TOKENS, 1024, peers)
        if cosines is not None:
            print("RESULT " + json.dumps({"check": "cosine to one rank alone", **cosines, "ok": is_one_rank(cosines)}), flush=True)
        for ep in (args.tp, 1):
            for result in time_layout(args.model, args.tokens, group, ep, peers, None, args.layers_unique):
                if args.rank == 0:
                    print("RESULT " + json.dumps(result), flush=True)
    finally:
        links.close()


def run_group(model: str, tp: int, tokens: int, unique: int, on_result: Callable[[dict], None]) -> None:
    """Starts a process for each rank, each seeing its own GPU; `on_result` gets what rank 0 measures as it comes, and at the end the ranks
    that failed or did not end in time, whose last words go to stderr."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, __file__, "--tp", str(tp), "--model", model, "--tokens", str(tokens), "--layers-unique", str(unique),
            "--rendezvous", rendezvous, "--key", os.urandom(32).hex(),
        ]  # fmt: skip
        logs = [open(Path(folder) / f"rank{rank}.log", "w+") for rank in range(tp)]  # noqa: SIM115 - closed below
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], stdout=logs[rank], stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)},
            )
            for rank in range(tp)
        ]  # fmt: skip
        deadline, told = time.monotonic() + LIMIT_S, 0
        is_over = False
        while not is_over:
            is_over = all(process.poll() is not None for process in ranks) or time.monotonic() > deadline
            is_over |= any(process.poll() not in (None, 0) for process in ranks)
            lines = (Path(folder) / "rank0.log").read_text().split("\n")[:-1]  # whole ones
            for line in lines[told:]:
                if line.startswith("RESULT "):
                    on_result(json.loads(line.removeprefix("RESULT ")))
            told = len(lines)
            time.sleep(0.2)
        failed = [rank for rank, process in enumerate(ranks) if process.poll() != 0]
        for process in ranks:
            process.kill()
            process.wait()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
            log.close()
    if failed:
        sys.stderr.write("\n".join(f"== rank {rank}\n{texts[rank][-3000:]}" for rank in failed) + "\n")
        on_result({"failed_ranks": failed})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--model", default="120b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers-unique", type=int, default=4, help="reuse the weights of this many distinct layers")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--rank", type=int, help="internal: this process is a rank")
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--key", default="")
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
    else:
        for name in (NAME, "peers", "device_memory"):
            cuda_library.build(name)
        args.out.mkdir(parents=True, exist_ok=True)
        results: list[dict] = []

        def keep(result: dict) -> None:
            print(result, flush=True)
            results.append(result)
            (args.out / "prefill_ranks.json").write_text(json.dumps(results, indent=1) + "\n")

        run_group(args.model, args.tp, args.tokens, args.layers_unique, keep)


if __name__ == "__main__":
    main()
