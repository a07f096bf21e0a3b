"""What the router does about failures: who is tried again and how often, who is given a rest, and who waits for a group to come back."""

from __future__ import annotations

import asyncio
import functools

import grpc
import pytest

from cluster.router.directory import StaticDirectory
from cluster.router.dispatch import DispatchSettings
from cluster.router.retry_budget import RetryBudget, RetryLimits
from common.proto import control_pb2, router_pb2, router_pb2_grpc
from tests.cluster.router.test_faults import ScriptedDirectory, abort_with, ends_with, hang
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup, tokens_of
from tests.support.router_bed import Bed, bed, make_router, request_of, until


def test_a_budget_is_the_burst_and_then_a_share_of_the_requests():
    budget = RetryBudget(ratio=0.25, burst=3)
    assert [budget.take() for _ in range(5)] == [True, True, True, False, False]
    for _ in range(8):
        budget.note_request()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(100):
        budget.note_request()
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


async def num_healthy(router: Bed) -> int:
    loads = await router.stub.GetLoads(router_pb2.GetLoadsRequest())
    return sum(group.healthy for group in loads.groups if group.description.pool == "prefill")


async def sees_running(router: Bed, count: int) -> bool:
    loads = await router.stub.GetLoads(router_pb2.GetLoadsRequest())
    return sum(group.load.running for group in loads.groups if group.description.pool == "decode") == count


@pytest.mark.parametrize(("groups", "spared"), [(1, 1), (2, 1), (3, 2), (4, 2)])
async def test_groups_that_fail_get_a_rest_but_never_more_than_half_of_them(groups, spared):
    prefills, decode = [FakePrefillGroup(group=f"p{i}") for i in range(groups)], FakeDecodeGroup()
    for group in prefills:
        group.before_first = abort_with(grpc.StatusCode.INTERNAL, "kernel failed")
    async with bed(*prefills, decode) as router:
        seen = set()
        for _ in range(12 * groups):
            await ends_with(router.generate(request_of()), grpc.StatusCode.INTERNAL, 2.0)
            seen.add(await num_healthy(router))
        assert min(seen) == spared
        for group in prefills:
            group.before_first = None
        assert (await router.generate(request_of((7,), max_tokens=4))).tokens[0] == tokens_of((7,), 4)


async def test_a_request_that_no_group_had_begun_with_goes_on_without_using_up_its_retry():
    first, second, decode = FakePrefillGroup(group="a"), FakePrefillGroup(group="b"), FakeDecodeGroup()
    opened = asyncio.Event()

    async def wait(task, context):
        await opened.wait()

    first.before_first, second.before_first = hang(), wait
    async with bed(first, second, decode, settings=DispatchSettings(retry=RetryLimits(max_per_request=0))) as router:
        requests = [asyncio.create_task(router.generate(request_of((i,), max_tokens=5))) for i in range(4)]
        await until(lambda: len(first.calls) == len(second.calls) == 2)
        await first.kill()
        opened.set()
        answers = await asyncio.gather(*requests, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, grpc.RpcError)]
        assert [error.code() for error in failed] == [grpc.StatusCode.UNAVAILABLE]
        assert sorted(answer.completes[0].route.attempts for answer in answers if answer not in failed) == [1, 1, 2]
        for i, answer in enumerate(answers):
            if answer not in failed:
                assert answer.tokens[0] == tokens_of((i,), 5)


async def test_retries_stay_within_the_budget_of_the_pool_that_failed():
    prefill = FakePrefillGroup()
    first, second = FakeDecodeGroup(group="a", step_ms=10), FakeDecodeGroup(group="b", step_ms=10)
    settings = DispatchSettings(retry=RetryLimits(ratio=0.0, burst=2))
    async with bed(prefill, first, second, settings=settings) as router:
        requests = [asyncio.create_task(router.generate(request_of((i, 1), max_tokens=100))) for i in range(10)]
        await until(lambda: len(first.running) + len(second.running) == 10)
        on_victim = len(first.running)
        assert on_victim > 2
        await first.kill()
        answers = await asyncio.gather(*requests, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, grpc.RpcError)]
        assert len(failed) == on_victim - 2
        assert {error.code() for error in failed} == {grpc.StatusCode.UNAVAILABLE}
        assert sum(answer.completes[0].route.attempts == 2 for answer in answers if not isinstance(answer, BaseException)) == 2


async def test_a_request_waits_a_moment_for_the_group_that_comes_back():
    prefill, decode = await FakePrefillGroup().start(), await FakeDecodeGroup().start()
    directory = ScriptedDirectory()
    settings = DispatchSettings(retry=RetryLimits(patience_s=20.0))
    async with bed(prefill, decode, directory=directory, settings=settings) as router:
        directory.sets.put_nowait(control_pb2.GroupSet(version=1, groups=[prefill.description]))
        await router.until_ready(1)
        request = asyncio.create_task(router.generate(request_of((3,), max_tokens=9)))
        await asyncio.sleep(0.3)
        assert not request.done()
        directory.sets.put_nowait(control_pb2.GroupSet(version=2, groups=[prefill.description, decode.description]))
        assert (await request).tokens[0] == tokens_of((3,), 9)
        await decode.kill()
        dead = [decode.description.incarnation]
        directory.sets.put_nowait(control_pb2.GroupSet(version=3, groups=[prefill.description], dead_incarnations=dead))
        await ends_with(router.generate(request_of(), timeout=0.4), grpc.StatusCode.DEADLINE_EXCEEDED, 2.0)


async def test_a_prefill_group_that_a_decode_group_knows_to_be_dead_is_asked_no_more():
    """The news of a death comes to groups and routers by different ways."""
    first, second, decode = FakePrefillGroup(group="a"), FakePrefillGroup(group="b"), FakeDecodeGroup()

    async def refuse(request, context):
        if request.writer.group == "a":
            await context.abort(grpc.StatusCode.NOT_FOUND, "prefill group a is dead")

    decode.on_reserve = refuse
    async with bed(first, second, decode, directory=ScriptedDirectory()) as router:
        router.router.pools.apply(control_pb2.GroupSet(groups=[group.description for group in (first, second, decode)]))
        await router.until_ready(3)
        answers = await asyncio.gather(*(router.generate(request_of((i,), max_tokens=4)) for i in range(12)))
        assert [answer.tokens[0] for answer in answers] == [tokens_of((i,), 4) for i in range(12)]
        assert await num_healthy(router) == 1
        assert first.calls == []


async def test_two_routers_share_the_groups_and_the_end_of_one_is_nothing_to_the_other():
    """Nothing but the pools is shared: ids never meet, load that the other one brings is seen, its streams end alone."""
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=10)
    async with bed(prefill, decode) as first:
        router = make_router(router_id="router-second")
        follow = asyncio.create_task(router.pools.follow(StaticDirectory([prefill.address, decode.address])))
        address = await router.server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(address) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            second = Bed(router, address, channel, stub)
            await second.until_ready(2)
            mine = [asyncio.create_task(first.generate(request_of((i, 1), max_tokens=80))) for i in range(5)]
            theirs = [asyncio.create_task(second.generate(request_of((i, 2), max_tokens=4000))) for i in range(5)]
            await until(lambda: len(decode.running) == 10)
            await until(functools.partial(sees_running, first, 10))
            await router.server.drain(0)
            follow.cancel()
            await asyncio.gather(follow, return_exceptions=True)
            await router.pools.close()
            for ended in await asyncio.gather(*theirs, return_exceptions=True):
                assert ended.code() is grpc.StatusCode.UNAVAILABLE
            answers = await asyncio.gather(*mine)
        assert [answer.tokens[0] for answer in answers] == [tokens_of((i, 1), 80) for i in range(5)]
        assert [answer.completes[0].route.attempts for answer in answers] == [1] * 5
