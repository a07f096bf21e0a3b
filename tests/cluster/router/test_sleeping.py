"""Requests wait for pools that sleep, the controller hears of them, and nobody waits for groups that will not come."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from cluster.router.load_report import fitting_batch, loads_of
from common.proto import types_pb2
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup, tokens_of
from tests.support.hand_directory import HandDirectory
from tests.support.router_bed import bed, request_of, until

BOTH = (types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE)


def loads(router, **targets: float):
    return {load.pool: load for load in loads_of(router.router.pools, targets, asyncio.get_running_loop().time())}


async def test_a_request_to_pools_that_sleep_waits_until_they_are_awake():
    prefill, decode = await FakePrefillGroup().start(), await FakeDecodeGroup().start()
    directory = HandDirectory()
    directory.show(prefill, decode)
    async with bed(prefill, decode, directory=directory) as router:
        await router.until_ready(2)
        directory.show(waking=BOTH)
        await until(lambda: not any(pool.links for pool in router.router.pools.set.all()))
        asleep = loads(router)
        assert {name: load.waiting for name, load in asleep.items()} == {"prefill": 0, "decode": 0}
        pending = asyncio.create_task(router.generate(request_of((3,))))
        await asyncio.wait_for(router.router.pools.wait_for_sleeper(), 10)
        assert {name: load.waiting for name, load in loads(router).items()} == {"prefill": 1, "decode": 1}
        directory.show(prefill, waking=(types_pb2.ROLE_DECODE,))
        await router.until_ready(1)
        assert {name: load.waiting for name, load in loads(router).items()} == {"prefill": 0, "decode": 1}
        assert not pending.done()
        directory.show(prefill, decode)
        assert (await pending).tokens[0] == tokens_of((3,), 8)
        assert {name: load.waiting for name, load in loads(router).items()} == {"prefill": 0, "decode": 0}


async def test_nobody_waits_for_a_role_that_does_not_wake():
    prefill, decode = await FakePrefillGroup().start(), await FakeDecodeGroup().start()
    directory = HandDirectory()
    directory.show(prefill, decode)
    async with bed(prefill, decode, directory=directory) as router:
        await router.until_ready(2)
        directory.show(waking=(types_pb2.ROLE_DECODE,))
        await until(lambda: not any(pool.links for pool in router.router.pools.set.all()))
        started_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            await router.generate(request_of((3,)), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - started_s < 30


async def test_reports_count_arrived_work_sequences_and_blocks():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=20.0, capacity_tokens=16 * 100)
    async with bed(prefill, decode) as router:
        calls = [router.stub.Generate(request_of((i,), max_tokens=600)) for i in range(2)]
        for call in calls:
            await call.read()
        await until(lambda: loads(router)["decode"].kv_blocks_used > 0)
        now = loads(router, decode=50.0)
        assert now["prefill"].arrived_prefill_s > 0
        assert now["decode"].sequences == 2
        assert now["decode"].kv_blocks_total == 100
        assert now["decode"].itl_ms == 20.0
        assert 1 <= now["decode"].sequences_per_group <= 64
        for call in calls:
            call.cancel()


async def test_fewer_sequences_fit_a_tighter_target():
    async with bed(FakePrefillGroup(), FakeDecodeGroup()) as router:
        (pool,) = router.router.pools.set.decode.values()
        steps = [pool.prepared.surface.at(batch, batch * 100) for batch in range(1, pool.spec.max_batch + 1)]
        for target in (0.0, steps[0], steps[9] + 1e-6, steps[-1] * 2):
            fits = fitting_batch(pool.prepared, 100, target, 1.0)
            assert fits == max(1, sum(step <= target for step in steps))
