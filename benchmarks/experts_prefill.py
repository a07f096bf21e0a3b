"""The experts of prefill on a GPU: right however a cluster divides the work, and how fast, in one run.

    python3 benchmarks/experts_prefill.py --out DIR

Everything runs in children with a time limit, so that a kernel that hangs costs one part only. Rounds of 0.3 s alternate between the
ways, long enough for the card to come to its power limit; fresh random inputs. Writes DIR/experts_prefill.txt and .jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.prefill_checks import check_experts
from benchmarks.prefill_random import RandomWeights, gpt_oss_config
from kernels import cuda_library
from kernels.experts_prefill import NAME, empty_counters, experts_down, experts_gate_up, split_tokens
from kernels.moe_prefill import ExpertRows, permute_rows
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from kernels.router import Routing, _ranks_ref
from model.config import ModelConfig
from model.prefill_weights import PrefillLayer

DEVICE = "cuda"
ROUND_S, ROUNDS = 0.3, 3
LENGTHS = {"120b": (8192, 1024, 2048, 4096, 32768), "20b": (8192, 1024, 2048, 4096)}
Step = tuple[str, Callable[[], object]]


def routing_of(config: ModelConfig, tokens: int, *, is_skewed: bool) -> Routing:
    """Random choices; skewed: an expert's chances fall tenfold from the first to the last."""
    scores = torch.rand(tokens, config.num_experts)
    if is_skewed:
        scores = scores.clamp(min=1e-9).log() / torch.linspace(3.0, 0.3, config.num_experts)
    ids = scores.topk(config.experts_per_token, dim=1).indices.int()
    counts = torch.zeros(config.num_experts, dtype=torch.int32)
    ranks = _ranks_ref(ids, counts, 0, tokens)
    return Routing(*(t.to(DEVICE) for t in (ids, torch.full(ids.shape, 0.25), ranks, counts)))


def steps_of(layer: PrefillLayer, rows: ExpertRows, mean: float) -> list[Step]:
    counters = empty_counters(DEVICE)
    q = experts_gate_up(rows, *layer.gate_up, layer.intermediate, counters, rows_per_expert=mean)
    return [
        ("gate_up", lambda: experts_gate_up(rows, *layer.gate_up, layer.intermediate, counters, rows_per_expert=mean)),
        ("down", lambda: experts_down(q, *layer.down, rows, counters, rows_per_expert=mean)),
    ]


def round_us(steps: list[Step]) -> dict[str, float]:
    """Mean us of each step over a round of `ROUND_S`, back to back."""
    for _, run in steps:
        run()
    torch.cuda.synchronize()
    events: list[list[torch.cuda.Event]] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < ROUND_S:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        marks[0].record()
        for mark, (_, run) in zip(marks[1:], steps, strict=True):
            run()
            mark.record()
        events.append(marks)
        if len(events) % 16 == 0:
            marks[-1].synchronize()
    torch.cuda.synchronize()
    kept = events[len(events) // 4 :]
    return {name: sum(m[i].elapsed_time(m[i + 1]) for m in kept) / len(kept) * 1e3 for i, (name, _) in enumerate(steps)}


def time_model(model: str, say: Callable[[str], None], record: Callable[[dict], None]) -> None:
    config = gpt_oss_config(model, 2)
    layer = RandomWeights(config, DEVICE, int(time.time())).layer()
    flops = 2 * config.experts_per_token * 3 * config.hidden_size * config.intermediate_size
    for tokens in LENGTHS[model]:
        for is_skewed in (False, True) if tokens == 8192 else (False,):
            x = torch.randn(tokens, config.hidden_size, device=DEVICE).bfloat16()
            rows = permute_rows(*quantize_rows(x, bias_columns=BIAS_COLUMNS), routing_of(config, tokens, is_skewed=is_skewed))
            served = split_tokens(config.experts_per_token * tokens / config.num_experts)
            ways = {split_tokens(mean): steps_of(layer, rows, mean) for mean in (1.0, 1000.0)}
            seen: dict[bool, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(ROUNDS):
                for way, steps in ways.items():
                    seen[way].append(round_us(steps))
            for way, rounds in seen.items():
                mean = {step: sum(r[step] for r in rounds) / len(rounds) for step in rounds[0]}
                total = sum(mean.values())
                parts = ", ".join(f"{step} {us:.0f}" for step, us in mean.items())
                name = (
                    ("weight rows" if way else "tokens")
                    + " shared"
                    + (", served" if way == served else "")
                    + (", skewed" if is_skewed else "")
                )
                say(f"{model} {tokens:6d} {name:36s} {total:7.0f} us a layer ({parts}), {flops * tokens / total / 1e6:5.0f} useful TFLOP/s")
                record(
                    {"model": f"gpt-oss-{model}", "tokens": tokens, "shares_weight_rows": way, "is_served": way == served,
                     "is_skewed": is_skewed, "us": {k: round(v, 1) for k, v in mean.items()}, "total_us": round(total, 1)}
                )  # fmt: skip


def parts() -> dict[str, tuple[Callable[[Callable[[str], None], Callable[[dict], None]], None], float]]:
    """What a child can do, and the seconds it may take."""
    table = {"build": (lambda say, record: say(f"ok   built {cuda_library.build(NAME).name}"), 90.0)}
    for model in LENGTHS:
        table[f"check {model}"] = (lambda say, _, model=model: say(f"ok   {check_experts(model)}"), 30.0)
    for model in LENGTHS:
        table[f"time {model}"] = (lambda say, record, model=model: time_model(model, say, record), 40.0)
    return table


def child(part: str, out: Path) -> None:
    def append(name: str, line: str) -> None:
        with (out / name).open("a") as file:
            file.write(line + "\n")

    def say(line: str) -> None:
        print(line, flush=True)
        append("experts_prefill.txt", line)

    try:
        parts()[part][0](say, lambda fields: append("experts_prefill.jsonl", json.dumps(fields)))
    except Exception as exc:
        traceback.print_exc()
        say(f"FAIL {part}: {type(exc).__name__}: {str(exc)[:300]}")
        raise SystemExit(1) from exc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--part", help="run one part in this process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part:
        child(args.part, args.out)
        return
    for name, (_, limit_s) in parts().items():
        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, __file__, "--out", str(args.out), "--part", name])
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            with (args.out / "experts_prefill.txt").open("a") as file:
                file.write(f"FAIL {name}: stopped after {limit_s:.0f} s\n")
        print(f"   [{name}: {time.perf_counter() - begin:.1f} s]", flush=True)
    print("\n==== summary\n" + (args.out / "experts_prefill.txt").read_text())


if __name__ == "__main__":
    main()
