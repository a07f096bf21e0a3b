"""Most of the load that the pools can take, with a fault now and then, for a long time: nothing may grow."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

from benchmarks.faults.result import Result
from benchmarks.faults.storms import following, judge_rest
from tests.support.faults.bed import FaultBed, PoolPlan, fault_bed, fault_config
from tests.support.faults.load import Clients, Shape
from tests.support.faults.oracle import Footprint, Oracle, percentile, slope_of
from tests.support.faults.plan import FaultSettings

POOLS = (PoolPlan("prefill", 1, 2), PoolPlan("decode", 1, 2))
EVERY_S = 20.0
SHARE = 0.7
SHAPE = Shape(prompt_tokens=(20, 80), max_tokens=(2, 12))


def run_soak(folder: Path, size: int, seed: int) -> Result:
    """`size` seconds; two groups of each role, of which one of a role is never killed, so that its growth can be watched."""
    with fault_bed(folder, fault_config(folder, POOLS), FaultSettings(str(folder), seed, prefill_s_per_token=2e-3)) as bed:
        return asyncio.run(_soak(bed, size, seed))


async def _soak(bed: FaultBed, size: int, seed: int) -> Result:
    result, rng = Result(), random.Random(seed)
    async with following(bed):
        await bed.until_whole()
        capacity = await _capacity(bed, seed)
        kept = {group.pool: group for group in bed.groups.values()}
        watched = {"router": bed.router.pid} | {pool: group.ranks[0].pid for pool, group in kept.items()}
        points: dict[str, list[tuple[float, float]]] = {name: [] for name in watched}
        first = {name: Footprint.of(pid) for name, pid in watched.items()}
        began = time.monotonic()

        async def watch() -> None:
            while True:
                for name, pid in watched.items():
                    points[name].append((time.monotonic() - began, Footprint.of(pid).anonymous_bytes / 1e6))
                await asyncio.sleep(1.0)

        async def trouble() -> None:
            safe = {group.group for group in kept.values()}
            while True:
                await asyncio.sleep(EVERY_S)
                victims = [group for name, group in sorted(bed.groups.items()) if name not in safe]
                if victims and rng.randrange(2):
                    bed.kill(rng.choice(victims), 0)
                elif bed.groups:
                    await bed.stop(rng.choice(sorted(bed.groups.values(), key=lambda g: g.group)), 0, rng.choice((0.3, 1.0)))

        clients = Clients(bed.router_address, SHAPE, bed.oracle, seed=seed)
        tasks = [asyncio.create_task(watch()), asyncio.create_task(trouble())]
        await clients.open_loop(SHARE * capacity, size)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await bed.until_whole()
        await judge_rest(bed, result)
        await clients.close()
        last = {name: Footprint.of(pid) for name, pid in watched.items()}
    result.judge(bed.oracle)
    result.note(capacity_per_s=capacity, faults=len(bed.oracle.faults), success_percent=bed.oracle.success_percent())
    for name in watched:
        second_half = [point for point in points[name] if point[0] > size / 2]  # caches fill first
        growth = slope_of(second_half)
        result.must(f"growth_mb_per_h_{name}", growth.per_hour, at_most=5)
        sizes = [percentile((mb for at_s, mb in points[name] if part <= 4 * at_s / size < part + 1), 50) for part in range(4)]
        fds = f"{first[name].fds} -> {last[name].fds}"
        result.note(
            **{
                f"growth_mb_per_h_{name}_middle_half": f"{growth.low:.1f} to {growth.high:.1f}",
                f"anonymous_mb_{name}_by_quarter": " ".join(f"{mb:.1f}" for mb in sizes),
                f"fds_{name}": fds,
                f"threads_{name}": f"{first[name].threads} -> {last[name].threads}",
            }
        )
    return result


async def _capacity(bed: FaultBed, seed: int) -> float:
    """Requests per second of a closed loop that keeps both groups busy."""
    oracle, end = Oracle(), time.monotonic() + 15.0
    clients = Clients(bed.router_address, SHAPE, oracle, seed=seed + 1)
    began = time.monotonic()
    await clients.until(lambda: time.monotonic() > end, 12)
    await clients.close()
    return len(oracle.records) / (time.monotonic() - began)
