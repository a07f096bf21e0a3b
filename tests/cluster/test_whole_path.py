"""Ray, transfer, gRPC and the model together give what `transformers` gives; and nothing is lost when clients come and go."""

from __future__ import annotations

import asyncio
import random

import grpc
import numpy as np
import pytest
import torch

from common.proto import router_pb2, router_pb2_grpc, types_pb2
from tests.support.local_cluster import VOCAB_SIZE, ask, channel_of, request, wait_idle
from tests.support.pace import within

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT_LENGTHS = (1, 15, 16, 17, 127, 128, 129, 130, 257, 1000)
NEW_TOKENS = 40


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, length)).integers(3, VOCAB_SIZE, length).tolist()


@torch.no_grad()
def reference_greedy(model, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Returns: tokens, and the logits [count, V] that chose them"""
    out = model(torch.tensor([prompt]), use_cache=True)
    tokens, rows = [], []
    for _ in range(count):
        rows.append(out.logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
        out = model(torch.tensor([[tokens[-1]]]), cache=out.past_key_values, use_cache=True)
    return tokens, torch.stack(rows)


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
async def test_the_whole_path_gives_the_tokens_and_logprobs_of_transformers(local_cluster, reference, length):
    prompt = prompt_of(length)
    expected, logits = reference_greedy(reference, prompt, NEW_TOKENS)
    async with channel_of(local_cluster) as channel:
        answer = await ask(router_pb2_grpc.RouterStub(channel), request(prompt, max_tokens=NEW_TOKENS, logprobs=20))
    assert answer.tokens == expected
    logprobs = torch.log_softmax(logits, dim=-1)
    for row, got in zip(logprobs, answer.logprobs, strict=True):
        ids = [top.token_id for top in got.top]
        assert len(ids) == 20
        assert max(abs(row[i].item() - top.logprob) for i, top in zip(ids, got.top, strict=True)) < 1e-3
    assert answer.complete.finish_reason.reason == types_pb2.FINISH_REASON_LENGTH
    assert (answer.complete.usage.prompt_tokens, answer.complete.usage.completion_tokens) == (length, NEW_TOKENS)


async def test_both_prefill_layouts_serve_and_agree(local_cluster):
    """Many at once, so that late binding uses every prefill group; equal prompts give equal tokens wherever they ran."""
    prompt = prompt_of(300)
    async with channel_of(local_cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        answers = await asyncio.gather(*(ask(stub, request(prompt, max_tokens=8)) for _ in range(16)))
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    chosen = {c.prefill_pool for a in answers for c in a.complete.route.decision.candidates if c.chosen}
    assert chosen == {"prefill-tp1", "prefill-tp2"}


async def test_the_route_report_compares_what_was_predicted_with_what_it_took(local_cluster):
    async with channel_of(local_cluster) as channel:
        answer = await ask(router_pb2_grpc.RouterStub(channel), request(prompt_of(64), max_tokens=10))
    report = answer.complete.route
    assert [c.chosen for c in report.decision.candidates].count(True) == 1
    assert all(c.reason for c in report.decision.candidates)
    assert 0 < report.actual.prefill_ms <= report.actual.ttft_ms
    assert report.actual.itl_ms > 0
    assert report.actual.cost_usd > 0


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_first_token_at_the_limit_ends_without_a_hand_over(local_cluster, max_tokens):
    async with channel_of(local_cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        answer = await ask(stub, request(prompt_of(33), max_tokens=max_tokens))
        await wait_idle(stub, 2.0)
    assert len(answer.tokens) == max_tokens
    assert (answer.complete.route.actual.transfer_ms == 0) == (max_tokens == 1)


async def test_n_choices_are_independent_and_all_end(local_cluster):
    async with channel_of(local_cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        tokens: dict[int, list[int]] = {}
        ended = []
        async for response in stub.Generate(request(prompt_of(20), max_tokens=6, n=3, temperature=1.0, seed=5), timeout=60):
            if response.HasField("chunk"):
                tokens.setdefault(response.chunk.index, []).extend(response.chunk.token_ids)
            else:
                ended.append(response.complete.index)
    assert sorted(ended) == [0, 1, 2]
    assert all(len(t) == 6 for t in tokens.values())
    assert len({tuple(t) for t in tokens.values()}) == 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.nightly)])
async def test_nothing_is_lost_when_a_third_is_cancelled_at_random(local_cluster, reference, count):
    """64 requests at once: each ends exactly once, blocks come back within a second, the others' tokens are untouched."""
    chance = random.Random(20251130)
    prompts = [prompt_of(length, seed=9) for length in (5, 17, 40, 129, 200)]
    expected = [reference_greedy(reference, prompt, 12)[0] for prompt in prompts]
    gate = asyncio.Semaphore(64)
    endings: dict[str, int] = {"ok": 0, "cancelled": 0}

    async def one(stub, number: int, cancel_after_s: float | None) -> None:
        which = number % len(prompts)
        message = request(prompts[which], max_tokens=12)
        async with gate:
            call = asyncio.create_task(ask(stub, message, timeout_s=300))
            if cancel_after_s is not None:
                await asyncio.wait([call], timeout=cancel_after_s)
                if not call.done():
                    call.cancel()
            try:
                answer = await call
            except asyncio.CancelledError:
                endings["cancelled"] += 1
                return
            assert answer.tokens == expected[which]
            endings["ok"] += 1

    async with channel_of(local_cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        plans = [chance.uniform(0, 1.5) if chance.random() < 1 / 3 else None for _ in range(count)]
        await asyncio.gather(*(one(stub, number, plan) for number, plan in enumerate(plans)))
        took_s = await wait_idle(stub, 1.0)
    assert endings["ok"] + endings["cancelled"] == count
    assert endings["cancelled"] > count * 3 // 20, "the test must really cancel"
    assert took_s <= within(1.0)


BAD = [
    (lambda m: m.tokenized.ClearField("input_ids"), "tokenized.input_ids"),
    (lambda m: m.tokenized.input_ids.append(VOCAB_SIZE), "tokenized.input_ids"),
    (lambda m: m.tokenized.input_ids.extend([3] * 3000), "tokenized.input_ids"),
    (lambda m: setattr(m.sampling_params, "temperature", float("nan")), "sampling_params.temperature"),
    (lambda m: setattr(m.sampling_params, "max_tokens", 0), "sampling_params.max_tokens"),
    (lambda m: m.sampling_params.stop_token_ids.append(VOCAB_SIZE), "sampling_params.stop_token_ids"),
    (lambda m: m.sampling_params.logit_bias.__setitem__(VOCAB_SIZE, 5.0), "sampling_params.logit_bias"),
    (lambda m: setattr(m, "request_id", "x" * (1 << 20)), "request_id"),
]


@pytest.mark.parametrize(("spoil", "field"), BAD, ids=[field for _, field in BAD])
async def test_bad_input_is_refused_by_name_in_time_and_harms_nothing(local_cluster, spoil, field):
    async with channel_of(local_cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        before = {p.pid for g in (await stub.GetLoads(router_pb2.GetLoadsRequest())).groups for p in g.description.ranks}
        message = request(prompt_of(8), max_tokens=4)
        spoil(message)
        started = asyncio.get_running_loop().time()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stub, message)
        took_s = asyncio.get_running_loop().time() - started
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith(field)
        assert took_s < within(0.1)
        after = {p.pid for g in (await stub.GetLoads(router_pb2.GetLoadsRequest())).groups for p in g.description.ranks}
    assert after == before
    assert before
