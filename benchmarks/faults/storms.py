"""Kill storm, cancel storm, message faults: many small requests against whole groups, one kind of trouble each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.faults.result import Result
from tests.support.faults.bed import FaultBed, fault_bed, fault_config
from tests.support.faults.load import Clients, Shape
from tests.support.faults.oracle import Oracle, gaps_s, percentile
from tests.support.faults.plan import FaultSettings, counts_of
from tests.support.router_bed import until

AT_ONCE = 64
REQUESTS_PER_FAULT = 100
LONGEST_S = 300.0
TELL_S = 10.0
RECOVERY_S = 10.0  # after a fault, while requests may still fail of it: a silent group is given up after 8 s


def run_kill(folder: Path, size: int, seed: int) -> Result:
    """One kill or stop per `REQUESTS_PER_FAULT` requests, of any rank of a group that another can stand in for, at any instant. Where
    groups come back slower than that, requests go on until all faults have been."""
    with fault_bed(folder, fault_config(folder), FaultSettings(str(folder), seed)) as bed:
        return asyncio.run(_kill(bed, size, seed))


async def _kill(bed: FaultBed, size: int, seed: int) -> Result:
    result, rng = Result(), random.Random(seed)
    clients = Clients(bed.router_address, Shape(), bed.oracle, seed=seed)
    repaired_s: list[float] = []
    repairs: list[asyncio.Task] = []

    async def repaired() -> None:
        repaired_s.append(await bed.until_whole(LONGEST_S))

    async def storm() -> None:
        """Paced by the work done, so that a slow machine's requests are not hit more often; each role keeps one group that serves."""
        for goal in itertools.count(REQUESTS_PER_FAULT, REQUESTS_PER_FAULT):
            await until(lambda goal=goal: sum(bool(r.ends) for r in bed.oracle.records) >= goal, LONGEST_S)
            group = rng.choice(await bed.until_spare(LONGEST_S))
            await asyncio.sleep(rng.uniform(0, 0.3))
            rank = rng.randrange(len(group.ranks))
            if rng.randrange(4):
                bed.kill(group, rank)
                await until(lambda group=group: group.group not in bed.groups, LONGEST_S)
                repairs.append(asyncio.create_task(repaired()))
            else:
                await bed.stop(group, rank, rng.choice((0.2, 1.0, 3.0)))

    async with following(bed):
        await bed.until_whole()
        storming = asyncio.create_task(storm())

        def is_over() -> bool:
            return storming.done() or (len(bed.oracle.records) >= size and len(bed.oracle.faults) >= size // REQUESTS_PER_FAULT)

        await clients.until(is_over, AT_ONCE)
        storming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await storming
        await asyncio.gather(*repairs)
        await bed.until_whole()
        await judge_rest(bed, result)
    await clients.close()
    oracle = bed.oracle
    result.judge(oracle)
    result.note(faults=dict(Counter(fault.kind for fault in oracle.faults)), repaired_p50_s=percentile(repaired_s, 50))
    result.must("success_percent", oracle.success_percent(), at_least=99.5)
    result.must("failed_out_of_blast", len(oracle.out_of_blast(RECOVERY_S)), at_most=0)
    result.must("typed_error_after_kill_max_s", max(oracle.error_delays_s("kill"), default=0.0), at_most=1.0)
    result.note(typed_error_after_stop_max_s=max(oracle.error_delays_s("stop"), default=0.0), errors=errors_of(oracle))
    return result


def run_cancel(folder: Path, size: int, seed: int) -> Result:
    """Half of the clients go away at a random instant."""
    with fault_bed(folder, fault_config(folder), FaultSettings(str(folder), seed)) as bed:
        return asyncio.run(_cancel(bed, size, seed))


async def _cancel(bed: FaultBed, size: int, seed: int) -> Result:
    result, rng = Result(), random.Random(seed)
    typical_s = 0.5

    def cancel(number: int) -> float | None:
        return rng.uniform(0, 1.2 * typical_s) if rng.randrange(2) else None

    async with following(bed):
        await bed.until_whole()
        warm = Clients(bed.router_address, Shape(), Oracle(), seed=seed + 1)
        await warm.closed_loop(100, AT_ONCE)
        await warm.close()
        took = [r.ended_s - r.sent_s for r in warm.oracle.records]
        typical_s = percentile(took, 50)
        clients = Clients(bed.router_address, Shape(), bed.oracle, seed=seed)
        await clients.closed_loop(size, AT_ONCE, cancel)
        await judge_rest(bed, result, within_s=1.0)
    await clients.close()
    result.judge(bed.oracle)
    result.must("success_percent", bed.oracle.success_percent(), at_least=100.0)
    return result


def run_messages(folder: Path, size: int, seed: int) -> Result:
    """One of 16 pushes of KV and of calls between groups is lost, late, doubled, overtaken, cut or has a bit flipped."""
    with fault_bed(folder, fault_config(folder), FaultSettings(str(folder), seed, one_in=16)) as bed:
        return asyncio.run(_messages(bed, size, seed, folder))


async def _messages(bed: FaultBed, size: int, seed: int, folder: Path) -> Result:
    result = Result()
    clients = Clients(bed.router_address, Shape(), bed.oracle, seed=seed)
    async with following(bed):
        await bed.until_whole()
        await clients.closed_loop(size, AT_ONCE)
        await judge_rest(bed, result)
    await clients.close()
    result.judge(bed.oracle)
    counts = counts_of(folder)
    result.note(faults={key: counts[key] for key in sorted(counts)}, errors=errors_of(bed.oracle))
    result.note(success_percent=bed.oracle.success_percent())
    flips = sum(count for key, count in counts.items() if key.endswith("data flip"))
    result.must("data_flips", flips, at_least=1)
    return result


def errors_of(oracle: Oracle) -> dict[str, int]:
    """What failed requests were told, without names and numbers."""
    texts = (re.sub(r"\b[\w.]*\d[\w.:-]*|\[.*?\]|\(.*?\)", "", record.detail)[:90].strip() for record in oracle.failed())
    return dict(Counter(texts))


@contextlib.asynccontextmanager
async def following(bed: FaultBed):
    """Keeps the bed's groups up to date and says on stderr how far the run is."""
    tasks = [asyncio.create_task(work) for work in (bed.follow(), _tell(bed.oracle))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tell(oracle: Oracle) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(TELL_S)
        ended, failed = sum(bool(record.ends) for record in oracle.records), len(oracle.failed())
        words = f"{time.monotonic() - began:6.0f} s: {ended} requests ended, {failed} of them failed, {len(oracle.faults)} faults"
        print(words, file=sys.stderr, flush=True)


async def judge_rest(bed: FaultBed, result: Result, within_s: float = 10.0) -> None:
    """Every block back and nothing under way."""
    try:
        result.must("at_rest_after_s", await bed.until_idle(), at_most=within_s)
        result.must("leaked", 0, at_most=0)
    except TimeoutError as exc:
        result.must("leaked", 1, at_most=0)
        result.misses.append(f"held: {exc}")
    result.note(gap_p99_ms=1e3 * percentile(gaps_s(bed.oracle.records), 99))
