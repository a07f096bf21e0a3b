"""Groups that are killed and replaced all the time under load: every request ends once, in time, and with the right tokens."""

from __future__ import annotations

import asyncio
import functools
import random
import time

import grpc
import pytest

from cluster.router.directory import StaticDirectory
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup, tokens_of
from tests.support.router_bed import Answer, bed, request_of, until

DEADLINE_S = 20.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_groups_come_and_go_and_no_request_is_lost(seed):
    rng = random.Random(seed)
    prefills = [FakePrefillGroup(group=f"p{i}", prefill_ms=lambda tokens: 3.0) for i in range(3)]
    decodes = [FakeDecodeGroup(group=f"d{i}", step_ms=4.0) for i in range(3)]
    groups = [*prefills, *decodes]
    for group in groups:
        await group.start()
    places, ends = asyncio.Semaphore(32), []

    async def one(router, i: int) -> None:
        prompt, max_tokens = (i, seed), rng.randrange(1, 60)
        async with places:
            began, answer = time.monotonic(), Answer()
            try:
                async for response in router.stub.Generate(request_of(prompt, max_tokens=max_tokens), timeout=DEADLINE_S):
                    answer.add(response)
                end = "ok"
                assert answer.tokens[0] == tokens_of(prompt, max_tokens)
                assert list(answer.completes) == [0]
            except grpc.RpcError as exc:
                end = exc.code().name
                got = answer.tokens.get(0, [])
                assert got == tokens_of(prompt, len(got))
            assert time.monotonic() - began < DEADLINE_S + 1
            ends.append(end)

    def have_ended(number: int) -> bool:
        return len(ends) >= number

    async def churn() -> None:
        while True:  # by the work done, not by the clock: a slow machine's requests are not hit more often
            goal = len(ends) + 100
            await until(functools.partial(have_ended, goal), DEADLINE_S)
            victim = rng.choice(groups)
            await victim.kill()
            await asyncio.sleep(0.1)
            await victim.restart()

    async with bed(*groups, directory=StaticDirectory([group.address for group in groups])) as router:
        await router.until_ready(6)
        churning = asyncio.create_task(churn())
        await asyncio.gather(*(one(router, i) for i in range(1500)))
        churning.cancel()
        await asyncio.gather(churning, return_exceptions=True)
        assert len(ends) == 1500
        assert set(ends) <= {"ok", "UNAVAILABLE"}
        assert ends.count("ok") >= 1480, {end: ends.count(end) for end in set(ends)}
        await until(lambda: len(router.router.generator.running) == 0, 1.0)
        await until(lambda: all(d.free_blocks == d.total_blocks for d in decodes if d.is_up), 3.0)
        for pool in router.router.pools.set.all():
            assert all(link.is_idle for link in pool.links.values())
        for pool in router.router.pools.set.prefill.values():
            assert len(pool.queue) == 0
            assert pool.queue.service_ms == 0.0
        for pool in router.router.pools.set.decode.values():
            assert pool.front is None
            assert not pool.expected
