"""tandem.chat.v1.Chat over real gRPC: the same answers, limits and errors as HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.proto import chat_pb2, chat_pb2_grpc, types_pb2
from frontend.harmony.format import HarmonyFormat
from frontend.settings import FrontendSettings
from tests.frontend.support.fake_router import Script
from tests.frontend.support.stack import Stack, running_stack

NEXT = "<|start|>assistant"
ANSWER = f"<|channel|>analysis<|message|>think 🍎<|end|>{NEXT}<|channel|>final<|message|>The answer is 4.<|return|>"
CALL = f'<|channel|>analysis<|message|>t<|end|>{NEXT} to=functions.f<|channel|>commentary <|constrain|>json<|message|>{{"a":1}}<|call|>'
USER = chat_pb2.Message(role="user", content="What is 2+2?")


@contextlib.asynccontextmanager
async def chat(harmony: HarmonyFormat, script, **settings) -> AsyncIterator[tuple[Stack, chat_pb2_grpc.ChatStub]]:
    if isinstance(script, str):
        ids = harmony.vocabulary.harmony.encode(script, allowed_special="all")
        script = Script(ids)
    function = script if callable(script) else lambda request, index: script
    async with (
        running_stack(harmony, function, FrontendSettings(grpc_listen="127.0.0.1:0", **settings)) as stack,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel,
    ):
        yield stack, chat_pb2_grpc.ChatStub(channel)


async def read(call) -> dict:
    """What the events of one reply add up to."""
    got: dict = {"content": "", "reasoning": "", "calls": [], "order": []}
    async for response in call:
        kind = response.WhichOneof("event")
        got["order"].append(kind)
        if kind in ("content", "reasoning"):
            got[kind] += getattr(response, kind)
        elif kind == "tool_call_start":
            got["calls"].append([response.tool_call_start.name, ""])
        elif kind == "tool_call_arguments":
            got["calls"][response.tool_call_arguments.call_index][1] += response.tool_call_arguments.text
        else:
            got[kind] = getattr(response, kind)
    return got


@pytest.mark.parametrize("chunk", [1, 2, 7])
async def test_an_answer_comes_as_deltas_between_route_and_summary(harmony: HarmonyFormat, chunk: int):
    ids = harmony.vocabulary.harmony.encode(ANSWER, allowed_special="all")
    async with chat(harmony, Script(ids, chunk=chunk)) as (stack, stub):
        got = await read(stub.Complete(chat_pb2.CompleteRequest(messages=[USER], request_id="mine")))
        assert stack.router.requests[0].request_id == "mine"
    assert (got["content"], got["reasoning"]) == ("The answer is 4.", "think 🍎")
    assert (got["finish"].reason, got["finish"].content_missing) == ("stop", False)
    assert got["order"][0] == "route"
    assert got["order"][-1] == "summary"
    assert got["route"].candidates[1].chosen
    assert got["summary"].usage.completion_tokens == 19
    assert got["summary"].route.decision == got["route"]


async def test_an_agent_loop_keeps_thoughts_and_results_in_the_prompt(harmony: HarmonyFormat):
    replies = [CALL, ANSWER]
    encode = harmony.vocabulary.harmony.encode
    tools = [chat_pb2.Tool(name="f", description="F", parameters='{"type":"object","properties":{"a":{"type":"integer"}}}')]
    messages = [USER]

    def script(request, index):
        return Script(encode(replies[len(stack.router.requests) - 1], allowed_special="all"))

    async with chat(harmony, script) as (stack, stub):
        first = await read(stub.Complete(chat_pb2.CompleteRequest(messages=messages, tools=tools)))
        assert first["calls"] == [["f", '{"a":1}']]
        assert first["finish"].reason == "tool_calls"
        call = chat_pb2.ToolCall(id="1", name="f", arguments='{"a":1}')
        messages += [
            chat_pb2.Message(role="assistant", reasoning=first["reasoning"], tool_calls=[call]),
            chat_pb2.Message(role="tool", tool_call_id="1", content="4"),
        ]
        second = await read(stub.Complete(chat_pb2.CompleteRequest(messages=messages, tools=tools)))
        prompt = list(stack.router.requests[1].tokenized.input_ids)
    assert second["content"] == "The answer is 4."
    assert (prompt.count(200012), prompt.count(35644)) == (1, 1)


async def test_sampling_and_wishes_reach_the_router_and_stops_stay(harmony: HarmonyFormat):
    request = chat_pb2.CompleteRequest(
        messages=[USER],
        sampling_params=types_pb2.SamplingParams(temperature=0.5, max_tokens=7, seed=3, stop=["answer"]),
        slo=types_pb2.Slo(ttft_ms=100),
        priority=-3,
        latency_weight=0.75,
        reasoning_effort=chat_pb2.REASONING_EFFORT_HIGH,
    )
    async with chat(harmony, ANSWER) as (stack, stub):
        request.sampling_params.max_tokens = 100
        got = await read(stub.Complete(request, timeout=20))
        sent = stack.router.requests[0]
        assert stack.router.deadlines_s[0] < 21
    assert got["content"] == "The "
    assert (sent.sampling_params.temperature, sent.sampling_params.max_tokens, sent.sampling_params.seed) == (0.5, 100, 3)
    assert not sent.sampling_params.stop
    assert list(sent.sampling_params.stop_token_ids) == [200002, 200012]
    assert (sent.slo.ttft_ms, sent.priority, sent.latency_weight) == (100, -3, 0.75)
    text = b"".join(harmony.token_bytes(token) for token in sent.tokenized.input_ids).decode()
    assert "Reasoning: high" in text


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat_pb2.CompleteRequest(), "messages"),
        (chat_pb2.CompleteRequest(messages=[chat_pb2.Message(role="robot")]), "messages[0].role"),
        (chat_pb2.CompleteRequest(messages=[USER], tools=[chat_pb2.Tool(name="f", parameters="{")]), "tools[0].parameters"),
        (chat_pb2.CompleteRequest(messages=[USER], tools=[chat_pb2.Tool(name="a b")]), "tools[0].function.name"),
        (chat_pb2.CompleteRequest(messages=[USER], tool_name="f"), "tool_choice"),
        (chat_pb2.CompleteRequest(messages=[USER], reasoning_effort=9), "reasoning_effort"),
        (chat_pb2.CompleteRequest(messages=[USER], sampling_params=types_pb2.SamplingParams(n=99)), "sampling_params.n"),
        (chat_pb2.CompleteRequest(messages=[USER], sampling_params=types_pb2.SamplingParams(stop=[""])), "sampling_params.stop"),
        (chat_pb2.CompleteRequest(messages=[USER], sampling_params=types_pb2.SamplingParams(ignore_eos=True)), "sampling_params"),
        (chat_pb2.CompleteRequest(messages=[USER], sampling_params=types_pb2.SamplingParams(logprobs=1)), "sampling_params.logprobs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_wrong_requests_are_refused_by_name(harmony: HarmonyFormat, request_: chat_pb2.CompleteRequest, field: str):
    async with chat(harmony, ANSWER) as (stack, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(stub.Complete(request_))
        assert not stack.router.requests
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(field)


async def test_keys_limits_and_router_errors_have_their_status(harmony: HarmonyFormat, tmp_path: Path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: sk-first-key, name: first, priority: 5, max_running: 1}\n")
    ids = harmony.vocabulary.harmony.encode("<|channel|>final<|message|>" + " so" * 500, allowed_special="all")
    own = (("authorization", "Bearer sk-first-key"),)
    async with chat(harmony, Script(ids, gap_s=0.01), keys_file=keys) as (stack, stub):
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await read(stub.Complete(chat_pb2.CompleteRequest(messages=[USER])))
        running = stub.Complete(chat_pb2.CompleteRequest(messages=[USER], priority=50), metadata=own)
        await stack.router.until_open(1)
        assert stack.router.requests[0].priority == 5, "a key's priority is its most"
        with pytest.raises(grpc.aio.AioRpcError) as beyond:
            await read(stub.Complete(chat_pb2.CompleteRequest(messages=[USER]), metadata=own))
        running.cancel()
        await stack.until_idle()
        stack.router.reset(lambda request, index: Script([1], error=(grpc.StatusCode.UNAVAILABLE, "no healthy group")))
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await read(stub.Complete(chat_pb2.CompleteRequest(messages=[USER]), metadata=own))
    codes = [caught.value.code() for caught in (unknown, beyond, lost)]
    assert codes == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE]


async def test_a_running_call_finishes_while_the_frontend_ends(harmony: HarmonyFormat):
    ids = harmony.vocabulary.harmony.encode("<|channel|>final<|message|>" + " so" * 60 + "<|return|>", allowed_special="all")
    async with chat(harmony, Script(ids, gap_s=0.01), drain_s=20.0) as (stack, stub):
        reading = asyncio.create_task(read(stub.Complete(chat_pb2.CompleteRequest(messages=[USER]))))
        await stack.router.until_open(1)
        stack.service.drain()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(stub.Complete(chat_pb2.CompleteRequest(messages=[USER])))
        stack.server.should_exit = True
        got = await reading
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert got["content"] == " so" * 60


async def test_health_and_reflection_are_served(harmony: HarmonyFormat):
    async with chat(harmony, ANSWER) as (stack, _), grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="tandem.chat.v1.Chat"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
