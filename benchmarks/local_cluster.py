"""The real local cluster against what was predicted of it and what the simulator says of the same load.

    python -m benchmarks.local_cluster --out benchmarks/results/local_cluster.json

Starts Ray, one prefill and one decode group of one CPU rank each (a small random model), measures their profile as `tandem sweep` does, and
starts the cluster again with that profile. Then single requests one after the other tell the part of TTFT that no profile has (the way
there and back), and a Poisson load gives predicted beside actual for each request, and latencies to compare with a simulated run. On few
cores the engines of a load slow each other, which a profile measured one engine at a time can't know: how much longer they computed is
learned from every other request, and the latencies of the rest are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cluster.load.arrivals import Lengths, Load, random_load
from cluster.profile import Profile, builtin_profile, prefill_curve
from cluster.router.choice import Aim
from cluster.sim.deployment import plans_of_config
from cluster.sim.engines import Truth
from cluster.sim.record import Record
from cluster.sim.simulation import SimSettings, Simulation
from cluster.sweep import sweep
from cluster.sweep_bench import SweepSettings
from common.config import Config, parse_config
from common.proto import router_pb2, router_pb2_grpc
from model.fixture import write_random_fixture
from tests.support.local_cluster import VOCAB_SIZE, channel_of, request, running_cluster, wait_idle

SWEEP = SweepSettings(
    prefill_tokens=(1, 64, 128, 256, 512, 1024), batches=(1, 2, 4, 8, 16), contexts=(64, 256, 1024), runs=7, steps=60, vocab_size=VOCAB_SIZE
)
TERMS = ("ttft_ms", "prefill_ms", "itl_ms", "transfer_ms", "cost_usd")
LEARNING = 100  # requests before errors count


@dataclass(frozen=True)
class Row:
    """One request. `ttft_ms`: as its client saw it; `predicted` and `actual`: of the route report."""

    prompt: int
    output: int
    ttft_ms: float
    predicted: router_pb2.Prediction
    actual: router_pb2.Prediction


def config_of(checkpoint: Path, profile: Path | None) -> Config:
    return parse_config(
        {
            "model": {"path": str(checkpoint), "max_model_len": 2048},
            "pools": [
                {"name": "prefill", "role": "prefill", "layout": {"tp": 1}, "chunk_tokens": 256, "kv_blocks": 1024},
                {"name": "decode", "role": "decode", "layout": {"tp": 1}, "max_batch": 16, "kv_blocks": 2048},
            ],
            "kv": {"dtype": "float32"},
            "router": {"listen": "127.0.0.1:0"} | ({"profile": str(profile)} if profile is not None else {}),
            "cluster": {"device": "cpu", "compute_dtype": "float32", "health_timeout_s": 120},  # a busy machine is slow, not dead
        }
    )


async def send(stub: router_pb2_grpc.RouterStub, rng: np.random.Generator, prompt: int, output: int) -> Row:
    message = request(rng.integers(3, VOCAB_SIZE, prompt).tolist(), max_tokens=output)
    sent_s, first_s, complete = time.perf_counter(), 0.0, None
    async for response in stub.Generate(message, timeout=300):
        if response.HasField("chunk"):
            first_s = first_s or time.perf_counter()
        else:
            complete = response.complete
    assert complete is not None
    (chosen,) = [c for c in complete.route.decision.candidates if c.chosen]
    return Row(prompt, output, (first_s - sent_s) * 1e3, chosen.prediction, complete.route.actual)


async def drive(stub: router_pb2_grpc.RouterStub, load: Load, seed: int) -> list[Row]:
    """Open loop: each request at its time, whatever became of those before it."""
    rng, began_s = np.random.default_rng(seed), time.perf_counter()

    async def one(at_s: float, prompt: int, output: int) -> Row:
        await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
        return await send(stub, rng, prompt, output)

    arrivals = zip(load.at_s.tolist(), load.prompt_tokens.tolist(), load.output_tokens.tolist(), strict=True)
    return list(await asyncio.gather(*(one(*arrival) for arrival in arrivals)))


async def measure_profile(cluster, path: Path) -> Profile:
    async with channel_of(cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        groups = [group.description for group in (await stub.GetLoads(router_pb2.GetLoadsRequest())).groups]
        profile = await sweep(groups, SWEEP, path, model="small random", hardware="CPU", guess=builtin_profile(None, on_cuda=False))
        await wait_idle(stub, 10.0)
    return profile


async def run_load(cluster, profile: Profile, count: int, busy: float, seed: int) -> tuple[Load, float, list[Row]]:
    """`busy`: part of the time that the prefill group computes, by its profile. Returns: load, overhead of a request [ms], what happened"""
    prompt, output = Lengths(300, 0.6, 1000), Lengths(24, 0.5, 200)
    curve = prefill_curve(profile, 1, 1, "mxfp4")
    mean_s = float(np.mean([curve.at(int(n)) for n in prompt.draw(np.random.default_rng(0), 1000)])) / 1e3
    load = random_load(count, busy / mean_s, prompt, output, seed=seed)
    async with channel_of(cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        rng = np.random.default_rng(seed)
        alone = [await send(stub, rng, 200, 2) for _ in range(25)]
        overhead_ms = statistics.median(row.ttft_ms - row.actual.prefill_ms for row in alone[5:])
        return load, overhead_ms, await drive(stub, load, seed)


def errors_of(rows: Sequence[Row]) -> dict[str, float]:
    """Median of |predicted / actual - 1| by term, after the first `LEARNING` requests."""
    late = rows[LEARNING:]
    found = {}
    for term in TERMS:
        pairs = [(getattr(row.predicted, term), getattr(row.actual, term)) for row in late]
        found[term] = statistics.median(abs(predicted / actual - 1) for predicted, actual in pairs if actual > 0)
    return found


@dataclass(frozen=True)
class Learned:
    """How the engines of a load differ from their profile: factors on its times, what each prefill takes besides [ms], and sigma of the log
    of a prefill's time."""

    prefill: float
    itl: float
    dispatch_ms: float
    noise: float


def learn(config: Config, profile: Profile, load: Load, rows: Sequence[Row], dispatch_ms: float, seed: int) -> Learned:
    """From the computing times of every other request, the first among them; no TTFT is looked at."""
    curve = prefill_curve(profile, 1, 1, "mxfp4")
    profiled = np.array([curve.at(row.prompt) for row in rows[::2]])
    took = np.array([row.actual.prefill_ms for row in rows[::2]])
    prefill, besides_ms = (float(x) for x in np.polyfit(profiled, took, 1))
    noise = float(np.std(np.log(took / (prefill * profiled + besides_ms))))
    dispatch_ms += besides_ms
    real_ms = statistics.median(row.actual.itl_ms for row in rows[::2] if row.output > 1)
    low, high = 0.25, 8.0
    for _ in range(12):
        itl = (low * high) ** 0.5
        record = simulate(config, profile, load, Learned(prefill, itl, dispatch_ms, noise), seed)
        low, high = (itl, high) if np.nanmedian(record.itl_ms[::2]) < real_ms else (low, itl)
    return Learned(prefill, itl, dispatch_ms, noise)


def simulate(config: Config, profile: Profile, load: Load, learned: Learned, seed: int) -> Record:
    """The same requests at the same times."""
    plans = plans_of_config(config, profile)
    by_role = {"prefill": Truth(prefill=learned.prefill, dispatch_ms=learned.dispatch_ms), "decode": Truth(itl=learned.itl)}
    truth = {plan.spec.name: by_role[plan.role] for plan in plans}
    return Simulation(profile, plans, SimSettings(aim=Aim(0.5), truth=truth, noise=learned.noise, seed=seed)).run(load)


def compare(rows: Sequence[Row], record: Record) -> dict[str, dict[str, float]]:
    """Of the requests that nothing was learned from, by figure: real, simulated, and by how much the simulated one is off."""
    rest = rows[1::2]
    real = {"ttft_ms": [row.ttft_ms for row in rest], "itl_ms": [row.actual.itl_ms for row in rest if row.output > 1]}
    itl_ms = record.itl_ms[1::2]
    simulated = {"ttft_ms": record.ttft_ms[1::2], "itl_ms": itl_ms[~np.isnan(itl_ms)]}
    found = {}
    for name in real:
        for percentile in (50, 99):
            a, b = float(np.percentile(real[name], percentile)), float(np.percentile(simulated[name], percentile))
            found[f"{name} p{percentile}"] = {"real": a, "simulated": b, "off": b / a - 1}
    return found


def measure(count: int, busy: float, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_fixture(folder / "model", vocab_size=VOCAB_SIZE)
        path = folder / "profile.json"
        with running_cluster("local-sweep", folder / "state", config_of(folder / "model", None)) as cluster:
            profile = asyncio.run(measure_profile(cluster, path))
        config = config_of(folder / "model", path)
        with running_cluster("local-load", folder / "state", config) as cluster:
            load, overhead_ms, rows = asyncio.run(run_load(cluster, profile, count, busy, seed))
    learned = learn(config, profile, load, rows, overhead_ms, seed)
    return {
        "requests": count,
        "requests_per_s": load.rate,
        "prefill_busy": busy,
        "learned": asdict(learned),
        "errors": errors_of(rows),
        "against_simulation": compare(rows, simulate(config, profile, load, learned, seed)),
        "rows": [
            {"prompt": row.prompt, "output": row.output, "ttft_ms": round(row.ttft_ms, 2)}
            | {f"{side}_{term}": getattr(getattr(row, side), term) for side in ("predicted", "actual") for term in TERMS}
            for row in rows
        ],
        "profile": profile.model_dump(mode="json"),
    }


def markdown(found: dict) -> str:
    lines = ["| figure | real | simulated | off |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {row['real']:.2f} | {row['simulated']:.2f} | {row['off']:+.1%} |" for name, row in found["against_simulation"].items()
    ]
    lines += ["", f"| predicted against actual, median absolute error after {LEARNING} requests | |", "|---|---|"]
    lines += [f"| {term} | {error:.1%} |" for term, error in found["errors"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--busy", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args.requests, args.busy, args.seed)
    print(markdown(found))
    if args.out is not None:
        facts = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cores": os.cpu_count()}
        args.out.write_text(json.dumps(facts | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
