"""Pools under waves of load: real router, controller and Ray, fake groups; checks that no stream is cut, nothing flaps, the budget holds.

    python -m benchmarks.scale_wave --seconds 600 --waves 4 --out benchmarks/results/scale_wave.json      the run of the docs
    python -m benchmarks.scale_wave --seconds 14400 --waves 24                                            the nightly one

Load follows a sine between `--low` and `--high` times what one decode group takes, in open loop: requests come at their times whether
earlier ones are done or not. Every answer is checked token by token. Exits with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from model.fixture import write_random_fixture
from tests.support.fake_groups import tokens_of
from tests.support.fake_rank import fake_rank_actor
from tests.support.pool_bed import pool_bed
from tests.support.pool_cluster import PoolCluster, connected_ray, pool_cluster, pools_config
from tests.support.router_bed import Bed, request_of

STEP_MS = 20.0
MAX_BATCH = 8
MAX_TOKENS = 100
PER_GROUP_PER_S = MAX_BATCH / (STEP_MS * MAX_TOKENS / 1e3)  # requests that one decode group finishes
GPU_BUDGET = 4


@dataclass
class Report:
    """`most_changes`: of one pool in one wave; `cut`: endings other than OK, by what they said."""

    seconds: float
    waves: int
    low: float
    high: float
    requests: int
    ok: int
    cut: dict[str, int]
    changes: list[dict]
    most_changes: int
    most_gpus: int
    gpu_budget: int
    gpu_seconds: float
    gpu_seconds_if_always_at_most: float

    @property
    def holds(self) -> bool:
        return self.ok == self.requests and self.most_changes <= 2 and self.most_gpus <= self.gpu_budget


async def run_wave(cluster: PoolCluster, router: Bed, seconds: float, waves: int, low: float, high: float, seed: int) -> Report:
    rng = random.Random(seed)
    endings: Counter[str] = Counter()
    tasks: set[asyncio.Task] = set()
    held: list[int] = []
    loop = asyncio.get_running_loop()
    started_s, started_unix_s = loop.time(), time.time()

    async def one(number: int) -> None:
        prompt = (number, seed)
        try:
            answer = await router.generate(request_of(prompt, max_tokens=MAX_TOKENS), timeout=120)
            endings["ok" if answer.tokens[0] == tokens_of(prompt, MAX_TOKENS) else "wrong tokens"] += 1
        except grpc.RpcError as exc:
            endings[f"{exc.code().name}: {exc.details()}"] += 1

    async def watch() -> None:
        while True:
            held.append((await asyncio.to_thread(cluster.status)).gpus_held)
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    number, due_s = 0, 0.0
    while due_s < seconds:
        level = low + (high - low) * (1 - math.cos(2 * math.pi * due_s * waves / seconds)) / 2
        due_s += rng.expovariate(level * PER_GROUP_PER_S)
        await asyncio.sleep(max(0.0, started_s + due_s - loop.time()))
        task = asyncio.create_task(one(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
    await asyncio.gather(*tasks)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    changes = [
        {"pool": c.pool, "before": c.before, "after": c.after, "at_s": round(c.unix_s - started_unix_s, 1), "reason": c.reason}
        for c in (await asyncio.to_thread(cluster.status)).changes
    ]
    per_wave = Counter((c["pool"], int(float(c["at_s"]) * waves / seconds)) for c in changes)
    return Report(
        seconds=seconds,
        waves=waves,
        low=low,
        high=high,
        requests=number,
        ok=endings.pop("ok", 0),
        cut=dict(endings),
        changes=changes,
        most_changes=max(per_wave.values(), default=0),
        most_gpus=max(held),
        gpu_budget=GPU_BUDGET,
        gpu_seconds=round(sum(held) / len(held) * seconds, 1),
        gpu_seconds_if_always_at_most=GPU_BUDGET * seconds,
    )


async def measure(folder: Path, seconds: float, waves: int, low: float, high: float, seed: int) -> Report:
    """Needs a Ray that this process is connected to. `folder`: for a small checkpoint."""
    write_random_fixture(folder / "tiny", vocab_size=1024)
    down_delay_s = seconds / waves / 12
    grow = {"down_delay_s": down_delay_s, "up_delay_s": 0.5}
    pools = [
        {"name": "prefill", "role": "prefill", "replicas": {"min": 1, "max": 2} | grow},
        {"name": "decode", "role": "decode", "max_batch": MAX_BATCH, "replicas": {"min": 1, "max": 2} | grow},
    ]
    config = pools_config(folder / "tiny", pools=pools, autoscale={"interval_s": 0.5, "gpu_budget": GPU_BUDGET})
    with pool_cluster("wave", config, fake_rank_actor(step_ms=STEP_MS, start_s=1.0)) as cluster:
        await asyncio.to_thread(cluster.until_ready, prefill=1, decode=1)
        async with pool_bed(cluster) as router:
            await router.until_ready(2)
            return await run_wave(cluster, router, seconds, waves, low, high, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--low", type=float, default=0.2)
    parser.add_argument("--high", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, connected_ray(Path(name)):
        report = asyncio.run(measure(Path(name), options.seconds, options.waves, options.low, options.high, options.seed))
    text = json.dumps(asdict(report), indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    sys.exit(0 if report.holds else 1)


if __name__ == "__main__":
    main()
