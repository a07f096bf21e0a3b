"""Too much load and clients that do not read. Ranks sleep instead of computing, so that capacity is the pools' and not this machine's."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc

from benchmarks.faults.result import Result
from benchmarks.faults.storms import errors_of, following, judge_rest
from common.proto import router_pb2, router_pb2_grpc
from tests.support.faults.bed import FaultBed, PoolPlan, fault_bed, fault_config
from tests.support.faults.load import Clients, Shape
from tests.support.faults.oracle import Footprint, Oracle, percentile
from tests.support.faults.plan import FaultSettings

POOLS = (PoolPlan("prefill", 1, 1), PoolPlan("decode", 1, 1))
SHAPE = Shape(prompt_tokens=(50, 50), max_tokens=(2, 4), seeded_in=0)
PREFILL_S_PER_TOKEN = 4e-3  # 0.2 s per request
SLOW_STEP_S, ROUNDS = 0.4, 3


def run_overload(folder: Path, size: int, seed: int) -> Result:
    """Capacity by a closed loop, then three times as much for `size` seconds, then half of it."""
    config = fault_config(folder, POOLS, router={"queue": {"max_wait_s": 2.0}})
    with fault_bed(folder, config, FaultSettings(str(folder), seed, prefill_s_per_token=PREFILL_S_PER_TOKEN)) as bed:
        return asyncio.run(_overload(bed, size, seed))


async def _overload(bed: FaultBed, size: int, seed: int) -> Result:
    result = Result()
    async with following(bed):
        await bed.until_whole()
        calm, _ = await _closed(bed, seed, seconds=5.0, at_once=1)
        _, capacity = await _closed(bed, seed, seconds=10.0, at_once=4)
        before = Footprint.of(bed.router.pid)
        flood = Clients(bed.router_address, SHAPE, bed.oracle, seed=seed)
        began = time.monotonic()
        most = before.anonymous_bytes

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, Footprint.of(bed.router.pid).anonymous_bytes)
                await asyncio.sleep(0.2)

        watching = asyncio.create_task(watch())
        await flood.open_loop(3 * capacity, size)
        watching.cancel()
        ok = [r for r in bed.oracle.records if r.ends == ["ok"]]
        goodput = sum(began + 3 <= r.ended_s <= began + size for r in ok) / max(1, size - 3)  # the queue fills first
        after, after_ended_s = Oracle(), time.monotonic()
        relief = Clients(bed.router_address, SHAPE, after, seed=seed + 1)
        await relief.open_loop(0.5 * capacity, 15.0)
        await judge_rest(bed, result)
    await flood.close()
    await relief.close()
    result.judge(bed.oracle)
    rejects = [r.ended_s - r.sent_s for r in bed.oracle.records if r.ends == ["RESOURCE_EXHAUSTED"]]
    result.note(capacity_per_s=capacity, goodput_per_s=goodput, rejects=len(rejects), reject_p50_ms=1e3 * percentile(rejects, 50))
    result.must("goodput_percent", 100 * goodput / capacity, at_least=90)
    result.must("reject_p99_ms", 1e3 * percentile(rejects, 99), at_most=10)
    result.must("router_growth_mb", (most - before.anonymous_bytes) / 1e6, at_most=100)
    usual = 2 * percentile([r.ended_s - r.sent_s for r in calm.records], 99)
    slow = [r.sent_s - after_ended_s for r in after.records if r.ends != ["ok"] or r.ended_s - r.sent_s > usual]
    result.must("normal_again_after_s", max(slow, default=0.0), at_most=10)
    return result


async def _closed(bed: FaultBed, seed: int, *, seconds: float, at_once: int) -> tuple[Oracle, float]:
    """Returns: the ledger, and requests per second"""
    oracle, end = Oracle(), time.monotonic() + seconds
    clients = Clients(bed.router_address, SHAPE, oracle, seed=seed + at_once)
    began = time.monotonic()
    await clients.until(lambda: time.monotonic() > end, at_once)
    await clients.close()
    return oracle, len(oracle.records) / (time.monotonic() - began)


def run_slow(folder: Path, size: int, seed: int) -> Result:
    """`size` clients that read nothing beside as many normal ones, against the normal ones alone.

    A step takes `SLOW_STEP_S` whatever is in it: it is long enough for this machine to compute all rows of both kinds meanwhile, so that
    the pace shows what stuck streams do to others, and not what it costs here to make their tokens before they are closed. It is measured
    from when all stuck ones run: until then they are fifty arrivals like any other.
    """
    config = fault_config(folder, POOLS, router={"stream_buffer_tokens": 64, "default_deadline_s": 120.0})
    roomy = [pool.model_copy(update={"kv_blocks": 160 * size, "max_batch": 2 * size}) for pool in config.pools]
    with fault_bed(folder, config.model_copy(update={"pools": roomy}), FaultSettings(str(folder), seed, decode_s=SLOW_STEP_S)) as bed:
        return asyncio.run(_slow(bed, size, seed))


class Company:
    """Streams beside the normal ones: long ones with many log-probabilities, which nobody reads."""

    OPTIONS = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))

    def __init__(self, address: str, count: int):
        self._channels = [grpc.aio.insecure_channel(address, options=self.OPTIONS) for _ in range(count)]
        self.ends: list[str] = []
        self.calls: list = []

    def start(self) -> None:
        message = router_pb2.GenerateRequest(request_id="company")
        message.tokenized.input_ids.extend(range(5, 15))
        sampling = message.sampling_params
        sampling.max_tokens, sampling.ignore_eos, sampling.temperature, sampling.logprobs = 2000, True, 0.0, 20
        self.calls = [router_pb2_grpc.RouterStub(channel).Generate(message, timeout=600) for channel in self._channels]

    async def close(self) -> None:
        for call in self.calls:
            call.cancel()
        for channel in self._channels:
            await channel.close()


async def _slow(bed: FaultBed, size: int, seed: int) -> Result:
    result = Result()
    pace: dict[bool, list[float]] = {True: [], False: []}
    shape = Shape(prompt_tokens=(8, 8), max_tokens=(40, 40), seeded_in=0)
    async with following(bed):
        await bed.until_whole()
        for is_alone in (True, False, True, False):  # in turn, so that a change of the machine's own pace hits both
            company = None if is_alone else Company(bed.router_address, size)
            if company is not None:
                company.start()
                await _until_running(bed, size)
            clients = Clients(bed.router_address, shape, bed.oracle, seed=seed)
            began = time.monotonic()
            await clients.closed_loop(ROUNDS * size, size)
            pace[is_alone].append(ROUNDS * size / (time.monotonic() - began))
            print(f"{'alone' if is_alone else 'beside stuck ones'}: {pace[is_alone][-1]:.2f} requests/s", flush=True)
            await clients.close()
            if company is not None:
                await _until_ended(company, result)
                await company.close()
        await judge_rest(bed, result)
    result.judge(bed.oracle)
    result.note(alone_per_s=sum(pace[True]) / 2, beside_stuck_per_s=sum(pace[False]) / 2, errors=errors_of(bed.oracle))
    result.must("pace_percent_beside_stuck", 100 * sum(pace[False]) / sum(pace[True]), at_least=95)
    result.must("success_percent", bed.oracle.success_percent(), at_least=100)
    return result


async def _until_running(bed: FaultBed, count: int) -> None:
    """Asks ten times a second: a router tells nobody of its own accord. Raises: TimeoutError if one ends before all run"""
    async with asyncio.timeout(120), grpc.aio.insecure_channel(bed.router_address) as channel:
        stub, running = router_pb2_grpc.RouterStub(channel), 0
        while running < count:
            await asyncio.sleep(0.1)
            loads = await stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10)
            running = sum(group.load.running for group in loads.groups)


async def _until_ended(company: Company, result: Result) -> None:
    """Clients that do not read learn of their end only when they do."""
    ends = await asyncio.gather(*(_end_of(call) for call in company.calls))
    result.note(stuck_ends={end: ends.count(end) for end in set(ends)})
    result.must("stuck_not_closed", sum(end != "RESOURCE_EXHAUSTED" for end in ends), at_most=0)


async def _end_of(call) -> str:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as exc:
        return exc.code().name
    return "ok"
