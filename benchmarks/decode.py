"""Decode on one GPU: correctness of every kernel, whole-step times beside floors and goals, and where each microsecond goes.

    python3 benchmarks/decode.py --check --time --out DIR [--weights fp8]

Writes DIR/decode.json (records of whole steps), DIR/decode.txt (all tables) and DIR/errors.log (a section that fails leaves its traceback
there and the rest goes on). A step is one replay of the captured graph, from token ids to the next token ids, on random weights with
router logits replaced by fresh random ones before each step; every layer has its own weights.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.decode_checks import CHECKS
from benchmarks.decode_checks_fp8 import CHECKS_FP8
from benchmarks.decode_kernels import COPY_GBPS, attention_rows, dense_rows, expert_rows, fp8_expert_rows
from benchmarks.decode_random import EXPERTS, kv_bytes, random_decode, random_weights
from benchmarks.prefill_random import gpt_oss_config
from kernels import cuda_library
from model.decode_cuda import CudaDecode

STEPS = 100
# ms: floor, vLLM 0.24 on the same GPU, goal
TARGETS = {
    ("20b", 1, 8192): (0.9, 2.85, 1.6), ("20b", 8, 8192): (2.5, 5.16, 3.4), ("20b", 32, 8192): (4.4, 7.58, 5.6),
    ("20b", 64, 8192): (5.9, 9.26, 7.0), ("20b", 128, 8192): (9.0, 14.6, 11.0), ("20b", 32, 32768): (8.6, 11.9, 9.5),
    ("120b", 1, 8192): (1.2, 4.07, 2.3), ("120b", 8, 8192): (4.5, 9.15, 6.5), ("120b", 32, 8192): (12.0, 20.3, 14.5),
    ("120b", 64, 8192): (17.5, 27.8, 21.0),
}  # fmt: skip
FP8_CASES = {name: [(rows, 8192) for rows in (1, 8, 32, 64, 128)] for name in ("20b", "120b")}
BESIDES_KV_BYTES = 3 << 29  # a step's buffers, its graph and the library's workspace


class Report:
    """Collects lines and failures; a section's exception is logged and the run goes on."""

    def __init__(self, out: Path):
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.summary: list[str] = []
        self.records: list[dict] = []
        self._started = time.monotonic()
        (out / "decode.txt").write_text("")
        (out / "errors.log").write_text("")

    def detail(self, line: str) -> None:
        with (self.out / "decode.txt").open("a") as file:
            file.write(line + "\n")

    def line(self, text: str) -> None:
        self.summary.append(text)
        self.detail(text)

    def section(self, name: str, run) -> None:
        begin = time.monotonic()
        try:
            run()
        except Exception:  # noqa: BLE001 - outermost loop of this process
            with (self.out / "errors.log").open("a") as file:
                file.write(f"== {name}\n{traceback.format_exc()}\n")
            self.line(f"FAILED {name}: {traceback.format_exc().strip().splitlines()[-1][:160]}")
        free_memory()
        self.detail(f"-- {name}: {time.monotonic() - begin:.1f} s, {time.monotonic() - self._started:.0f} s in all")

    def save(self) -> None:
        (self.out / "decode.json").write_text(json.dumps(self.records, indent=1))


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_checks(report: Report, checks: dict[str, Callable[[], str]]) -> None:
    for name, check in checks.items():

        def one(name=name, check=check):
            report.line(f"ok     {name}: {check()}")

        report.section(f"check {name}", one)


def step_times(decode: CudaDecode, rows: int, steps: int) -> list[float]:
    """Milliseconds of each of `steps` replays, after ten to warm up."""
    decode.capture(rows)
    events = []
    for _ in range(steps + 10):
        decode.logits_override.normal_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        decode.replay(rows)
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events[10:]]


def profile_step(report: Report, decode: CudaDecode, rows: int, title: str) -> None:
    """Where a step's microseconds go, from the profiler's kernel times."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            decode.replay(rows)
        torch.cuda.synchronize()
    spent = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name[:90]].append(event.device_time)
    report.detail(f"profile {title}: kernel, launches a step, us each (median), us a step")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        report.detail(f"  {name:90} {len(times) / 3:6.1f} {statistics.median(times):9.2f} {sum(times) / 3:10.1f}")


def time_model(report: Report, name: str, experts: str, cases: list[tuple[int, int]], steps: int, commit: str) -> None:
    config = gpt_oss_config(name)
    weights = random_weights(config, experts)
    batches = (1, 2, 4, 8, 16, 32, 64, 128)
    kernels = {"mxfp4": expert_rows, "fp8": fp8_expert_rows}[experts]

    report.section(f"experts {name} {experts}", lambda: print_rows(report, f"{name} experts", kernels(config, weights, batches)))
    for rows, context in cases:

        def one(rows=rows, context=context):
            needed, free = kv_bytes(config, rows, context) + BESIDES_KV_BYTES, torch.cuda.mem_get_info()[0]
            if needed > free:
                most = (free - BESIDES_KV_BYTES) // kv_bytes(config, 1, context)
                report.line(
                    f"{name:>4} {experts} B={rows:<3} context {context:>6}: does not fit; {free / 1e9:.1f} GB are left for {most} sequences"
                )
                return
            decode = random_decode(config, weights, rows, context)
            times = step_times(decode, rows, steps)
            median = statistics.median(times)
            report.records.append({
                "model": f"gpt-oss-{name}", "layout": "tp1", "weights": experts, "batch": rows, "context": context,
                "median_ms": round(median, 4), "min_ms": round(min(times), 4), "max_ms": round(max(times), 4), "steps": len(times),
                "date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                "commit": commit,
            })  # fmt: skip
            line = f"{name:>4} {experts} B={rows:<3} context {context:>6}: {median:7.3f} ms (min {min(times):.3f}, max {max(times):.3f})"
            if experts == "mxfp4":
                floor, peer, goal = TARGETS[name, rows, context]
                line += f"  floor {floor}  peer {peer} ({peer / median:.2f}x)  {'meets' if median <= goal else 'MISSES'} goal {goal}"
            report.line(line)
            report.save()
            if context == 8192:
                title = f"{name} {experts} B={rows}"
                report.section(f"profile {title}", lambda: profile_step(report, decode, rows, title))

        report.section(f"step {name} {experts} B={rows} context {context}", one)
    if name == "20b" and experts == "mxfp4":
        report.section("dense", lambda: print_rows(report, "dense", dense_rows(config, weights)))


def print_rows(report: Report, title: str, rows) -> None:
    report.detail(f"{title}: kernel, batch, us, GB/s, share of {COPY_GBPS:.0f} GB/s")
    for name, batch, us, nbytes in rows:
        rate = nbytes / us / 1000
        text = f"  {name:34} B={batch:<4} {us:9.2f} us {rate:8.0f} GB/s {rate / COPY_GBPS:6.1%}"
        report.detail(text)
        if name.startswith("both") or "full" in name or name == "sliding":
            report.summary.append(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="20b,120b")
    parser.add_argument("--weights", nargs="+", choices=EXPERTS, default=["mxfp4"], help="formats of the experts")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--commit", default="unknown", help="of the code, for the records")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report(args.out)
    report.section("build", cuda_library.build_all)
    if args.check:
        for experts in args.weights:
            run_checks(report, {"mxfp4": CHECKS, "fp8": CHECKS_FP8}[experts])
    if args.time and "mxfp4" in args.weights:
        report.section("attention", lambda: print_rows(report, "attention", attention_rows()))
    for name, experts in product(args.models.split(",") if args.time else (), args.weights):
        cases = FP8_CASES[name] if experts == "fp8" else [(rows, context) for model, rows, context in TARGETS if model == name]
        run = partial(time_model, report, name, experts, cases, args.steps, args.commit)
        report.section(f"{name} {experts}", run)
    report.save()
    print("\n".join(report.summary))


if __name__ == "__main__":
    main()
