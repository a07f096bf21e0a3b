"""Routers that are killed: the next one serves soon, the orphans of the dead one are ended, a second router beside it notices nothing."""

from __future__ import annotations

import asyncio
import functools
import time
from pathlib import Path

import grpc

from benchmarks.faults.result import Result
from benchmarks.faults.storms import following
from common.proto import router_pb2, router_pb2_grpc, types_pb2
from tests.support.faults.bed import FaultBed, PoolPlan, fault_bed, fault_config
from tests.support.faults.load import Clients, Shape
from tests.support.faults.oracle import Oracle, percentile
from tests.support.faults.plan import FaultSettings
from tests.support.router_bed import until

POOLS = (PoolPlan("prefill", 1, 1), PoolPlan("decode", 1, 1))
LONG = Shape(prompt_tokens=(8, 40), max_tokens=(400, 600), seeded_in=0)
STREAMS, BESIDE = 8, 2
SHORT = Shape(prompt_tokens=(8, 40), max_tokens=(4, 20))


def run_router(folder: Path, size: int, seed: int) -> Result:
    with fault_bed(folder, fault_config(folder, POOLS), FaultSettings(str(folder), seed, decode_s=0.02)) as bed:
        return asyncio.run(_router(bed, size, seed))


async def _router(bed: FaultBed, size: int, seed: int) -> Result:
    """Streams of the killed router are orphans; those of the other one must not notice."""
    result = Result()
    serving_s, orphans_s, told_s, wrong = [], [], [], 0
    async with following(bed):
        await bed.until_whole()
        other, other_address, _ = await bed.start_router()
        beside = Clients(other_address, SHORT, bed.oracle, seed=seed)
        over = asyncio.Event()
        besides = asyncio.create_task(beside.until(over.is_set, BESIDE))
        for kill in range(size):
            doomed = Oracle()
            clients = Clients(bed.router_address, LONG, doomed, seed=seed + kill)
            streams = [asyncio.create_task(clients.one(i)) for i in range(STREAMS)]
            await until(functools.partial(_all_run, doomed), 120.0)
            bed.kill_router()
            killed = time.monotonic()
            orphans = asyncio.create_task(_until_only(other_address, BESIDE))
            bed.router, bed.router_address, took = await bed.start_router()
            serving_s.append(took)
            await asyncio.gather(*streams)
            told_s.append(max(r.ended_s for r in doomed.records) - killed)
            wrong += len(doomed.wrong())
            orphans_s.append(await orphans - killed)
            await clients.close()
        over.set()
        await besides
        await beside.close()
    other.stop(5)
    bed.router.stop(5)
    result.judge(bed.oracle)
    result.must("wrong_of_killed", wrong, at_most=0)
    result.must("success_percent_of_other_router", bed.oracle.success_percent(), at_least=100)
    result.must("serving_max_s", max(serving_s), at_most=3)
    result.must("orphans_gone_max_s", max(orphans_s), at_most=5)
    result.must("clients_told_max_s", max(told_s), at_most=1)
    result.note(serving_p50_s=percentile(serving_s, 50), orphans_p50_s=percentile(orphans_s, 50))
    return result


def _all_run(doomed: Oracle) -> bool:
    return len(doomed.records) == STREAMS and all(len(record.tokens) > 3 for record in doomed.records)


async def _until_only(address: str, count: int) -> float:
    """Waits until no more than `count` sequences run on the decode groups. Returns: when"""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)

        async def is_so() -> bool:
            loads = await stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10)
            return sum(group.load.running for group in loads.groups if group.description.role == types_pb2.ROLE_DECODE) <= count

        await until(is_so, 60.0)
        return time.monotonic()
