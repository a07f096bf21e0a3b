"""The router under load: spreading, late binding, full queues and pools, deadlines, cancelled and slow clients."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from cluster.router.dispatch import DispatchSettings
from cluster.router.queue import QueueLimits
from tests.support.fake_groups import KV, FakeDecodeGroup, FakePrefillGroup, tokens_of
from tests.support.pace import within
from tests.support.router_bed import bed, request_of, until


async def idle(decode: FakeDecodeGroup) -> None:
    await until(lambda: decode.free_blocks == decode.total_blocks and not decode.running, 1.0)


async def test_8_at_once_over_2_equal_groups_split_evenly():
    slow = dict(prefill_ms=lambda tokens: 40.0)
    first, second, decode = FakePrefillGroup(group="a", **slow), FakePrefillGroup(group="b", **slow), FakeDecodeGroup()
    async with bed(first, second, decode) as router:
        await asyncio.gather(*(router.generate(request_of((i,), max_tokens=2)) for i in range(8)))
    assert sorted((len(first.prefilled), len(second.prefilled))) in ([4, 4], [3, 5])


async def test_8_at_once_over_2_equal_pools_split_evenly():
    first, second = FakePrefillGroup("p1", "p1-0"), FakePrefillGroup("p2", "p2-0")
    left, right = FakeDecodeGroup("d1", "d1-0"), FakeDecodeGroup("d2", "d2-0")
    first.prefill_ms = second.prefill_ms = lambda tokens: 40.0
    async with bed(first, second, left, right) as router:
        await asyncio.gather(*(router.generate(request_of((i,), max_tokens=30)) for i in range(8)))
    assert sorted((len(first.prefilled), len(second.prefilled))) in ([4, 4], [3, 5])
    assert sorted((len(left.calls), len(right.calls))) in ([4, 4], [3, 5])


async def test_a_prefill_group_is_never_given_more_than_one_ahead():
    prefill, decode = FakePrefillGroup(prefill_ms=lambda tokens: 15.0), FakeDecodeGroup()
    seen = []

    async def count(task, context):
        seen.append(len(prefill.calls) - len(prefill.prefilled))  # neither of them has its first token

    prefill.before_first = count
    async with bed(prefill, decode) as router:
        await asyncio.gather(*(router.generate(request_of((i,), max_tokens=2)) for i in range(12)))
    assert max(seen) == 2


async def test_higher_priority_goes_first():
    prefill, decode = FakePrefillGroup(prefill_ms=lambda tokens: 20.0), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        low = [asyncio.create_task(router.generate(request_of((i,), max_tokens=1))) for i in range(6)]
        await until(lambda: len(prefill.calls) == 2)
        high = asyncio.create_task(router.generate(request_of((99,), max_tokens=1, priority=50)))
        await asyncio.gather(high, *low)
    assert [tuple(work.prompt_ids) for work in prefill.prefilled].index((99,)) <= 3


async def test_full_queue_is_refused_at_once_with_a_time_to_come_back():
    prefill, decode = FakePrefillGroup(prefill_ms=lambda tokens: 150.0), FakeDecodeGroup()
    async with bed(prefill, decode, limits=QueueLimits(max_requests=3)) as router:
        waiting = [asyncio.create_task(router.generate(request_of((i,), max_tokens=1))) for i in range(5)]
        await until(lambda: len(router.router.pools.set.prefill["prefill"].queue) == 3)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as refused:
            await router.generate(request_of())
        assert time.monotonic() - began < within(0.1)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = dict(refused.value.trailing_metadata())
        assert int(metadata["retry-after-ms"]) > 0
        assert all(answer.tokens for answer in await asyncio.gather(*waiting))
        assert (await router.generate(request_of((1,), max_tokens=2))).tokens[0] == tokens_of((1,), 2)


async def test_longest_wait_is_bounded():
    prefill, decode = FakePrefillGroup(prefill_ms=lambda tokens: 2000.0), FakeDecodeGroup()
    async with bed(prefill, decode, settings=DispatchSettings(max_wait_s=0.3)) as router:
        first = [asyncio.create_task(router.generate(request_of((i,), max_tokens=1))) for i in range(2)]
        await until(lambda: len(prefill.calls) == 2)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as refused:
            await router.generate(request_of())
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0.2 < time.monotonic() - began < within(1.3)
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_a_deadline_ends_the_request_wherever_it_is(where):
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=20)
    if where != "decode":
        prefill.prefill_ms = lambda tokens: 3000.0
    async with bed(prefill, decode, default_deadline_s=0.5) as router:
        ahead = []
        if where == "queue":
            ahead = [asyncio.create_task(router.generate(request_of((i,)), timeout=30)) for i in range(2)]
            await until(lambda: len(prefill.calls) == 2)
        for timeout_s in (0.3, None):  # the client's own, and the router's default
            began = time.monotonic()
            with pytest.raises(grpc.RpcError) as late:
                await router.generate(request_of((7,), max_tokens=100_000 if where == "decode" else 5), timeout=timeout_s)
            assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert time.monotonic() - began < within(1.5)
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
        await idle(decode)
        assert not prefill.prefilled or where == "decode"
        await until(lambda: len(router.router.generator.running) == 0, 1.0)
        assert len(router.router.pools.set.prefill["prefill"].queue) == 0


@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_a_client_that_goes_away_frees_both_legs_within_a_second(where):
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=20)
    if where != "decode":
        prefill.prefill_ms = lambda tokens: 3000.0
    async with bed(prefill, decode) as router:
        tasks = [asyncio.create_task(router.generate(request_of((i,), max_tokens=100_000))) for i in range(4 if where == "queue" else 2)]
        if where == "decode":
            await until(lambda: len(decode.running) == 2)
        else:
            await until(lambda: len(prefill.calls) == 2)
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(decode)
        await until(lambda: prefill.load().running == 0, 1.0)
        assert len(router.router.pools.set.prefill["prefill"].queue) == 0
        prefill.prefill_ms = lambda tokens: 2.0
        assert (await router.generate(request_of((5,), max_tokens=3))).tokens[0] == tokens_of((5,), 3)


async def test_a_third_cancelled_at_random_moments_leaves_the_others_untouched():
    prefill, decode = FakePrefillGroup(prefill_ms=lambda tokens: 1.0), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        places = asyncio.Semaphore(48)

        async def one(i: int) -> str:
            async with places:
                task = asyncio.create_task(router.generate(request_of((i, i), max_tokens=12)))
                if i % 3 == 0:
                    await asyncio.sleep((i * 7 % 50) / 1e3)
                    task.cancel()
                try:
                    answer = await task
                except asyncio.CancelledError:
                    return "cancelled"
                assert answer.tokens[0] == tokens_of((i, i), 12)
                return "ok"

        results = await asyncio.gather(*(one(i) for i in range(300)))
        assert results.count("ok") >= 200
        await idle(decode)
        await until(lambda: len(router.router.generator.running) == 0, 1.0)
        assert all(link.is_idle for pool in router.router.pools.set.all() for link in pool.links.values())
        assert all(link.free_credits == 2 for link in router.router.pools.set.prefill["prefill"].links.values())


async def test_a_full_decode_pool_makes_requests_wait_and_all_finish():
    need = 3 + 61
    prefill = FakePrefillGroup()
    decode = FakeDecodeGroup(step_ms=2, capacity_tokens=int(1.2 * need) // KV.block_size_tokens * KV.block_size_tokens)
    async with bed(prefill, decode) as router:
        answers = await asyncio.gather(*(router.generate(request_of((i, 1, 2), max_tokens=61)) for i in range(4)))
    for i, answer in enumerate(answers):
        assert answer.tokens[0] == tokens_of((i, 1, 2), 61)
    assert decode.peak_running == 1


async def test_a_big_request_is_not_starved_by_small_ones():
    prefill, decode = FakePrefillGroup(prefill_ms=lambda tokens: 1.0), FakeDecodeGroup(step_ms=2, capacity_tokens=64 * 16)
    async with bed(prefill, decode) as router:
        finished = []

        async def one(name: str, max_tokens: int) -> None:
            await router.generate(request_of((1,), max_tokens=max_tokens))
            finished.append(name)

        small = [asyncio.create_task(one(f"early {i}", 100)) for i in range(8)]
        await until(lambda: len(decode.running) >= 6)
        big = asyncio.create_task(one("big", 800))
        await asyncio.sleep(0.05)
        late = [asyncio.create_task(one(f"late {i}", 100)) for i in range(40)]
        await asyncio.gather(big, *small, *late)
    assert any(name.startswith("late") for name in finished[finished.index("big") + 1 :])


async def test_a_request_that_fits_no_decode_group_is_refused():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(capacity_tokens=256)
    async with bed(prefill, decode) as router:
        with pytest.raises(grpc.RpcError) as refused:
            await router.generate(request_of((1, 2, 3), max_tokens=300))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "sampling_params.max_tokens" in refused.value.details()
        assert decode.calls == []


async def test_a_slow_client_fails_alone():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=5)
    decode.tokens_per_step = 400
    async with bed(prefill, decode, stream_buffer_tokens=2000) as router:
        stuck = router.stub.Generate(request_of((1,), max_tokens=120_000), timeout=20)
        await until(lambda: decode.running)
        await until(lambda: decode.aborted, 10.0)  # its buffers on the way were full first
        good = await router.generate(request_of((2,), max_tokens=5000))
        assert good.tokens[0] == tokens_of((2,), 5000)
        with pytest.raises(grpc.RpcError) as failed:
            [_ async for _ in stuck]
        assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await idle(decode)
        await until(lambda: len(router.router.generator.running) == 0, 1.0)


async def test_a_client_that_never_reads_again_holds_nothing_at_the_router():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=5)
    decode.tokens_per_step = 400
    async with bed(prefill, decode, stream_buffer_tokens=2000) as router:
        stuck = router.stub.Generate(request_of((1,), max_tokens=120_000), timeout=30)
        await stuck.read()
        await until(lambda: decode.aborted, 10.0)
        await idle(decode)
        await until(lambda: len(router.router.generator.running) == 0, 2.0)
        stuck.cancel()
