"""What the prefill forward might do next, measured beside what it does: one run, one short table at the end.

    python3 benchmarks/prefill_next.py --out DIR            one GPU
    python3 benchmarks/prefill_next.py --out DIR --tp 2     and the layouts over two

Order: FlashInfer and the GEMMs compile in children, beside them every op of the forward runs next to its twin at odd sizes
(`prefill_shadow.py`); then single kernels; then whole models, variants between two runs of what is served, so that a drift of
clocks shows.
Random weights, four distinct layers. Writes DIR/prefill_next.txt and DIR/prefill_next.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.prefill_checks import check_rows, normal, poison_memory, random_routing
from benchmarks.prefill_kernels import time_us
from benchmarks.prefill_random import BLOCK_SIZE, RandomWeights, gpt_oss_config, make_cache, random_prompt, uniform_logits
from benchmarks.prefill_ranks import run_group
from benchmarks.prefill_variants import WindowAttention, fast_swiglu, packed_window, permute_and_zero, swiglu_and_zero, tiled_window, using
from kernels.attention_prompt import window_attention
from kernels.moe_prefill import swiglu_quantize
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from model.batch import StepBatch
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from model.prefill_cuda import CudaPrefill
from model.prefill_graph import PrefillGraph
from model.prefill_weights import PrefillWeights

RUNS, WARM, DISTINCT_LAYERS = 5, 2, 4
SHADOWED = (0, 1)  # sets of sizes in `prefill_shadow.py`: those whose GEMMs compile in seconds
HERE = Path(__file__).parent
GRAPH_TOKENS = 2048
WINDOWS: dict[str, Callable[[], WindowAttention]] = {
    **{
        f"packed {t} tokens, {n} keys, {w} warps": partial(packed_window, t, n, w)
        for t, n, w in ((16, 32, 4), (16, 64, 4), (32, 32, 8), (32, 64, 8))
    },
    **{f"one head {m}x{n}, {w} warps": partial(tiled_window, m, n, w) for m, n, w in ((128, 64, 8), (64, 64, 4))},
}


class Report:
    def __init__(self, out: Path):
        self._out = out
        self.table: list[str] = []
        self.records: list[dict] = []

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.table.append(line)
        (self._out / "prefill_next.txt").write_text("\n".join(self.table) + "\n")

    def record(self, **fields: object) -> None:
        self.records.append(fields)
        (self._out / "prefill_next.json").write_text(json.dumps(self.records, indent=1) + "\n")

    def section(self, name: str, run: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            run()
        except Exception as exc:  # noqa: BLE001 - outermost: one section must not end the others
            traceback.print_exc()
            self.say(f"FAIL {name}: {type(exc).__name__}: {str(exc)[:200]}")
        torch.cuda.empty_cache()
        print(f"   [{name}: {time.perf_counter() - start:.1f} s]", flush=True)


def window_kernels(report: Report) -> str:
    """Times every tile at 8,192 tokens, checks it against the one in use. Returns: the name of the fastest that is right"""
    q, k, v, sinks = normal(8192, 64, 64), normal(8192, 8, 64), normal(8192, 8, 64), torch.randn(64, device="cuda")
    wanted = window_attention(q, k, v, sinks, 128).float()
    served = time_us(lambda: window_attention(q, k, v, sinks, 128))
    report.say(f"sliding attention, 8,192 tokens: in use {served:.0f} us (predicted: best packed 110)")
    times = {"in use": served}
    for name, make in WINDOWS.items():
        attend = make()
        poison_memory()
        got = attend(q, k, v, sinks, 128).float()
        odd = attend(q[:77], k[:200], v[:200], sinks, 128).float()
        odd_wanted = window_attention(q[:77], k[:200], v[:200], sinks, 128).float()
        error = float((got - wanted).norm() / wanted.norm() + (odd - odd_wanted).norm() / odd_wanted.norm())
        us = time_us(lambda attend=attend: attend(q, k, v, sinks, 128))
        right = error < 1e-2
        report.say(f"  {name:32s} {us:6.0f} us  {'' if right else 'WRONG '}relative error {error:.1e}")
        if right:
            times[name] = us
    return min(times, key=times.__getitem__)


def expert_row_variants(report: Report) -> None:
    """Rows without a token become zero, all others keep their bytes; the fast SwiGLU stays within a rounding step."""
    for tokens, pattern in ((1, "random"), (300, "one"), (2879, "empty")):
        routing = random_routing(tokens, pattern)
        q, scales = quantize_rows(normal(tokens, 2880), bias_columns=BIAS_COLUMNS)
        poison_memory()
        rows = permute_and_zero(q, scales, routing, alignment=128)
        used = rows.rows.flatten().long()
        assert torch.equal(rows.q.view(torch.uint8)[used], q.view(torch.uint8).repeat_interleave(4, 0)), "a token's row changed"
        gate_up = normal(rows.q.shape[0], 5760)
        h, expected = swiglu_and_zero(gate_up, rows, bias_columns=BIAS_COLUMNS), swiglu_quantize(gate_up, rows, bias_columns=BIAS_COLUMNS)
        assert torch.equal(h[0].view(torch.uint8)[used], expected[0].view(torch.uint8)[used]), "a token's hidden row changed"
        fast = fast_swiglu(gate_up, rows, bias_columns=BIAS_COLUMNS)
        differs = check_rows((fast[0][used], fast[1][used]), (expected[0][used], expected[1][used]), f"T{tokens}-{pattern} fast")
        for end in rows.ends.tolist():
            stop = -(-end // 128) * 128
            for buffer in (rows.q, h[0]):
                assert not buffer.view(torch.uint8)[end:stop].any(), f"rows {end} to {stop} are not zero"
    routing = random_routing(8192, "random")
    rows = permute_and_zero(*quantize_rows(normal(8192, 2880), bias_columns=BIAS_COLUMNS), routing, alignment=128)
    gate_up = normal(rows.q.shape[0], 5760)
    usual, fast_us = (time_us(lambda op=op: op(gate_up, rows, bias_columns=BIAS_COLUMNS)) for op in (swiglu_quantize, fast_swiglu))
    report.say(f"ok   zero padding rows; fast SwiGLU differs in {differs:.1e}, {usual:.0f} us -> {fast_us:.0f} us (predicted 150)")


@dataclass(frozen=True)
class Variant:
    """Units: predicted_ms: 120b, against what is served"""

    name: str
    predicted: str
    window: str | None = None
    zero: bool = False
    fast: bool = False
    alignment: int = 128


def variants_at(tokens: int, window: str) -> list[Variant]:
    chosen = None if window == "in use" else window
    if tokens == 1024:
        tiles = [Variant(f"expert tiles of {rows} rows", predicted, alignment=rows) for rows, predicted in ((64, "-1.5"), (32, "-2"))]
        return [*tiles, Variant("zero padding rows", "-0.3", zero=True)]
    packed, zero, fast = ("-1.7", "-2", "-1.4") if tokens == 8192 else ("-7", "-2", "-5")
    return [
        Variant(f"sliding: {window}", packed, window=chosen),
        Variant("zero padding rows", zero, zero=True),
        Variant("fast SwiGLU", fast, fast=True),
        Variant("all three", "the sum", window=chosen, zero=True, fast=True),
    ]


def whole_model(report: Report, model: str, tokens: int, weights: PrefillWeights, window: str) -> None:
    """Every variant at one length, a section each."""
    config = gpt_oss_config(model)
    prompts = [random_prompt(config, tokens, seed)[0] for seed in range(RUNS + WARM)]
    kv, offset = make_cache(config, -(-tokens // BLOCK_SIZE), "cuda"), uniform_logits(config, tokens, "cuda", 2)
    served: list[float] = []

    def measure(variant: Variant) -> None:
        prefill = CudaPrefill(
            config, weights, LocalGroup(), block_size=BLOCK_SIZE, device="cuda", max_positions=tokens, row_alignment=variant.alignment
        )  # fmt: skip
        prefill.logit_offset = offset
        with using(window=WINDOWS[variant.window]() if variant.window else None, zero_padding=variant.zero, fast=variant.fast):
            times = _times(prefill, prompts, kv)
        median = statistics.median(times)
        served.append(median)
        against = f"{median - served[0]:+7.2f} (predicted {variant.predicted})" if variant.predicted else ""
        report.say(f"  {model} {tokens:6d} {variant.name:44s} {median:8.2f} ms ({times[0]:.2f} to {times[-1]:.2f}) {against}")
        report.record(
            model=f"gpt-oss-{model}", tokens=tokens, variant=variant.name, median_ms=round(median, 3), min_ms=round(times[0], 3),
            max_ms=round(times[-1], 3), runs=len(times),
        )  # fmt: skip

    for variant in (Variant("as served", ""), *variants_at(tokens, window), Variant("as served again", "")):
        report.section(variant.name, lambda v=variant: measure(v))


def _times(prefill: CudaPrefill, prompts: list[StepBatch], kv: KVCache) -> list[float]:
    """ms of each prompt after the warm ones, rising; short prompts by a CUDA graph, as they are served."""
    graph = None
    if prompts[0].token_ids.shape[0] <= GRAPH_TOKENS:
        with torch.no_grad():
            graph = PrefillGraph(prefill, prompts[0].token_ids.shape[0], prompts[0], kv)
    times = []
    for prompt in prompts:
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits = graph.forward(prompt) if graph else prefill.forward(prompt, kv)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        assert logits is None or bool(logits.isfinite().all()), "logits are not finite"
    return sorted(times[WARM:])


def ranks(report: Report, tp: int) -> None:
    for result in run_group("120b", tp, 8192, DISTINCT_LAYERS):
        report.record(**result)
        if "median_ms" in result:
            report.say(
                f"  120b   8192 {result['layout']:12s} {result['pieces']} pieces {result['median_ms']:8.2f} ms"
                f" ({result['min_ms']} to {result['max_ms']}); goal 62; predicted 79, 71, 70 with ep, 1 to 2 more without"
            )
        else:
            report.say(f"{'ok  ' if result.get('ok') else 'FAIL'} group of {tp}: {result}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the group that is timed too")
    parser.add_argument("--lengths", default="8192,1024,32768")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args.out)
    compiling = [
        subprocess.Popen([sys.executable, str(HERE / "prefill.py"), "--lengths", args.lengths, "--compile", what])
        for what in ("full", "sliding", "120b")
    ]
    if args.tp > 1:
        compiling.append(subprocess.Popen([sys.executable, str(HERE / "prefill_ranks.py"), "--tp", str(args.tp), "--compile"]))
    shadows = [
        subprocess.Popen([sys.executable, str(HERE / "prefill_shadow.py"), str(number)], stdout=subprocess.PIPE, text=True)
        for number in SHADOWED
    ]
    for child in shadows:
        found, _ = child.communicate()
        report.say(found.strip() or f"FAIL shadow ended with {child.returncode}")
    for child in compiling:
        child.wait()
    fastest = ["in use"]
    report.section("expert rows", lambda: expert_row_variants(report))
    report.section("window kernels", lambda: fastest.append(window_kernels(report)))

    def models() -> None:
        weights = RandomWeights(gpt_oss_config("120b"), "cuda", 1).model(DISTINCT_LAYERS, "bf16_qkv")
        for tokens in map(int, args.lengths.split(",")):
            report.section(f"120b {tokens}", lambda t=tokens: whole_model(report, "120b", t, weights, fastest[-1]))

    report.section("models", models)
    if args.tp > 1:
        report.section(f"group of {args.tp}", lambda: ranks(report, args.tp))
    print("\n==== summary\n" + "\n".join(report.table))


if __name__ == "__main__":
    main()
