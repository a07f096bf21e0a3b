"""Deaths, stalls, lost and forged messages between a prefill and a decode group: typed ends in time, and no block reused too early."""

import asyncio
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from common.auth import sign
from common.proto import types_pb2, worker_pb2
from common.requests import SamplingParams
from tests.support.fake_model import FakeModelBuilder, expected_tokens
from tests.support.groups import KEY, Group, rank_spec, running
from tests.support.pace import within
from tests.support.pair_client import Answer, PairClient, is_idle

GREEDY = SamplingParams(max_tokens=20, temperature=0, seed=1, ignore_eos=True)
SLOW = FakeModelBuilder(prefill_s_per_token=2e-3, decode_s=2e-3)
LEASE_S = 1.0


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, 890), k=length)


def prefill_spec(**options):
    return rank_spec("prefill", **({"chunk_tokens": 32, "kv_blocks": 200, "lease_s": LEASE_S} | options))


def decode_spec(**options):
    return rank_spec("decode", **({"kv_blocks": 200, "max_batch": 8, "lease_s": LEASE_S} | options))


async def wait_until(condition, timeout_s: float, what: str) -> float:
    """Returns: seconds that it took"""
    started = time.monotonic()
    while not await condition():
        assert time.monotonic() - started < within(timeout_s), f"{what} did not happen within {timeout_s} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


def decode_idle(client: PairClient):
    async def check() -> bool:
        return is_idle(await client.decode.GetLoad(worker_pb2.LoadRequest()))

    return check


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_blocks_of_an_aborted_request_wait_for_a_stalled_writer_unless_the_transport_refuses_it(transport):
    """Report P01: the writer is frozen in the middle of its push, the request aborted, others go on; then the writer wakes up."""
    specs = (prefill_spec(transport=transport), prefill_spec(), decode_spec(transport=transport))
    with running(*specs, build=SLOW) as (stalled, other, decode):
        async with PairClient(stalled, decode) as client, PairClient(other, decode) as second:
            victim = asyncio.create_task(client.generate(prompt_of(300), GREEDY))
            await asyncio.sleep(0.35)
            stalled.kill(sig=signal.SIGSTOP)
            victim_id = next(iter(client.answers))
            assert (await client.decode.Abort(worker_pb2.AbortRequest(internal_id=victim_id))).found
            await asyncio.sleep(LEASE_S + 1.0)
            load = await client.decode.GetLoad(worker_pb2.LoadRequest())
            held = load.total_full_blocks - load.free_full_blocks
            assert held == (20 if transport == "shm" else 0), "320 tokens hold 20 blocks until their writer is known to have stopped"
            assert load.running == 0
            for seed in range(3):
                answer = await second.generate(prompt_of(200, seed), GREEDY)
                assert answer.tokens == expected_tokens(prompt_of(200, seed), 20)
            beside = asyncio.create_task(second.generate(prompt_of(150, 9), replace(GREEDY, max_tokens=200)))
            await asyncio.sleep(0.2)
            stalled.kill(sig=signal.SIGCONT)
            assert (await beside).tokens == expected_tokens(prompt_of(150, 9), 200)
            assert (await victim).error
            await client.wait_idle(1.0)
            assert (await client.generate(prompt_of(100), GREEDY)).tokens == expected_tokens(prompt_of(100), 20)


async def test_killed_prefill_group_costs_its_own_requests_only():
    """Reports P02, P04: blocks are back within lease + 1 s, as every process of the writer is known dead; the other pair never stops."""
    with running(prefill_spec(tp=2), prefill_spec(), decode_spec(), build=SLOW) as (victim, other, decode):
        async with PairClient(victim, decode) as client, PairClient(other, decode) as second:
            beside = [asyncio.create_task(second.generate(prompt_of(60, seed), replace(GREEDY, max_tokens=150))) for seed in range(2)]
            doomed = [asyncio.create_task(client.generate(prompt_of(250, seed), GREEDY)) for seed in range(2)]
            await asyncio.sleep(0.3)
            killed = time.monotonic()
            victim.kill(rank=1)
            answers = await asyncio.gather(*doomed)
            assert time.monotonic() - killed < within(1.5)
            assert {answer.error for answer in answers} == {"UNAVAILABLE"}
            assert victim.wait_gone(2.0), "the leader must go too"
            for seed, task in enumerate(beside):
                assert (await task).tokens == expected_tokens(prompt_of(60, seed), 150)
            await wait_until(decode_idle(second), LEASE_S + 1.0, "freeing the blocks of the dead writer")
            assert (await second.generate(prompt_of(99), GREEDY)).tokens == expected_tokens(prompt_of(99), 20)


async def test_blocks_held_for_a_dead_writer_of_another_host_are_free_once_the_news_of_its_death_comes():
    """Its processes can't be looked at from here, and silence is no proof: only signed news frees the blocks."""
    with running(prefill_spec(), decode_spec(), build=SLOW) as (victim, decode):
        async with PairClient(victim, decode) as client:
            for process in victim.description.ranks:
                process.host = "another host"
            doomed = asyncio.create_task(client.generate(prompt_of(300), GREEDY))

            async def started() -> bool:
                return any(answer.events for answer in client.answers.values())

            await wait_until(started, within(5.0), "the prefill")
            victim.kill()
            assert (await doomed).error
            await client.decode.Abort(worker_pb2.AbortRequest(internal_id=next(iter(client.answers))))
            await asyncio.sleep(LEASE_S + 1.0)
            assert not await decode_idle(client)()
            news = worker_pb2.WritersDiedRequest(incarnations=[7, victim.description.incarnation])
            sign(news, b"another key")
            assert await refusal(client.decode.WritersDied(news)) is grpc.StatusCode.PERMISSION_DENIED
            assert not await decode_idle(client)()
            sign(news, KEY)
            await client.decode.WritersDied(news)
            await wait_until(decode_idle(client), 1.0, "freeing the blocks of the dead writer")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.reserve(client.work(prompt_of(9), GREEDY))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("victim_rank", [0, 1])
async def test_killed_decode_rank_ends_its_group_and_the_prefill_group_goes_on(victim_rank):
    with running(prefill_spec(), decode_spec(tp=2, ep=2), decode_spec(), build=SLOW) as (prefill, victim, other):
        async with PairClient(prefill, victim) as client, PairClient(prefill, other) as second:
            decoding = asyncio.create_task(client.generate(prompt_of(20), replace(GREEDY, max_tokens=2000)))
            await asyncio.sleep(0.4)
            pushing = asyncio.create_task(client.generate(prompt_of(200), GREEDY))
            await asyncio.sleep(0.2)
            victim.kill(rank=victim_rank)
            killed = time.monotonic()
            assert (await decoding).error == "UNAVAILABLE"
            assert time.monotonic() - killed < within(1.5)
            assert victim.wait_gone(2.5)
            assert (await asyncio.wait_for(pushing, 2 * LEASE_S + within(1))).error
            assert (await second.generate(prompt_of(80), GREEDY)).tokens == expected_tokens(prompt_of(80), 20)
            await second.wait_idle(LEASE_S + 2.0)


async def test_decode_group_that_stalls_before_the_commit_fails_the_hand_over_at_its_deadline():
    """Report P05: no answer is a typed failure in time, and neither side loses a block."""
    with running(prefill_spec(), decode_spec(), build=SLOW) as (prefill, decode):
        async with PairClient(prefill, decode) as client:
            work = client.work(prompt_of(40), GREEDY)
            reservation = await client.reserve(work)
            decode.kill(sig=signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in client.prefill.Prefill(worker_pb2.PrefillTask(work=work, reservation=reservation)):
                    pass
            assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert time.monotonic() - started < LEASE_S + within(1.5)
            decode.kill(sig=signal.SIGCONT)
            await client.decode.Abort(worker_pb2.AbortRequest(internal_id=work.internal_id))
            await client.wait_idle(2 * LEASE_S + 2.0)
            assert (await client.generate(prompt_of(40), GREEDY)).tokens == expected_tokens(prompt_of(40), 20)


async def test_a_prefill_group_lives_on_whatever_its_decode_peer_does():
    """Its liveness depends on no peer: while one stands still in the middle of a transfer it answers, and serves other pairs."""
    with running(prefill_spec(lease_s=5.0), decode_spec(lease_s=5.0), decode_spec(lease_s=5.0), build=SLOW) as (prefill, stalled, other):
        async with PairClient(prefill, stalled) as client, PairClient(prefill, other) as second:
            doomed = asyncio.create_task(client.generate(prompt_of(300), GREEDY))

            async def started() -> bool:
                return any(answer.events for answer in client.answers.values())

            await wait_until(started, within(5.0), "the prefill")
            stalled.kill(sig=signal.SIGSTOP)
            for seed in range(3):
                asked = time.monotonic()
                await client.prefill.GetLoad(worker_pb2.LoadRequest())
                assert time.monotonic() - asked < within(0.5)
                assert (await second.generate(prompt_of(40, seed), GREEDY)).tokens == expected_tokens(prompt_of(40, seed), 20)
            stalled.kill(sig=signal.SIGCONT)
            await asyncio.wait([doomed])
            await second.wait_idle(within(3.0))


async def test_commit_that_waits_for_a_slow_decode_group_is_not_lost():
    """Report P11: the prefill is ready long before the decode group gets to admit the request."""
    with running(prefill_spec(lease_s=3.0), decode_spec(lease_s=3.0), build=SLOW) as (prefill, decode):
        async with PairClient(prefill, decode) as client:
            work = client.work(prompt_of(40), GREEDY)
            answer = client.answers[work.internal_id] = Answer(work.internal_id)
            reservation = await client.reserve(work)
            decode.kill(sig=signal.SIGSTOP)
            pushing = asyncio.create_task(client.run_prefill(work, reservation, answer))
            await asyncio.sleep(1.5)
            assert answer.events == ["started", "first_token"], "the first token does not wait for the decode group"
            decode.kill(sig=signal.SIGCONT)
            await asyncio.wait_for(pushing, within(2))
            await asyncio.wait_for(answer.done.wait(), within(2))
            assert answer.tokens == expected_tokens(prompt_of(40), 20)
            await client.wait_idle(1.0)


async def test_router_that_goes_away_has_its_requests_ended_after_a_lease():
    with running(prefill_spec(), decode_spec(), build=SLOW) as (prefill, decode):
        async with PairClient(prefill, decode) as client:
            task = asyncio.create_task(client.generate(prompt_of(10), replace(GREEDY, max_tokens=3000)))
            await asyncio.sleep(0.5)
            await client.unsubscribe()
            took_s = await wait_until(decode_idle(client), LEASE_S + 1.0, "ending the orphans")
            assert took_s > LEASE_S / 2
            task.cancel()
            await asyncio.wait([task])
            client.subscribe()
            assert (await client.generate(prompt_of(10), GREEDY)).tokens == expected_tokens(prompt_of(10), 20)


async def test_reservation_that_nobody_uses_is_fenced_and_freed_after_its_lease():
    with running(prefill_spec(), decode_spec(), build=SLOW) as (prefill, decode):
        async with PairClient(prefill, decode) as client:
            work = client.work(prompt_of(40), GREEDY)
            reservation = await client.reserve(work)
            assert not await decode_idle(client)()
            await wait_until(decode_idle(client), LEASE_S + 1.0, "freeing the unused reservation")
            answer = await run_late(client, work, reservation)
            assert answer.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE), "a fenced transfer must never begin"
            await client.wait_idle(1.0)


async def run_late(client: PairClient, work, reservation) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in client.prefill.Prefill(worker_pb2.PrefillTask(work=work, reservation=reservation)):
            pass
    return failed.value


async def test_forged_and_wrong_messages_move_nothing():
    with running(prefill_spec(), decode_spec(), build=SLOW) as (prefill, decode):
        async with PairClient(prefill, decode) as client:
            work = client.work(prompt_of(40), GREEDY)
            reservation = await client.reserve(work)
            ids = {"transfer_id": reservation.transfer_id, "incarnation": reservation.incarnation}
            writer = {"transfer_id": reservation.transfer_id, "incarnation": prefill.description.incarnation}
            for call, message in (
                (client.decode.Commit, worker_pb2.CommitRequest(first_token=5, **ids)),
                (client.decode.Abandon, worker_pb2.AbandonRequest(**ids)),
                (client.prefill.Fence, worker_pb2.FenceRequest(**writer)),
            ):
                for key in (None, b"another key"):
                    if key:
                        sign(message, key)
                    assert await refusal(call(message)) is grpc.StatusCode.PERMISSION_DENIED
            assert not await decode_idle(client)()
            elsewhere = worker_pb2.ReserveRequest(work=client.work(prompt_of(9), GREEDY), incarnation=decode.description.incarnation ^ 1)
            assert await refusal(client.decode.Reserve(elsewhere)) is grpc.StatusCode.UNAVAILABLE
            stale = worker_pb2.AbandonRequest(transfer_id=ids["transfer_id"], incarnation=ids["incarnation"] ^ 1)
            sign(stale, KEY)
            assert await refusal(client.decode.Abandon(stale)) is grpc.StatusCode.UNAVAILABLE
            altered = worker_pb2.Reservation()
            altered.CopyFrom(reservation)
            altered.blocks[0].block_ids[0] += 1
            assert (await run_late(client, work, altered)).code() is grpc.StatusCode.DATA_LOSS
            lying = worker_pb2.CommitRequest(first_token=5, bytes_per_rank=[1], digest_per_rank=[2], **ids)
            sign(lying, KEY)
            assert await refusal(client.decode.Commit(lying)) is grpc.StatusCode.DATA_LOSS
            await client.wait_idle(1.0)


@pytest.mark.parametrize(("writers", "code"), [("weights-b", grpc.StatusCode.FAILED_PRECONDITION), ("weights-a", None), ("", None)])
async def test_a_writer_of_another_kv_version_gets_no_blocks(writers, code):
    with running(prefill_spec(), decode_spec(kv_version="weights-a"), build=SLOW) as (prefill, decode):
        async with PairClient(prefill, decode) as client:
            writer = types_pb2.GroupDescription()
            writer.CopyFrom(prefill.description)
            writer.kv_version = writers
            request = worker_pb2.ReserveRequest(work=client.work(prompt_of(40), GREEDY), router_id=client.router_id, writer=writer)
            assert await refusal(client.decode.Reserve(request)) is code
            await client.decode.Abort(worker_pb2.AbortRequest(internal_id=request.work.internal_id))
            await client.wait_idle(1.0)


async def refusal(call) -> grpc.StatusCode | None:
    try:
        await call
    except grpc.aio.AioRpcError as exc:
        return exc.code()
    return None


async def test_idle_groups_burn_no_cpu():
    with running(prefill_spec(tp=2), decode_spec(tp=2, ep=2), build=SLOW) as groups:
        async with PairClient(*groups) as client:
            await client.generate(prompt_of(40), GREEDY)
            await client.wait_idle(1.0)
            await asyncio.sleep(0.5)
            before = cpu_s(groups)
            await asyncio.sleep(2.0)
            assert cpu_s(groups) - before < 4 * 0.1, "four ranks together used more than 5% of a core"


def cpu_s(groups: list[Group]) -> float:
    ticks = 0
    for process in (process for group in groups for process in group.processes):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
