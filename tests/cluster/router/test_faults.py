"""Groups that die, fail or keep silent under the router, and requests that must end well or typed, exactly once, in time."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from cluster.router.directory import StaticDirectory
from cluster.router.groups import Liveness
from common.proto import control_pb2, router_pb2
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup, tokens_of
from tests.support.pace import within
from tests.support.router_bed import bed, request_of, until


def hang():
    async def never(task, context):
        await asyncio.sleep(3600)

    return never


def abort_with(code: grpc.StatusCode, text: str = "as told by the test"):
    async def fault(task, context):
        await context.abort(code, text)

    return fault


async def ends_with(call, code: grpc.StatusCode, within_s: float) -> grpc.RpcError:
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as ended:
        await call
    assert ended.value.code() == code, ended.value.details()
    assert time.monotonic() - began < within(within_s)
    return ended.value


async def test_prefill_group_that_dies_before_a_token_is_replaced_by_another():
    first, second, decode = FakePrefillGroup(group="a"), FakePrefillGroup(group="b"), FakeDecodeGroup()
    first.before_first = second.before_first = hang()
    async with bed(first, second, decode) as router:
        request = asyncio.create_task(router.generate(request_of((5, 5), max_tokens=9)))
        await until(lambda: first.calls or second.calls)
        victim, survivor = (first, second) if first.calls else (second, first)
        survivor.before_first = None
        await victim.kill()
        answer = await request
        assert answer.tokens[0] == tokens_of((5, 5), 9)
        assert answer.completes[0].route.attempts == 2
        assert answer.completes[0].route.decision.candidates[0].prefill_group == survivor.description.group
        await until(lambda: decode.free_blocks == decode.total_blocks, 2.0)


async def test_only_prefill_group_dies_and_the_client_knows_within_a_second():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    prefill.before_first = hang()
    async with bed(prefill, decode) as router:
        request = asyncio.create_task(router.generate(request_of()))
        await until(lambda: prefill.calls)
        await prefill.kill()
        await ends_with(request, grpc.StatusCode.UNAVAILABLE, 1.0)
        await until(lambda: decode.free_blocks == decode.total_blocks, 2.0)


async def test_requests_in_the_queue_of_a_dead_pool_end_too():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    prefill.before_first = hang()
    async with bed(prefill, decode) as router:
        requests = [asyncio.create_task(router.generate(request_of((i,)))) for i in range(6)]
        await until(lambda: len(prefill.calls) == 2)
        await prefill.kill()
        began = time.monotonic()
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert time.monotonic() - began < within(1.5)
        assert [r.code() for r in results] == [grpc.StatusCode.UNAVAILABLE] * 6


async def test_decode_group_that_dies_is_replaced_and_the_stream_goes_on_exactly():
    prefill = FakePrefillGroup()
    first, second = FakeDecodeGroup(group="a", step_ms=10), FakeDecodeGroup(group="b", step_ms=10)
    async with bed(prefill, first, second) as router:
        requests = [asyncio.create_task(router.generate(request_of((i, 1), max_tokens=60))) for i in range(6)]
        await until(lambda: len(first.running) + len(second.running) == 6 and first.running and second.running)
        await asyncio.sleep(0.1)
        on_victim = len(first.running)
        await first.kill()
        answers = await asyncio.gather(*requests)
        for i, answer in enumerate(answers):
            assert answer.tokens[0] == tokens_of((i, 1), 60)
            assert answer.completes[0].usage.completion_tokens == 60
            assert answer.completes[0].usage.prompt_tokens == 2
        assert sum(answer.completes[0].route.attempts == 2 for answer in answers) == on_victim
        resumed = [work for work in prefill.prefilled if work.output_ids]
        assert len(resumed) == on_victim
        for work in resumed:
            assert list(work.output_ids) == tokens_of(tuple(work.prompt_ids), len(work.output_ids))
            assert work.sampling.max_tokens == 60
        await until(lambda: second.free_blocks == second.total_blocks, 2.0)


async def test_only_decode_group_dies_and_the_error_says_how_much_was_sent():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=10)
    async with bed(prefill, decode) as router:
        call = router.stub.Generate(request_of((3,), max_tokens=500))
        seen: list[int] = []

        async def read() -> None:
            async for response in call:
                seen.extend(response.chunk.token_ids)

        reading = asyncio.create_task(read())
        await until(lambda: len(seen) >= 5)
        await decode.kill()
        error = await ends_with(reading, grpc.StatusCode.UNAVAILABLE, 1.5)
        assert f"tokens_sent={len(seen)}" in error.details()
        assert ("tokens-sent", str(len(seen))) in tuple(error.trailing_metadata())
        assert seen == tokens_of((3,), len(seen))


async def test_decode_group_answers_a_request_with_an_error():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=5)
    async with bed(prefill, decode) as router:
        doomed = asyncio.create_task(router.generate(request_of((1,), max_tokens=400)))
        await until(lambda: decode.running)
        other = asyncio.create_task(router.generate(request_of((2,), max_tokens=30)))
        decode.fail_sequence(decode.running[0].work.internal_id, "INTERNAL", "logits are NaN")
        error = await ends_with(doomed, grpc.StatusCode.INTERNAL, 1.0)
        assert "logits are NaN" in error.details()
        assert (await other).tokens[0] == tokens_of((2,), 30)


@pytest.mark.parametrize("order", ["prefill raises", "token first, then decode", "decode before the token"])
async def test_all_orders_of_prefill_and_decode(order):
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    if order == "prefill raises":
        prefill.before_first = abort_with(grpc.StatusCode.INTERNAL, "kernel failed")
    elif order == "token first, then decode":
        prefill.transfer_ms = 500.0
    else:
        prefill.commits_before_first = True
    async with bed(prefill, decode) as router:
        if order == "prefill raises":
            error = await ends_with(router.generate(request_of()), grpc.StatusCode.INTERNAL, 1.0)
            assert "kernel failed" in error.details()
        else:
            answer = await router.generate(request_of((8, 8), max_tokens=30))
            assert answer.tokens[0] == tokens_of((8, 8), 30)
        await until(lambda: decode.free_blocks == decode.total_blocks, 2.0)


async def test_transfer_that_fails_after_the_first_token_goes_elsewhere_without_repeating_it():
    first, second, decode = FakePrefillGroup(group="a"), FakePrefillGroup(group="b"), FakeDecodeGroup()
    fail_once = [abort_with(grpc.StatusCode.DEADLINE_EXCEEDED, "transfer timed out")]

    async def fault(task, context):
        if fail_once:
            await fail_once.pop()(task, context)

    first.before_commit = second.before_commit = fault
    async with bed(first, second, decode) as router:
        answer = await router.generate(request_of((6,), max_tokens=7))
        assert answer.tokens[0] == tokens_of((6,), 7)
        assert answer.completes[0].route.attempts == 2


@pytest.mark.parametrize("code", [grpc.StatusCode.DATA_LOSS, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ABORTED])
async def test_kv_that_was_spoilt_on_the_way_is_sent_again(code):
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    fail_once = [abort_with(code, "the KV that arrived is not what was sent")]

    async def fault(task, context):
        if fail_once:
            await fail_once.pop()(task, context)

    prefill.before_commit = fault
    async with bed(prefill, decode) as router:
        answer = await router.generate(request_of((6,), max_tokens=7))
        assert answer.tokens[0] == tokens_of((6,), 7)
        assert answer.completes[0].route.attempts == 2
        await until(lambda: decode.free_blocks == decode.total_blocks, 2.0)


async def test_a_lost_peer_neither_empties_the_queue_nor_fails_the_only_group():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    fail_once = [abort_with(grpc.StatusCode.UNAVAILABLE, "the decode peer is lost")]

    async def fault(task, context):
        if fail_once:
            await fail_once.pop()(task, context)

    prefill.before_commit = fault
    async with bed(prefill, decode) as router:
        answers = await asyncio.gather(*(router.generate(request_of((i,), max_tokens=6)) for i in range(10)))
        assert [answer.tokens[0] for answer in answers] == [tokens_of((i,), 6) for i in range(10)]
        assert sorted(answer.completes[0].route.attempts for answer in answers) == [1] * 9 + [2]


async def test_tokens_missing_in_the_frames_end_the_request_typed():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=10)
    async with bed(prefill, decode) as router:
        request = asyncio.create_task(router.generate(request_of(max_tokens=100)))
        await until(lambda: decode.running)
        await asyncio.sleep(0.05)
        decode.running[0].next_index += 3
        error = await ends_with(request, grpc.StatusCode.INTERNAL, 1.0)
        assert "missing" in error.details()


async def test_token_stream_that_breaks_and_comes_back_costs_no_request():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=10)
    async with bed(prefill, decode) as router:
        request = asyncio.create_task(router.generate(request_of((4,), max_tokens=80)))
        await until(lambda: decode.running)
        decode.break_streams()
        answer = await request
        assert answer.tokens[0] == tokens_of((4,), 80)


async def test_client_errors_never_count_against_a_group():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    too_long = list(range(1, 131073))
    async with bed(prefill, decode) as router:
        good = [asyncio.create_task(router.generate(request_of((i,), max_tokens=10))) for i in range(20)]
        bad = [asyncio.create_task(router.generate(request_of(too_long if i % 10 == 0 else (201088,)))) for i in range(100)]
        for result in await asyncio.gather(*bad, return_exceptions=True):
            assert result.code() == grpc.StatusCode.INVALID_ARGUMENT
        for i, answer in enumerate(await asyncio.gather(*good)):
            assert answer.tokens[0] == tokens_of((i,), 10)
        loads = await router.stub.GetLoads(router_pb2.GetLoadsRequest())
        assert all(group.healthy for group in loads.groups)


async def test_a_group_that_refuses_requests_as_invalid_keeps_its_health():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    prefill.before_first = abort_with(grpc.StatusCode.INVALID_ARGUMENT)
    async with bed(prefill, decode) as router:
        for _ in range(10):
            await ends_with(router.generate(request_of()), grpc.StatusCode.INVALID_ARGUMENT, 1.0)
        prefill.before_first = None
        assert (await router.generate(request_of((2,), max_tokens=4))).tokens[0] == tokens_of((2,), 4)


async def test_one_of_two_groups_killed_under_load_loses_at_most_one_request():
    first, second, decode = FakePrefillGroup(group="a"), FakePrefillGroup(group="b"), FakeDecodeGroup()
    async with bed(first, second, decode) as router:

        async def one(i: int):
            await asyncio.sleep(i * 0.03)
            if i == 12:
                await first.kill()
            return await router.generate(request_of((i,), max_tokens=5))

        results = await asyncio.gather(*(one(i) for i in range(40)), return_exceptions=True)
    failed = [r for r in results if isinstance(r, BaseException)]
    assert len(failed) <= 1
    for i, answer in enumerate(results):
        if not isinstance(answer, BaseException):
            assert answer.tokens[0] == tokens_of((i,), 5)


async def test_a_restarted_group_serves_again_under_its_new_incarnation():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        assert (await router.generate(request_of((1,), max_tokens=5))).tokens[0] == tokens_of((1,), 5)
        await decode.restart()
        await prefill.restart()

        async def serves() -> bool:
            try:
                return (await router.generate(request_of((2,), max_tokens=5))).tokens[0] == tokens_of((2,), 5)
            except grpc.RpcError:
                return False

        await until(serves, 5.0)


async def test_a_silent_prefill_group_is_given_up_and_its_request_goes_elsewhere():
    first, second, decode = FakePrefillGroup(group="a"), FakePrefillGroup(group="b"), FakeDecodeGroup()
    first.before_first = second.before_first = hang()
    async with bed(first, second, decode, liveness=Liveness(poll_timeout_s=0.2)) as router:
        request = asyncio.create_task(router.generate(request_of((3,), max_tokens=4)))
        await until(lambda: first.calls or second.calls)
        silent, other = (first, second) if first.calls else (second, first)
        other.before_first = None
        silent.load_delay_s = 60.0
        answer = await request
        assert answer.tokens[0] == tokens_of((3,), 4)
        assert answer.completes[0].route.attempts == 2


class ScriptedDirectory:
    """Sets that the test puts in."""

    def __init__(self):
        self.sets: asyncio.Queue[control_pb2.GroupSet] = asyncio.Queue()

    async def watch(self):
        while True:
            yield await self.sets.get()


async def test_a_dead_incarnation_fails_its_requests_at_once_and_an_empty_set_fails_none():
    prefill, decode = await FakePrefillGroup().start(), await FakeDecodeGroup(step_ms=10).start()
    directory = ScriptedDirectory()
    async with bed(prefill, decode, directory=directory) as router:
        whole = control_pb2.GroupSet(version=1, groups=[prefill.description, decode.description])
        directory.sets.put_nowait(whole)
        await router.until_ready(2)
        request = asyncio.create_task(router.generate(request_of((3,), max_tokens=60)))
        await until(lambda: decode.running)
        directory.sets.put_nowait(control_pb2.GroupSet(version=2))
        await asyncio.sleep(0.05)
        await ends_with(router.generate(request_of((4,))), grpc.StatusCode.UNAVAILABLE, 1.0)
        assert (await request).tokens[0] == tokens_of((3,), 60)
        directory.sets.put_nowait(whole)
        await router.until_ready(2)
        request = asyncio.create_task(router.generate(request_of((3,), max_tokens=600)))
        await until(lambda: decode.running)
        dead = [decode.description.incarnation]
        directory.sets.put_nowait(control_pb2.GroupSet(version=3, groups=[prefill.description], dead_incarnations=dead))
        await ends_with(request, grpc.StatusCode.UNAVAILABLE, 1.0)


async def test_a_decode_group_that_is_replaced_while_it_is_asked_for_room_costs_no_request():
    """Its connection is closed under the question: that must end neither the request nor, without a word, its stream."""
    prefill = await FakePrefillGroup().start()
    first, second = await FakeDecodeGroup(group="a").start(), await FakeDecodeGroup(group="b").start()
    first.on_reserve = second.on_reserve = hang()
    directory = ScriptedDirectory()
    async with bed(prefill, first, second, directory=directory) as router:
        directory.sets.put_nowait(control_pb2.GroupSet(version=1, groups=[g.description for g in (prefill, first, second)]))
        await router.until_ready(3)
        request = asyncio.create_task(router.generate(request_of((3,), max_tokens=9)))
        await until(lambda: first.calls or second.calls)
        asked, other = (first, second) if first.calls else (second, first)
        other.on_reserve = None
        dead = [asked.description.incarnation]
        listed = [prefill.description, other.description]
        directory.sets.put_nowait(control_pb2.GroupSet(version=2, groups=listed, dead_incarnations=dead))
        answer = await request
        assert answer.tokens[0] == tokens_of((3,), 9)
        assert list(answer.completes) == [0]


@pytest.mark.parametrize("spare", [False, True], ids=["alone", "another"])
async def test_a_group_that_is_silent_when_asked_for_room_is_lost_and_not_the_clients_deadline(monkeypatch, spare):
    monkeypatch.setattr("cluster.router.dispatch.UNARY_TIMEOUT_S", 0.2)
    first, second = FakeDecodeGroup(group="a"), FakeDecodeGroup(group="b")
    first.on_reserve = second.on_reserve = hang()
    async with bed(FakePrefillGroup(), first, *([second] if spare else [])) as router:
        request = asyncio.create_task(router.generate(request_of((3,), max_tokens=9)))
        await until(lambda: first.calls or second.calls)
        (second if first.calls else first).on_reserve = None
        if spare:
            assert (await request).tokens[0] == tokens_of((3,), 9)
        else:
            error = await ends_with(request, grpc.StatusCode.UNAVAILABLE, 5.0)
            assert "did not answer within" in error.details()


async def test_static_directory_finds_a_group_that_starts_late():
    prefill, decode = await FakePrefillGroup().start(), await FakeDecodeGroup().start()
    address = decode.address
    await decode.kill()
    directory = StaticDirectory([prefill.address, address])
    async with bed(prefill, decode, directory=directory) as router:
        await router.until_ready(1)
        await ends_with(router.generate(request_of()), grpc.StatusCode.UNAVAILABLE, 1.0)
        await decode.start(address)
        await router.until_ready(2)
        assert (await router.generate(request_of((1,), max_tokens=3))).tokens[0] == tokens_of((1,), 3)


async def test_a_prefill_group_that_takes_nothing_more_sends_its_request_to_another():
    first, second, decode = FakePrefillGroup(group="a"), FakePrefillGroup(group="b"), FakeDecodeGroup()
    first.before_first = abort_with(grpc.StatusCode.RESOURCE_EXHAUSTED, "this prefill group is draining")
    async with bed(first, second, decode) as router:
        answers = await asyncio.gather(*(router.generate(request_of((i,), max_tokens=3)) for i in range(8)))
        assert [answer.tokens[0] for answer in answers] == [tokens_of((i,), 3) for i in range(8)]
        second.before_first = first.before_first
        await ends_with(router.generate(request_of()), grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
        await until(lambda: decode.free_blocks == decode.total_blocks, 2.0)
