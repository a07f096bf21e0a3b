"""One prefill and one decode group as processes, with the fake model: what every request must come to, whatever happens to others."""

import asyncio
import random
import time
from dataclasses import replace

import grpc
import pytest

from common.proto import types_pb2, worker_pb2
from common.requests import SamplingParams
from frontend.vocab import find_vocabulary
from tests.support.fake_model import CONFIG, NEVER_SAMPLED, FakeModelBuilder, expected_tokens
from tests.support.groups import rank_spec, running
from tests.support.pace import within
from tests.support.pair_client import PairClient

FAIL, NAN = NEVER_SAMPLED, NEVER_SAMPLED + 1
GREEDY = SamplingParams(max_tokens=20, temperature=0, seed=1, ignore_eos=True)
BUILD = FakeModelBuilder(prefill_s_per_token=2e-4, decode_s=2e-3, fail_token=FAIL, nan_token=NAN)


@pytest.fixture(scope="module")
def groups():
    vocab = str(find_vocabulary().parent)
    with running(
        rank_spec("prefill", tp=1, chunk_tokens=64, kv_blocks=120, vocab=vocab),
        rank_spec("decode", tp=2, ep=2, kv_blocks=120, max_batch=6, vocab=vocab),
        build=BUILD,
    ) as pair:
        yield pair


@pytest.fixture
async def client(groups):
    async with PairClient(*groups) as one:
        yield one
        await one.wait_idle(1.0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, 890), k=length)


async def test_tokens_are_those_of_the_model_alone_for_all_lengths_around_block_and_window(client):
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 257, 500]
    answers = [await client.generate(prompt_of(n), GREEDY) for n in lengths]
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.tokens == expected_tokens(prompt_of(length), 20), f"prompt of {length}"
        assert answer.events == ["started", "first_token", "handed_over"]
        assert answer.finish.reason == types_pb2.FINISH_REASON_LENGTH
        geometry = CONFIG.kv_geometry(16, "float32")
        assert answer.handed_over_bytes == geometry.handover_bytes(length)


async def test_one_frame_per_step_carries_all_requests(client):
    before = client.frames
    answers = await asyncio.gather(*(client.generate(prompt_of(40, seed), replace(GREEDY, max_tokens=60)) for seed in range(5)))
    assert [a.tokens for a in answers] == [expected_tokens(prompt_of(40, seed), 60) for seed in range(5)]
    assert client.frames - before < 5 * 60 * 0.8  # five streams shared most of their frames


async def test_max_tokens_1_needs_no_reservation_and_no_decode_step(client):
    answer = await client.generate(prompt_of(50), replace(GREEDY, max_tokens=1))
    assert answer.tokens == expected_tokens(prompt_of(50), 1)
    assert answer.events == ["started", "first_token"]
    assert answer.finish.reason == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_stop_token_as_first_token_ends_without_a_hand_over(client, ignore_eos):
    """Report S08: the stop comes from the prefill group; the reservation is given back."""
    stop = 2 if not ignore_eos else 77
    own = frozenset() if not ignore_eos else frozenset({77})
    sampling = replace(GREEDY, ignore_eos=ignore_eos, logit_bias={stop: 100.0}, stop_token_ids=own)
    answer = await client.generate(prompt_of(50), sampling)
    assert answer.tokens == [stop]
    assert answer.finish.stop_token_id == stop
    assert answer.events == ["started", "first_token"]


async def test_stop_token_in_decode_is_the_last_token(client):
    tokens = expected_tokens(prompt_of(33), 20)
    answer = await client.generate(prompt_of(33), replace(GREEDY, stop_token_ids=frozenset({tokens[7]})))
    assert answer.tokens == tokens[: tokens.index(tokens[7]) + 1]
    assert answer.finish.stop_token_id == tokens[7]


async def test_stop_string_over_token_borders_is_never_sent(client):
    """Report S06, in the whole path: also when its beginning is the first token, which the prefill group must hold back."""
    from common.token_bytes import TokenBytes

    text_of = TokenBytes(find_vocabulary().parent).of
    tokens = expected_tokens(prompt_of(60), 20)
    pieces = [text_of(token) for token in tokens]
    for first, cut in ((0, 0), (5, 0), (6, 1)):
        stop = b"".join(pieces[first : first + 3])[cut:]
        try:
            text = stop.decode()
        except UnicodeDecodeError:
            continue
        answer = await client.generate(prompt_of(60), replace(GREEDY, stop=(text,)))
        got = b"".join(pieces[: len(answer.tokens)]) + answer.finish.trailing_text
        whole = b"".join(pieces)
        assert answer.tokens == tokens[: len(answer.tokens)]
        assert got == whole[: whole.index(stop)]
        assert answer.finish.stop == text


async def test_nan_logits_fail_their_request_alone(client):
    """Report S04, in prefill and in decode."""
    good = [client.generate(prompt_of(30, seed), replace(GREEDY, max_tokens=40)) for seed in range(3)]
    in_prefill = client.generate([*prompt_of(20), NAN], GREEDY)
    in_decode = client.generate(prompt_of(20), replace(GREEDY, logit_bias={NAN: 100.0}))
    *answers, bad_prefill, bad_decode = await asyncio.gather(*good, in_prefill, in_decode)
    assert [a.tokens for a in answers] == [expected_tokens(prompt_of(30, seed), 40) for seed in range(3)]
    assert (bad_prefill.error, bad_prefill.tokens) == ("INTERNAL", [])
    assert (bad_decode.error, bad_decode.tokens) == ("INTERNAL", [NAN])
    assert "not finite" in bad_prefill.message
    assert "not finite" in bad_decode.message


async def test_failing_prefill_reaches_the_client_at_once_and_hurts_nobody(client):
    """Report P11."""
    beside = asyncio.create_task(client.generate(prompt_of(100), GREEDY))
    started = time.monotonic()
    answer = await client.generate([*prompt_of(70), FAIL], GREEDY)
    assert answer.error == "INTERNAL"
    assert "makes this model fail" in answer.message
    assert time.monotonic() - started < within(1.0)
    assert (await beside).tokens == expected_tokens(prompt_of(100), 20)
    assert (await client.generate(prompt_of(9), GREEDY)).tokens == expected_tokens(prompt_of(9), 20)


async def test_batch_mates_with_every_kind_of_sampling_change_nobody(client):
    """Report S01: a seeded request gives the same tokens alone and in any company."""
    variants = [
        GREEDY,
        replace(GREEDY, temperature=5.0, seed=11),
        replace(GREEDY, temperature=5.0, top_p=0.9, seed=12),
        replace(GREEDY, temperature=5.0, top_k=50, min_p=0.01, seed=2**63 - 1),
        replace(GREEDY, temperature=3.0, presence_penalty=1.0, repetition_penalty=1.2, logprobs=3, seed=0),
        replace(GREEDY, temperature=1.0, allowed_token_ids=frozenset({5, 6, 7}), min_tokens=5, seed=3),
    ]
    alone = [await client.generate(prompt_of(40 + i), params) for i, params in enumerate(variants)]
    together = await asyncio.gather(*(client.generate(prompt_of(40 + i), params) for i, params in enumerate(variants)))
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert alone[0].tokens == expected_tokens(prompt_of(40), 20)
    assert len({tuple(a.tokens) for a in alone}) == len(variants)
    assert len(alone[4].logprobs) == len(alone[4].tokens)


@pytest.mark.parametrize("sent", [1, 5, 19])
async def test_resumed_request_goes_on_exactly(client, sent):
    params = replace(GREEDY, temperature=4.0, presence_penalty=0.5, seed=99)
    whole = await client.generate(prompt_of(45), params)
    resumed = await client.generate(prompt_of(45), params, sent=tuple(whole.tokens[:sent]))
    assert resumed.tokens == whole.tokens
    assert resumed.finish == whole.finish


async def test_same_label_and_same_prompt_twice_at_once(client):
    """Report P09: the client's id is a label only; an internal id that is in use is refused without harm to its owner."""
    first, second = await asyncio.gather(client.generate(prompt_of(90), GREEDY), client.generate(prompt_of(90), GREEDY))
    assert first.tokens == second.tokens == expected_tokens(prompt_of(90), 20)
    work = client.work(prompt_of(30), GREEDY)
    await client.reserve(work)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.reserve(work)
    assert refused.value.code() is grpc.StatusCode.INTERNAL
    await client.decode.Abort(worker_pb2.AbortRequest(internal_id=work.internal_id))


async def test_admission_refuses_at_once_what_does_not_fit_and_the_rest_finishes(client):
    """Report P08: the pool holds 120 blocks = 1,920 tokens; three requests of up to 700 tokens can't run together."""
    params = replace(GREEDY, max_tokens=500)
    tasks = [asyncio.create_task(client.generate(prompt_of(200, seed), params)) for seed in range(4)]
    done: set[asyncio.Task] = set()
    running_on = set(tasks)
    while len(done) < 2:  # an answer at once: long before the first of the others can be through its 500 tokens
        ended, running_on = await asyncio.wait(running_on, return_when=asyncio.FIRST_COMPLETED)
        done |= ended
    assert {task.result().error for task in done} == {"RESOURCE_EXHAUSTED"}
    for answer in await asyncio.gather(*running_on):
        assert len(answer.tokens) == 500
        assert not answer.error


async def test_all_places_of_the_batch_taken_is_an_answer_too(client):
    works = [client.work([5], GREEDY) for _ in range(7)]
    for work in works[:6]:
        await client.reserve(work)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.reserve(works[6])
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for work in works:
        await client.decode.Abort(worker_pb2.AbortRequest(internal_id=work.internal_id))


async def test_cancelled_at_random_moments_every_block_is_free_within_a_second(client):
    """Report P02 without deaths: a third is cancelled anywhere between reservation and last token; the others are not touched."""
    rng = random.Random(5)

    async def one(seed: int) -> None:
        prompt = prompt_of(rng.choice([3, 40, 130, 200]), seed)
        task = asyncio.create_task(client.generate(prompt, replace(GREEDY, max_tokens=60)))
        if seed % 3 == 0:
            await asyncio.sleep(rng.uniform(0, 0.4))
            task.cancel()
            await asyncio.wait([task])
            return
        answer = await task
        if answer.error:
            assert answer.error == "RESOURCE_EXHAUSTED"
        else:
            assert answer.tokens == expected_tokens(prompt, 60)

    for start in range(0, 48, 12):
        await asyncio.gather(*(one(seed) for seed in range(start, start + 12)))
    await client.wait_idle(1.0)


async def test_deadline_ends_a_request_typed_in_each_leg(client):
    waiting = [asyncio.create_task(client.generate(prompt_of(500, seed), GREEDY)) for seed in range(2)]
    await asyncio.sleep(0.05)
    alone = replace(GREEDY, max_tokens=1)  # nothing is reserved, so that no other leg's deadline passes first
    in_queue = await client.generate(prompt_of(40), alone, deadline_ms=20)
    await asyncio.gather(*waiting)
    in_decode = await client.generate(prompt_of(10), replace(GREEDY, max_tokens=1000), deadline_ms=600)
    assert in_queue.error == "DEADLINE_EXCEEDED"
    assert in_decode.error == "DEADLINE_EXCEEDED"
    assert 1 < len(in_decode.tokens) < 1000


async def test_broken_token_stream_comes_back_without_gap_or_repeat(client):
    task = asyncio.create_task(client.generate(prompt_of(20), replace(GREEDY, max_tokens=150)))
    for _ in range(3):
        await asyncio.sleep(0.12)
        await client.unsubscribe()
        await asyncio.sleep(0.05)
        client.subscribe()
    assert (await task).tokens == expected_tokens(prompt_of(20), 150)


async def test_drained_groups_take_nothing_new_and_finish_what_they_have(client):
    running_on = asyncio.create_task(client.generate(prompt_of(60), replace(GREEDY, max_tokens=100)))
    await asyncio.sleep(0.1)
    for stub in (client.prefill, client.decode):
        await stub.Drain(worker_pb2.DrainRequest(drain=True))
    assert (await client.generate(prompt_of(5), GREEDY)).error == "RESOURCE_EXHAUSTED"
    assert (await client.generate(prompt_of(5), replace(GREEDY, max_tokens=1))).error == "RESOURCE_EXHAUSTED"
    assert [load.draining for load in await client.loads()] == [True, True]
    for stub in (client.prefill, client.decode):
        await stub.Drain(worker_pb2.DrainRequest(drain=False))
    assert (await running_on).tokens == expected_tokens(prompt_of(60), 100)
    assert not (await client.generate(prompt_of(5), GREEDY)).error


async def test_group_tells_what_it_is(client, groups):
    description = await client.decode.Describe(worker_pb2.DescribeRequest())
    assert description == groups[1].description
    assert (description.role, description.layout.tp, description.capacity_tokens) == (types_pb2.ROLE_DECODE, 2, 120 * 16)
    assert [process.pid for process in description.ranks] == [process.pid for process in groups[1].processes]
