"""What the decode step might do next, measured beside what it does: one run on one GPU, one short table at the end.

    python3 benchmarks/decode_next.py --out DIR

Each variant of the expert kernels is built, checked in a process of its own against fp32 with poisoned buffers, timed alone over fresh
weights, and then in whole steps, alternating with what is served. Writes DIR/decode_next.txt and DIR/decode_next.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from benchmarks.decode_checks import (
    ALPHA,
    LIMIT,
    check_dense,
    check_experts,
    check_full_attention,
    check_route_and_combine,
    check_sampling,
    check_sliding_attention,
    errors,
)
from benchmarks.decode_kernels import COPY_GBPS, _attention_case, _dense_case, _vocabulary_case, graph_us
from benchmarks.decode_random import randn, random_choices, random_decode, random_weights
from benchmarks.prefill_random import gpt_oss_config
from kernels import attention_decode, cuda_library, decode_fused, moe_decode

OTHERS = ("attention_full_next", "decode_fused_next", "dense_decode_next", "attention_sliding_next", "sampling_next")
VARIANTS = ("moe_decode", "moe_decode_few", "moe_decode_few2", "moe_decode_adders", "moe_decode_wide", "moe_decode_wide16")
SERVED = VARIANTS[0]
BATCHES = {"20b": (1, 2, 4, 8, 16, 32, 64, 128), "120b": (1, 4, 8, 16, 32, 64, 128)}
STEPS = {
    "20b": ((1, 8192), (8, 8192), (32, 8192), (64, 8192), (128, 8192), (32, 32768)),
    "120b": ((1, 8192), (8, 8192), (32, 8192), (64, 8192)),
}
CHECK_S, TIME_S, REPLAYS, TURNS = 40, 90, 12, 4
cuda_library.FLAGS = (*cuda_library.FLAGS, "-DTANDEM_SPINS_END")  # a kernel that hangs stops by itself
STAMPS = (
    "entry", "ids awaited", "groups", "p1 start", "p1 columns", "go seen", "p2 columns", "last p1 product", "p1 sums", "arrived",
    "all arrived", "p2 sums",
)  # fmt: skip


@contextmanager
def using(experts: str = SERVED, *, attention: bool = False, dense: bool = False) -> Iterator[None]:
    """Other libraries in place of those that are served meanwhile: of the experts, attention in smaller chunks, rotation by 16 bytes."""
    names = {SERVED: experts}
    if attention:
        names |= {
            "attention_full": "attention_full_next",
            "decode_fused": "decode_fused_next",
            "attention_sliding": "attention_sliding_next",
        }
    if dense:
        names |= {"dense_decode": "dense_decode_next", "sampling": "sampling_next"}
    load, chunk, qkv = cuda_library.load, attention_decode.CHUNK_TOKENS, decode_fused.MAX_QKV_TOKENS
    decode_fused.MAX_QKV_TOKENS = 32 if dense else qkv
    cuda_library.load = lambda name: load(names.get(name, name))
    attention_decode.CHUNK_TOKENS = 256 if attention else chunk
    try:
        yield
    finally:
        cuda_library.load, attention_decode.CHUNK_TOKENS, decode_fused.MAX_QKV_TOKENS = load, chunk, qkv


def time_alone(model: str, config, weights, variants: list[str]) -> dict:
    """Microseconds a launch of both products over all layers' weights, by batch and variant."""
    rows: dict = {}
    for batch in BATCHES[model]:
        layers = weights.layers
        ids = random_choices(len(layers), batch, config)
        hit = sum(len(set(choice.flatten().tolist())) for choice in ids) / len(layers)
        x, hidden, out = randn(batch, 2880), randn(batch * 4, 2880), randn(batch, 4, 2880)
        arrived = torch.zeros(2, dtype=torch.int32, device="cuda")

        def both(i, layers=layers, x=x, ids=ids, hidden=hidden, out=out, arrived=arrived):
            moe_decode.launch_experts(x, ids[i], layers[i].experts, hidden, arrived, out, alpha=ALPHA, limit=LIMIT)

        row: dict = {"floor_us": round(hit * 270 * 90 * 544 / COPY_GBPS / 1000, 1)}
        for variant in (*variants, SERVED):
            with using(variant):
                us = graph_us([partial(both, i) for i in range(len(layers))])
            row[variant] = round(min(us, row.get(variant, us)), 1)
        rows[batch] = row
    return rows


def time_steps(model: str, config, weights, alone: dict, with_others: bool, report) -> None:
    """Whole steps of what is served and of the fastest variant alone, in turns."""
    for batch, context in STEPS[model]:
        row = alone[batch]
        best = min((us, name) for name, us in row.items() if name not in ("floor_us", SERVED))[1]
        choices = {
            "served": (using(), False),
            best: (using(best), False),
            "+attention": (using(best, attention=True), False),
            "+dense": (using(best, attention=True, dense=True), True),
        }
        if not with_others:
            del choices["+attention"], choices["+dense"]
        with using(attention=True):
            decode = random_decode(config, weights, batch, context)
        graphs = {}
        for name, (libraries, decode.folds_bias) in choices.items():
            with libraries:
                decode.capture(batch)
            graphs[name] = decode._graphs.pop((batch, True))
        times: dict[str, list[float]] = {name: [] for name in choices}
        for _ in range(TURNS):
            for name in choices:
                for i in range(REPLAYS):
                    decode.logits_override.normal_()
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    graphs[name].replay()
                    end.record()
                    end.synchronize()
                    if i >= 2:
                        times[name].append(begin.elapsed_time(end))
        report({"step": model, "batch": batch, "context": context, **{n: round(statistics.median(t), 4) for n, t in times.items()}})
        graphs.clear()
        del decode
        torch.cuda.empty_cache()


def time_dense(config, weights, report) -> None:
    """The dense products and what follows them, as served and in half tiles."""
    pool = randn(1024, 2, 8, 16, 64)
    for batch in (1, 8, 16, 32, 128):
        row: dict = {"dense": "20b", "batch": batch}
        for is_next in (False, True):
            with using(attention=is_next, dense=is_next):
                for name, _, us, _ in chain(_dense_case(config, weights, batch, pool), _vocabulary_case(config, weights, batch)):
                    row[name + (" next" if is_next else "")] = round(us, 2)
        if batch == 32:
            with using(dense=True):
                x, q = randn(batch, 2880), randn(batch, 64, 64)
                slots, cos_sin = torch.randperm(16384, device="cuda")[:batch].int(), torch.rand(batch, 32, 2, device="cuda")
                qkv = [partial(decode_fused.launch_qkv, x, layer.qkv, layer.qkv_bias, pool, slots, cos_sin, q) for layer in weights.layers]
                row["qkv own next"] = round(graph_us(qkv), 2)
        report(row)


def time_hot(weights, report) -> None:
    """QKV and output projection whose weights are in L2 already: what asking for them ahead could gain at most."""
    pool, layer = randn(1024, 2, 8, 16, 64), weights.layers[0]
    x, a, residual, q = randn(1, 2880), randn(1, 4096), randn(1, 2880), randn(1, 64, 64)
    slots, cos_sin = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.rand(1, 32, 2, device="cuda")
    row: dict = {"hot": "20b", "batch": 1}
    for name, is_next in (("", False), (" next", True)):
        with using(dense=is_next):
            qkv = partial(decode_fused.launch_qkv, x, layer.qkv, layer.qkv_bias, pool, slots, cos_sin, q)
            row["qkv" + name] = round(graph_us([qkv] * 20), 2)
            row["o" + name] = round(
                graph_us([partial(decode_fused.launch_projection, a, layer.o, layer.o_bias, residual, residual)] * 20), 2
            )
    report(row)


def time_attention(report) -> None:
    """Full attention as served and in smaller chunks."""
    for batch, context in ((1, 8192), (8, 8192), (32, 8192), (64, 8192), (128, 8192), (1, 32768), (1, 131072), (32, 1024), (32, 32768)):
        row: dict = {
            "attention": "full",
            "batch": batch,
            "context": context,
            "floor_us": round(batch * context * 2048 / COPY_GBPS / 1000, 1),
        }
        for name, is_next in (("served", False), ("next", True)):
            with using(attention=is_next):
                for title, _, us, _ in _attention_case(batch, context):
                    row[f"{title.split()[0]} {name}"] = round(us, 1)
            torch.cuda.empty_cache()
        report(row)


def check_others() -> str:
    """Chunks of 256 tokens, rotation by 16 bytes, and the bias of the output projection in the residual before it."""
    with using(attention=True, dense=True):
        lines = [check_full_attention(), check_sliding_attention(), check_dense(), check_route_and_combine(), check_sampling()]
        config = gpt_oss_config("20b", 4)
        weights = random_weights(config)
        decode = random_decode(config, weights, 33, 1000)
        first, logits = decode.token_ids.clone(), []
        for decode.folds_bias in (False, True):
            decode.token_ids.copy_(first)
            decode.step(33)
            logits.append(decode.logits[:33].clone())
        lines.append("folded bias " + errors(logits[1], logits[0], "folded bias", 5e-2, 2e-2))
    return "; ".join(lines)


def time_child(model: str, variants: list[str], out: Path) -> None:
    def report(row: dict) -> None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    config = gpt_oss_config(model)
    weights = random_weights(config)
    alone = time_alone(model, config, weights, [name for name in variants if name in VARIANTS])
    for batch, row in alone.items():
        report({"alone": model, "batch": batch, **row})
    parts = [lambda: time_steps(model, config, weights, alone, "others" in variants, report)]
    if model == "20b":
        parts = [
            lambda: report({"stamps": "moe_decode_few", "batch": 1, **stamps(config, weights, "moe_decode_few", 1)}),
            lambda: report({"stamps": "moe_decode_wide", "batch": 1, **stamps(config, weights, "moe_decode_wide", 1)}),
            lambda: report({"stamps": "moe_decode_wide", "batch": 64, **stamps(config, weights, "moe_decode_wide", 64)}),
            lambda: time_attention(report),
            lambda: time_dense(config, weights, report),
            lambda: time_hot(weights, report),
            *parts,
        ]
    for part in parts:
        try:
            part()
        except Exception:  # noqa: BLE001 - the other parts go on
            report({"failed": model, "batch": 0, "why": traceback.format_exc().strip().splitlines()[-1][:300]})
        torch.cuda.empty_cache()


def stamps(config, weights, variant: str, batch: int) -> dict:
    """Microseconds from a block's entry to points of an experts kernel built with clocks: first, median and last block."""
    cuda_library.FLAGS = (*cuda_library.FLAGS, "-DTANDEM_STAMPS")
    library = ctypes.CDLL(str(cuda_library.build(variant)))
    cuda_library.FLAGS = cuda_library.FLAGS[:-1]
    layers, ids = weights.layers, random_choices(len(weights.layers), batch, config)
    x, hidden, out = randn(batch, 2880), randn(batch * 4, 2880), randn(batch, 4, 2880)
    arrived = torch.zeros(2, dtype=torch.int32, device="cuda")

    def both(i):
        moe_decode.launch_experts(x, ids[i], layers[i].experts, hidden, arrived, out, alpha=ALPHA, limit=LIMIT)

    result: dict = {}
    load, cuda_library.load = cuda_library.load, lambda name: library
    try:
        result["us a launch"] = round(graph_us([partial(both, i) for i in range(len(layers))]), 1)
    finally:
        cuda_library.load = load
    raw = (ctypes.c_longlong * (256 * 16))()
    assert library.tandem_stamps(ctypes.byref(raw)) == 0
    blocks = cuda_library.multiprocessors(0)
    table = torch.tensor(list(raw)).view(256, 16)[:blocks]
    for i, name in enumerate(STAMPS):
        if not bool((table[:, i] > 0).any()):
            continue
        since = (table[:, i] - table[:, 0]).float() / 1980
        result[name] = [round(float(v), 2) for v in (since.min(), since.median(), since.max())]
    return result


def child(out: Path, *arguments: str, limit: int) -> str:
    """Runs this file's child; '' or what went wrong."""
    command = [sys.executable, __file__, "--out", str(out), "--child", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"no end within {limit} s"
    return "" if result.returncode == 0 else (result.stderr.strip().splitlines() or ["failed"])[-1][:300]


def show(rows: list[dict]) -> Iterator[str]:
    for row in rows:
        kind = next(iter(row))
        where = f"{row[kind]:>4} B={row['batch']:<3}" + (f" context {row['context']}" if "context" in row else "")
        values = " ".join(
            f"{name.removeprefix('moe_decode_')} {value}" for name, value in row.items() if name not in (kind, "batch", "context")
        )
        yield f"{kind} {where}: {values}"


def parent(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    log: list[str] = []
    cuda_library.build_all((*cuda_library.NAMES, *VARIANTS[1:], *OTHERS))
    log.append(f"built after {time.monotonic() - begin:.0f} s")
    names = (*VARIANTS, "others")
    with ThreadPoolExecutor(3) as pool:
        wrong = dict(zip(names, pool.map(lambda v: child(out, "check", v, limit=CHECK_S), names), strict=True))
    for name, problem in wrong.items():
        log.append(f"check {name}: {problem or 'ok'}")
    log.append(f"checked after {time.monotonic() - begin:.0f} s")
    good = [name for name in names if name == SERVED or not wrong[name]]
    records = out / "decode_next.json"
    records.write_text("")
    for model in STEPS:
        problem = child(out, "time", model, ",".join(good), limit=TIME_S)
        log.append(f"time {model}: {problem or 'ok'}, after {time.monotonic() - begin:.0f} s")
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    text = "\n".join((*log, *show(rows)))
    (out / "decode_next.txt").write_text(text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", nargs="+")
    args = parser.parse_args()
    if args.child is None:
        parent(args.out)
        return
    try:
        if args.child[0] == "check":
            if args.child[1] == "others":
                print(check_others())
                return
            with using(args.child[1]):
                print(check_experts(32, (1, 2, 3, 7, 8, 33, 64, 128)), check_experts(128, (1, 8, 64)))
        else:
            time_child(args.child[1], args.child[2].split(","), args.out / "decode_next.json")
    except Exception:  # noqa: BLE001 - outermost of this process
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
