"""Prefill on one GPU: correctness of every kernel, whole-model times beside floors and goals, and where each millisecond goes.

    python3 benchmarks/prefill.py --check --time --out DIR

Writes DIR/prefill.json (records of runs), DIR/prefill.txt (all tables) and DIR/errors.log (a section that fails leaves its traceback there
and the rest goes on). Times are wall-clock of one request from a CPU batch to its logits, fresh random tokens each run, random weights in
FP8, router logits replaced by fixed random ones.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.prefill_checks import CHECKS
from benchmarks.prefill_kernels import gemm_rows, kernel_rows
from benchmarks.prefill_random import BLOCK_SIZE, RandomWeights, gpt_oss_config, make_cache, random_prompt, uniform_logits
from benchmarks.prefill_shadow import SIZES, check_size
from kernels.attention_prefill import AttentionHeads, PrefillAttention, attention_workspace
from model.parallel import LocalGroup
from model.prefill_cuda import CudaPrefill
from model.prefill_graph import PrefillGraph
from model.prefill_weights import SERVED_PROJECTIONS

GRAPH_TOKENS = 2048
RUNS = 7
FORWARDS = (0, 1)  # sizes whose GEMMs compile in seconds
# ms: floor, vLLM 0.24 on the same GPU, goal, prediction of this version
TARGETS = {
    ("120b", 1024): (28, 62.6, 38, 40.5), ("120b", 4096): (36, 111, None, 64), ("120b", 8192): (60, 199, 100, 114),
    ("120b", 32768): (390, 903, 560, 610), ("20b", 1024): (6, 38.7, 16, 11.5), ("20b", 4096): (20, 60.4, None, 33),
    ("20b", 8192): (40, 116, 65, 68), ("20b", 32768): (260, 586, None, 390),
}  # fmt: skip
# kernel-name pattern -> row of the breakdown, and its prediction in ms for 120b at 8,192 tokens
BREAKDOWN = (
    (r"experts_kernel<.*>, (true|\(bool\)1)>", "gate_up", 35.0),
    (r"experts_kernel", "down", 18.0),
    (r"sm90_fp8_gemm.*\b5120\D", "qkv gemm", 6.8),
    (r"sm90_fp8_gemm.*\b2880\D+4096", "o gemm", 5.5),
    (r"PrefillWithKVCacheKernel.*SparseCollective", "attention full, paged", 0.2),
    (r"PrefillWithKVCacheKernel", "attention full, rows", 20.0),
    (r"_window_attention", "attention sliding, rows", 1.9),
    (r"BatchPrefill", "attention sliding, paged", 0.0),
    (r"_combine_norm", "combine_norm_quantize", 2.8),
    (r"_add_norm", "add_norm_quantize", 1.5),
    (r"_rope_write", "rope_write_kv", 1.9),
    (r"_permute_rows", "permute_rows", 1.5),
    (r"_quantize_rows", "quantize_rows", 0.9),
    (r"_choose", "router choice", 0.4),
    (r"nvjet|gemm|cutlass.*Kernel", "bf16 products: QKV, output, router, logits", 22.0),
)


class Report:
    """Lines that are printed now and again at the end, and errors that end one section only."""

    def __init__(self, out: Path):
        self._out = out
        self.lines: list[str] = []
        self.records: list[dict] = []

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)
        (self._out / "prefill.txt").write_text("\n".join(self.lines) + "\n")

    def record(self, **fields) -> None:
        self.records.append(fields)
        (self._out / "prefill.json").write_text(json.dumps(self.records, indent=1) + "\n")

    def section(self, name: str, run) -> None:
        start = time.perf_counter()
        try:
            run()
        except Exception as exc:  # noqa: BLE001 - outermost: one section must not end the others
            with (self._out / "errors.log").open("a") as log:
                log.write(f"== {name}\n{traceback.format_exc()}\n")
            self.say(f"FAIL {name}: {type(exc).__name__}: {str(exc)[:300]}")
            if "CUDA error" in str(exc) or "illegal memory" in str(exc):
                self.say("the CUDA context is lost; stopping")
                sys.exit(1)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"   [{name}: {time.perf_counter() - start:.1f} s]", flush=True)


def compile_ahead(what: str, lengths: list[int]) -> None:
    """Compiles one FlashInfer module (`full`, `sliding`) or a model's GEMMs at these lengths into the on-disk caches."""
    if what in ("full", "sliding"):
        window = None if what == "full" else 128
        PrefillAttention(AttentionHeads(64, 8, 64), BLOCK_SIZE, window_tokens=window, workspace=attention_workspace("cuda"))
        return
    for tokens in (1, *lengths):
        for _ in gemm_rows(what, tokens):
            pass


class Compilers:
    """Children that compile beside the first checks."""

    def __init__(self, lengths: str):
        command = [sys.executable, __file__, "--lengths", lengths, "--compile"]
        self._children = [subprocess.Popen([*command, what]) for what in ("full", "sliding", "120b", "20b")]

    def wait(self) -> None:
        for child in self._children:
            child.wait()


def run_checks(report: Report, compilers: Compilers, only: set[str]) -> None:
    for name, check in CHECKS.items():
        if only and name not in only:
            continue
        if name == "dense gemm":
            compilers.wait()
        torch.manual_seed(20250805)
        report.section(f"check {name}", lambda name=name, check=check: report.say(f"ok   {name}: {check()}"))
    for number in FORWARDS if not only else ():
        report.section(f"forward {number}", lambda n=number: report.say(check_size("cuda", SIZES[n], SERVED_PROJECTIONS)))


def time_kernels(report: Report, model: str, tokens: int) -> None:
    report.say(f"\n{model} {tokens} tokens, one layer, us: kernel, floor, measured, of floor")
    for name, floor, measured in kernel_rows(model, tokens):
        report.say(f"  {name:44s} {floor:8.1f} {measured:8.1f} {floor / measured:6.2f}")


@dataclass(frozen=True)
class Variant:
    """One way to run a length: what is compared in one run."""

    name: str
    contiguous: bool = True
    graph: bool = False
    predicted: str = ""


BASE = Variant("as served")
AB_8192 = (
    Variant("keys from the pool", contiguous=False, predicted="+6 ms"),
    Variant("one CUDA graph", graph=True, predicted="-2 ms"),
)
AB_1024 = (Variant("keys from the pool", graph=True, contiguous=False, predicted="+3 ms"),)


def time_model(report: Report, model: str, lengths: list[int], unique_layers: int | None, commit: str, projections: str) -> None:
    config = gpt_oss_config(model)
    weights = RandomWeights(config, "cuda", 1).model(unique_layers, projections)
    torch.cuda.empty_cache()
    options = {"block_size": BLOCK_SIZE, "device": "cuda", "max_positions": max(lengths)}
    prefills = {rows: CudaPrefill(config, weights, LocalGroup(), contiguous=rows, **options) for rows in (True, False)}
    report.say(
        f"\n{model}, projections {projections}: {torch.cuda.memory_allocated() / 1e9:.1f} GB of weights,"
        f" {unique_layers or config.num_layers} distinct layers"
    )
    report.say("  tokens   median     min      max   ms | floor peer goal predicted | tok/s")
    for tokens in lengths:
        served = replace(BASE, graph=tokens <= GRAPH_TOKENS)
        for variant in (served, *(AB_1024 if tokens == 1024 else AB_8192 if tokens == 8192 else ())):
            report.section(
                f"{model} {tokens} {variant.name}",
                lambda t=tokens, v=variant: _time_length(report, prefills[v.contiguous], model, t, unique_layers, commit, v, projections),
            )


def _time_length(
    report: Report,
    prefill: CudaPrefill,
    model: str,
    tokens: int,
    unique_layers: int | None,
    commit: str,
    variant: Variant,
    projections: str,
) -> None:
    config = prefill.config
    prompts = [random_prompt(config, tokens, seed)[0] for seed in range(RUNS + 2)]
    kv = make_cache(config, -(-tokens // BLOCK_SIZE), "cuda")
    prefill.logit_offset = uniform_logits(config, tokens, "cuda", 2)
    served = variant.name == BASE.name
    graph = None
    if variant.graph:
        with torch.no_grad():
            graph = PrefillGraph(prefill, tokens, prompts[0], kv, max_seq_len=None if variant.contiguous else tokens)

    def run(batch):
        return graph.forward(batch) if graph else prefill.forward(batch, kv)

    def timed(batch) -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits = run(batch)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        end = time.perf_counter()
        assert bool(logits.isfinite().all()), "logits are not finite"
        return (end - start) * 1e3, (launched - start) * 1e3

    pairs = [timed(batch) for batch in prompts][2:]
    times = [ms for ms, _ in pairs]
    median, host = statistics.median(times), statistics.median(ms for _, ms in pairs)
    if not served:
        report.say(
            f"         {median:8.2f} {min(times):8.2f} {max(times):8.2f}      {variant.name}, predicted {variant.predicted};"
            f" host {host:.1f}"
        )
        return
    floor, peer, goal, predicted = TARGETS[model, tokens]
    report.say(
        f"  {tokens:6d} {median:8.2f} {min(times):8.2f} {max(times):8.2f}      | {floor} {peer} {goal} {predicted}"
        f" | {tokens / median * 1e3:,.0f} | host {host:.1f}"
    )
    report.record(
        model=f"gpt-oss-{model}", layout="tp1", weights="fp8", tokens=tokens, median_ms=round(median, 3), min_ms=round(min(times), 3),
        max_ms=round(max(times), 3), runs=len(times), date=datetime.date.today().isoformat(), device=torch.cuda.get_device_name(),
        torch=torch.__version__, commit=commit, distinct_layers=unique_layers or config.num_layers, graph=graph is not None,
        projections=projections,
    )  # fmt: skip
    if tokens in (1024, 8192):
        report.section(
            f"breakdown {model} {tokens}", lambda: _breakdown(report, lambda: run(prompts[0]), (model, tokens) == ("120b", 8192))
        )


def _row(name: str) -> str:
    return next((label for pattern, label, _ in BREAKDOWN if re.search(pattern, name)), "other: " + name[:50])


def _breakdown(report: Report, run, with_prediction: bool) -> None:
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted((e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    gaps: dict[str, float] = defaultdict(float)
    names: dict[str, str] = {}
    end = events[0].time_range.start
    for event in events:
        row, start = _row(event.name), event.time_range.start
        total[row] += (event.time_range.end - start) / 1e3
        calls[row] += 1
        names[row] = event.name
        gaps[row] += max(start - end, 0) / 1e3
        end = max(end, event.time_range.end)
    span = (end - events[0].time_range.start) / 1e3
    report.say(
        f"      device span {span:.2f} ms, busy {sum(total.values()):.2f}, idle {sum(gaps.values()):.2f};"
        " idle before each kernel in brackets"
    )
    predictions = {label: predicted for _, label, predicted in BREAKDOWN} if with_prediction else {}
    for row, ms in sorted(total.items(), key=lambda item: -item[1]):
        if ms > 0.03 or gaps[row] > 0.1:
            report.say(f"      {row:54s} {ms:8.3f} ms {calls[row]:5d} calls [{gaps[row]:6.3f}]  {predictions.get(row, '')}")
    with (report._out / "kernel_names.txt").open("a") as file:
        file.writelines(f"{row}: {name}\n" for row, name in names.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="correctness of every kernel")
    parser.add_argument("--time", action="store_true", help="single kernels and whole models")
    parser.add_argument("--only", default="", help="comma-separated names of checks")
    parser.add_argument("--models", default="20b,120b")
    parser.add_argument("--lengths", default="1024,4096,8192,32768")
    parser.add_argument("--projections", default=SERVED_PROJECTIONS, help="fp8, bf16_qkv or bf16; several with commas between")
    parser.add_argument("--layers-unique", type=int, help="reuse the weights of this many distinct layers")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--compile", help="internal: compile ahead and leave")
    args = parser.parse_args()
    if args.compile:
        compile_ahead(args.compile, [int(n) for n in args.lengths.split(",")])
        return
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args.out)
    compilers = Compilers(args.lengths)
    if args.check:
        run_checks(report, compilers, set(filter(None, args.only.split(","))))
    compilers.wait()
    if args.time:
        for model in args.models.split(","):
            lengths = [int(n) for n in args.lengths.split(",")]
            for projections in args.projections.split(","):
                report.section(
                    f"model {model} {projections}",
                    lambda m=model, n=lengths, p=projections: time_model(report, m, n, args.layers_unique, args.commit, p),
                )
        for model, tokens in (("120b", 8192), ("120b", 1024)):
            report.section(f"kernels {model} {tokens}", lambda m=model, t=tokens: time_kernels(report, m, t))
    print("\n==== summary\n" + "\n".join(report.lines))


if __name__ == "__main__":
    main()
