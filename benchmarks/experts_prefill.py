"""The experts of prefill in our own kernels beside DeepGEMM and the SwiGLU pass: right on a GPU, and how fast, in one run.

    python3 benchmarks/experts_prefill.py --out DIR

Everything runs in children with a time limit, so that a kernel that hangs costs one part only. Rounds of 0.3 s alternate between the two, long
enough for the card to come to its power limit; random routing, fresh random inputs. Writes DIR/experts_prefill.txt and .json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.prefill_checks import calc_diff, poison_memory
from benchmarks.prefill_random import RandomWeights, gpt_oss_config
from kernels import cuda_library
from kernels.experts_prefill import NAME, down_order, empty_counters, experts_down, experts_gate_up, gate_up_order, order_rows
from kernels.gemm_fp8 import grouped_gemm_fp8
from kernels.moe_prefill import ExpertRows, permute_rows, swiglu_quantize
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from kernels.reference import (
    FP8_BLOCK,
    fp8_dequant_blocks_ref,
    fp8_dequant_rows_ref,
    fp8_quant_hidden_ref,
    hidden_scale,
    swiglu_ref,
)
from kernels.router import Routing, _ranks_ref
from model.prefill_weights import Fp8Weight

DEVICE = "cuda"
ROUND_S, ROUNDS = 0.3, 3
ALIGNMENT = 8
CONFIGURATIONS = (("120b", (8192, 1024, 32768)), ("20b", (8192, 1024)))
Step = tuple[str, Callable[[], object]]


class Experts:
    """One layer's experts in both row orders."""

    def __init__(self, model: str, seed: int):
        self.config = gpt_oss_config(model, 2)
        random = RandomWeights(self.config, DEVICE, seed)
        self.gate_up, _ = random.experts(2 * self.config.intermediate_size, self.config.hidden_size, 0.2)
        self.down, _ = random.experts(self.config.hidden_size, self.config.intermediate_size, 0.2)
        self.ordered_gate_up = Fp8Weight(order_rows(self.gate_up.values, gate_up_order(self.gate_up.values.shape[1])), self.gate_up.scales)
        self.ordered_down = Fp8Weight(order_rows(self.down.values, down_order(self.down.values.shape[1])), self.down.scales)
        self.counters = empty_counters(DEVICE)

    def routing(self, tokens: int, pattern: str = "random") -> Routing:
        """pattern: random, skewed (an expert's chances fall with its number), empty (half the experts) or one (every token's first choice is
        expert 5)."""
        scores = torch.rand(tokens, self.config.num_experts)
        if pattern == "skewed":
            scores = scores.clamp(min=1e-9).log() / torch.linspace(3.0, 0.3, self.config.num_experts)
        if pattern == "empty":
            scores[:, ::2] -= 100.0
        if pattern == "one":
            scores[:, 5] += 100.0
        ids = scores.topk(self.config.experts_per_token, dim=1).indices.int()
        counts = torch.zeros(self.config.num_experts, dtype=torch.int32)
        ranks = _ranks_ref(ids, counts, 0, tokens)
        weights = torch.full(ids.shape, 0.25)
        return Routing(*(t.to(DEVICE) for t in (ids, weights, ranks, counts)))

    def rows(self, tokens: int, routing: Routing, alignment: int) -> ExpertRows:
        x = (torch.randn(tokens, self.config.hidden_size, device=DEVICE)).bfloat16()
        return permute_rows(*quantize_rows(x, bias_columns=BIAS_COLUMNS), routing, alignment=alignment)

    def ours(self, rows: ExpertRows, mode: int | None = None) -> tuple[tuple[Tensor, Tensor], Tensor]:
        width = self.config.intermediate_size
        q = experts_gate_up(rows, *self.ordered_gate_up, width, self.counters, bias_columns=BIAS_COLUMNS, mode=mode)
        y = experts_down(q, *self.ordered_down, rows, self.counters, mode=mode)
        return (q, torch.full((q.shape[0], q.shape[1] // FP8_BLOCK), hidden_scale(7.0), device=DEVICE)), y

    def theirs(self, rows: ExpertRows) -> tuple[tuple[Tensor, Tensor], Tensor]:
        gate_up = grouped_gemm_fp8(rows.q, rows.scales, *self.gate_up, rows)
        h = swiglu_quantize(gate_up, rows, bias_columns=BIAS_COLUMNS)
        return h, grouped_gemm_fp8(*h, *self.down, rows)

    def steps_of_ours(self, rows: ExpertRows, mode: int | None = None) -> list[Step]:
        (q, _), _ = self.ours(rows, mode)
        width = self.config.intermediate_size
        return [
            ("gate_up", lambda: experts_gate_up(rows, *self.ordered_gate_up, width, self.counters, bias_columns=BIAS_COLUMNS, mode=mode)),
            ("down", lambda: experts_down(q, *self.ordered_down, rows, self.counters, mode=mode)),
        ]

    def steps_of_theirs(self, rows: ExpertRows) -> list[Step]:
        gate_up = grouped_gemm_fp8(rows.q, rows.scales, *self.gate_up, rows)
        h = swiglu_quantize(gate_up, rows, bias_columns=BIAS_COLUMNS)
        return [
            ("gate_up", lambda: grouped_gemm_fp8(rows.q, rows.scales, *self.gate_up, rows)),
            ("swiglu", lambda: swiglu_quantize(gate_up, rows, bias_columns=BIAS_COLUMNS)),
            ("down", lambda: grouped_gemm_fp8(*h, *self.down, rows)),
        ]


def exact_product(q: Tensor, scales: Tensor, weight: Fp8Weight, rows: ExpertRows, expert: int) -> tuple[Tensor, slice]:
    """One expert's product in fp32. Returns: [its tokens, R] and where its rows lie"""
    ends = rows.ends.tolist()
    start = -(-ends[expert - 1] // rows.alignment) * rows.alignment if expert else 0
    where = slice(start, ends[expert])
    count, columns = weight.values.shape[1:]
    padded = torch.nn.functional.pad(weight.values[expert].float(), (0, 0, 0, -count % FP8_BLOCK))
    dense = fp8_dequant_blocks_ref(padded, weight.scales[expert], count, columns)
    return fp8_dequant_rows_ref(q[where], scales[where], columns) @ dense.t(), where


def check(model: str, mode: int) -> str:
    """Both ways against fp32 at true shapes, expert by expert, with poisoned memory. Returns: a line"""
    experts = Experts(model, int(time.time()))
    worst: dict[str, float] = {}
    for tokens, pattern in ((1, "random"), (77, "one"), (300, "random"), (2879, "empty"), (8192, "random")):
        routing = experts.routing(tokens, pattern)
        counts = routing.counts.tolist()
        for name, run, alignment in ((f"mode {mode}", partial(experts.ours, mode=mode), ALIGNMENT),):
            rows = experts.rows(tokens, routing, alignment)
            poison_memory()
            h, y = run(rows)
            torch.cuda.synchronize()
            busiest = sorted(range(len(counts)), key=counts.__getitem__)
            for expert in {5, next(e for e in busiest if counts[e] > 0), *busiest[-2:]}:
                if counts[expert] == 0:
                    continue
                product, where = exact_product(rows.q, rows.scales, experts.gate_up, rows, expert)
                width = experts.config.intermediate_size
                q = fp8_quant_hidden_ref(swiglu_ref(product), hidden_scale(7.0), BIAS_COLUMNS)
                wanted = q[:, :width].float() * hidden_scale(7.0)
                got = fp8_dequant_rows_ref(h[0][where], h[1][where], width)
                label = f"{model} T{tokens} {pattern} expert {expert}"
                errors = {"hidden": calc_diff(got, wanted)}
                down, _ = exact_product(*h, experts.down, rows, expert)
                errors["down"] = calc_diff(y[where].float(), down)
                for what, error in errors.items():
                    assert error < 1e-3, f"{name} {label}: {what} differs by {error:.2e}"
                    worst[f"{name} {what}"] = max(worst.get(f"{name} {what}", 0.0), error)
                ones = fp8_dequant_rows_ref(h[0][where], h[1][where], width + BIAS_COLUMNS)[:, width:]
                assert bool((ones == 1.0).all()), f"{name} {label}: bias columns are not 1"
        rows = experts.rows(tokens, routing, ALIGNMENT)
        used = routing_rows(rows)
        first = experts.ours(rows, mode)
        for _ in range(3):
            assert torch.equal(first[1][used], experts.ours(rows, mode)[1][used]), "two launches differ"
    return f"ok   {model} against fp32 (1 - cosine-like, worst): " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items())


def routing_rows(rows: ExpertRows) -> Tensor:
    return rows.rows[rows.rows >= 0].long()


def compile_theirs() -> str:
    for model, lengths in CONFIGURATIONS:
        experts = Experts(model, 1)
        for tokens in lengths:
            for alignment in (128, 64) if tokens == 1024 else (128,):
                experts.theirs(experts.rows(tokens, experts.routing(tokens), alignment))
    torch.cuda.synchronize()
    return "ok   DeepGEMM compiled"


def round_us(steps: list[Step]) -> dict[str, float]:
    """Mean us of each step over a round of `ROUND_S`, back to back."""
    for _, run in steps:
        run()
    torch.cuda.synchronize()
    events: list[list[torch.cuda.Event]] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < ROUND_S:
        for _ in range(8):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
            marks[0].record()
            for mark, (_, run) in zip(marks[1:], steps, strict=True):
                run()
                mark.record()
            events.append(marks)
        torch.cuda.synchronize()
    kept = events[len(events) // 4 :]
    return {name: sum(m[i].elapsed_time(m[i + 1]) for m in kept) / len(kept) * 1e3 for i, (name, _) in enumerate(steps)}


def time_model(model: str, lengths: tuple[int, ...], say: Callable[[str], None], record: Callable[[dict], None]) -> None:
    experts = Experts(model, int(time.time()))
    config = experts.config
    flops = 2 * config.experts_per_token * 3 * config.hidden_size * config.intermediate_size
    for tokens in lengths:
        routing = experts.routing(tokens)
        ways: dict[str, list[Step]] = {"DeepGEMM, rows by 128": experts.steps_of_theirs(experts.rows(tokens, routing, 128))}
        if tokens == 1024:
            ways["DeepGEMM, rows by 64"] = experts.steps_of_theirs(experts.rows(tokens, routing, 64))
        ways["ours"] = experts.steps_of_ours(experts.rows(tokens, routing, ALIGNMENT))
        for mode in (0, 1, 2) if tokens == 1024 else (1, 2):
            ways[f"ours, mode {mode}"] = experts.steps_of_ours(experts.rows(tokens, routing, ALIGNMENT), mode)
        if tokens == 8192:
            skewed = experts.routing(tokens, "skewed")
            ways["DeepGEMM, skewed"] = experts.steps_of_theirs(experts.rows(tokens, skewed, 128))
            ways["ours, skewed"] = experts.steps_of_ours(experts.rows(tokens, skewed, ALIGNMENT))
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, steps in ways.items():
                seen[name].append(round_us(steps))
        for name, rounds in seen.items():
            mean = {step: sum(r[step] for r in rounds) / len(rounds) for step in rounds[0]}
            total = sum(mean.values())
            parts = ", ".join(f"{step} {us:.0f}" for step, us in mean.items())
            say(f"{model} {tokens:6d} {name:22s} {total:7.0f} us a layer ({parts}), {flops * tokens / total / 1e6:5.0f} useful TFLOP/s")
            record(
                {"model": f"gpt-oss-{model}", "tokens": tokens, "way": name, "us": {k: round(v, 1) for k, v in mean.items()},
                 "total_us": round(total, 1), "rounds": [{k: round(v, 1) for k, v in r.items()} for r in rounds]}
            )  # fmt: skip


def parts() -> dict[str, tuple[Callable[[Callable[[str], None], Callable[[dict], None]], None], float]]:
    """What a child can do, and the seconds it may take."""
    table = {
        "build": (lambda say, record: say(f"ok   built {cuda_library.build(NAME).name}"), 90.0),
        "deepgemm": (lambda say, record: say(compile_theirs()), 90.0),
    }
    for model, lengths in CONFIGURATIONS:
        for mode in (2, 1, 0):
            table[f"check-{model}-{mode}"] = (lambda say, record, m=model, mode=mode: say(check(m, mode)), 30.0)
    for model, lengths in CONFIGURATIONS:
        table[f"time-{model}"] = (lambda say, record, m=model, lens=lengths: time_model(m, lens, say, record), 40.0)
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
    except Exception as exc:  # noqa: BLE001 - outermost: the table must say what failed
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
    names = list(parts())
    checks = [name for name in names if name.startswith("check")]
    for group in (names[:2], checks[:3], checks[3:], *([name] for name in names if name.startswith("time"))):
        begin = time.perf_counter()
        running = {
            name: subprocess.Popen([sys.executable, __file__, "--out", str(args.out), "--part", name]) for name in group
        }  # fmt: skip
        for name, process in running.items():
            try:
                process.wait(max(parts()[name][1] - (time.perf_counter() - begin), 1.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                with (args.out / "experts_prefill.txt").open("a") as file:
                    file.write(f"FAIL {name}: stopped after {parts()[name][1]:.0f} s\n")
        print(f"   [{', '.join(group)}: {time.perf_counter() - begin:.1f} s]", flush=True)
    print("\n==== summary\n" + (args.out / "experts_prefill.txt").read_text())


if __name__ == "__main__":
    main()
