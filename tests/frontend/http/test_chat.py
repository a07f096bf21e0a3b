"""/v1/chat/completions over real HTTP and gRPC: whole and streamed answers agree, for every chunking."""

from __future__ import annotations

import json
import math
from typing import Any

import grpc
import pytest

from common.proto import types_pb2
from frontend.harmony.format import HarmonyFormat
from frontend.settings import FrontendSettings
from tests.frontend.support.fake_router import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = [{"role": "user", "content": "What is 2+2?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NEXT = "<|start|>assistant"
CALL_HEADER = "to=functions.get_weather<|channel|>commentary"
CALL = f'<|channel|>analysis<|message|>t<|end|>{NEXT} {CALL_HEADER} <|constrain|>json<|message|>{{"city":"Ulm"}}<|call|>'
TEXTS = {
    "answer": f"<|channel|>analysis<|message|>think 🍎<|end|>{NEXT}<|channel|>final<|message|>The 👩‍🚀 answer is 4.<|return|>",
    "call": CALL,
    "preamble and call": f"<|channel|>commentary<|message|>Let me see<|end|>{NEXT} {CALL_HEADER}<|message|>{{}}<|call|>",
    "two answers": "<|channel|>final<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>two<|return|>",
    "two calls": f" {CALL_HEADER}<|message|>{{}}<|end|>{NEXT} {CALL_HEADER}<|message|>[]<|call|>",
    "refusal": "I’m sorry, but I can’t.<|end|>",
    "only thought": "<|channel|>analysis<|message|>hm<|return|>",
    "nothing": "<|return|>",
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-oss-20b", "messages": USER, **fields}


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the deltas of a stream add up to, in the shape of a whole answer's choice."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish, flags, logprobs = None, None, []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert finish is None, "a chunk after the finish"
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            logprobs += (choice["logprobs"] or {}).get("content", [])
            finish, flags = choice["finish_reason"], choice.get("tandem")
    return {**message, "finish": finish, "tandem": flags, "logprobs": logprobs}


def whole(answer: dict[str, Any], index: int = 0) -> dict[str, Any]:
    choice = answer["choices"][index]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": calls,
        "finish": choice["finish_reason"],
        "tandem": choice.get("tandem"),
        "logprobs": (choice["logprobs"] or {}).get("content", []),
    }


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", TEXTS)
async def test_stream_and_whole_answer_agree(start, ids_of, name: str, chunk: int):
    stack = await start(Script(ids_of(TEXTS[name]), chunk=chunk))
    request = body(tools=[WEATHER], logprobs=True, top_logprobs=2)
    answer = (await stack.http.post("/v1/chat/completions", json=request)).json()
    stream = await stack.http.post("/v1/chat/completions", json=request | {"stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert joined(events(stream.text)) == whole(answer)
    assert "<|" not in stream.text


async def test_whole_answer_has_the_fields_of_openai(start):
    stack = await start()
    answer = await stack.openai.chat.completions.create(model="gpt-oss-20b", messages=USER, logprobs=True, top_logprobs=1)
    message = answer.choices[0].message
    assert (message.content, message.role, answer.choices[0].finish_reason) == ("The answer is 4.", "assistant", "stop")
    assert message.reasoning_content == message.reasoning == "think 🍎"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(stack.router.requests[0].tokenized.input_ids)
    assert answer.usage.completion_tokens == 19
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == "The answer is 4."
    assert tokens[0].top_logprobs[0].token == "token_id:200002", "a special token is named by id, not by its marker"


async def test_prompt_is_the_formats_own_rendering(start, harmony: HarmonyFormat):
    stack = await start()
    await stack.openai.chat.completions.create(model="gpt-oss-20b", messages=USER, reasoning_effort="high", tools=[WEATHER])
    text = b"".join(harmony.token_bytes(i) for i in stack.router.requests[0].tokenized.input_ids).decode()
    assert "Reasoning: high" in text
    assert "namespace functions {\n\n// Weather\ntype get_weather" in text
    assert list(stack.router.requests[0].sampling_params.stop_token_ids) == [200002, 200012]
    assert not stack.router.requests[0].sampling_params.stop, "stop strings act on visible text, in the frontend"


@pytest.mark.parametrize("stream", [False, True])
async def test_agent_loop_with_the_real_client(start, ids_of, stream: bool):
    replies = [CALL, CALL.replace("Ulm", "Bonn"), TEXTS["answer"]]
    stack = await start(lambda request, index: Script(ids_of(replies[len(stack.router.requests) - 1])))
    messages: list[Any] = list(USER)
    for _ in range(2):
        if stream:
            async with stack.openai.chat.completions.stream(model="gpt-oss-20b", messages=messages, tools=[WEATHER]) as running:
                completion = await running.get_final_completion()
        else:
            completion = await stack.openai.chat.completions.create(model="gpt-oss-20b", messages=messages, tools=[WEATHER])
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls"
        call = choice.message.tool_calls[0]
        assert json.loads(call.function.arguments)["city"] in ("Ulm", "Bonn")
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    last = await stack.openai.chat.completions.create(model="gpt-oss-20b", messages=messages, tools=[WEATHER])
    assert last.choices[0].message.content == "The 👩‍🚀 answer is 4."
    prompt = list(stack.router.requests[-1].tokenized.input_ids)
    assert prompt.count(200012) == 2, "both calls are in the last prompt"
    assert prompt.count(35644) == 2, "thoughts are kept within the tool loop"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.25}, {"top_p": 0.5, "top_k": 7, "min_p": 0.25}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": None}, {"max_tokens": None}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"seed": 0}, {"seed": 0}),
        ({"presence_penalty": -2, "frequency_penalty": 1.5}, {"presence_penalty": -2.0, "frequency_penalty": 1.5}),
        ({"n": 3}, {"n": 3}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}, {}),
        ({"response_format": {"type": "text"}, "modalities": ["text"]}, {}),
    ],
    ids=str,
)
async def test_fields_reach_the_router(start, fields, expected):
    stack = await start()
    response = await stack.http.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    params = stack.router.requests[0].sampling_params
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "n", "logprobs", "presence_penalty", "frequency_penalty")
    for name in names:
        wanted = expected.get(name, 1 if name == "n" else None)
        assert (getattr(params, name) if params.HasField(name) else None) == wanted, name


async def test_logit_bias_and_serving_headers_reach_the_router(start):
    stack = await start()
    headers = {
        "x-tandem-ttft-ms": "250",
        "x-tandem-itl-ms": "12.5",
        "x-tandem-priority": "-5",
        "x-tandem-latency-weight": "0.9",
        "x-tandem-deadline-ms": "1500",
        "x-request-id": "my-id",
    }
    response = await stack.http.post("/v1/chat/completions", json=body(logit_bias={"200002": -100, "17": 1.5}), headers=headers)
    request = stack.router.requests[0]
    assert dict(request.sampling_params.logit_bias) == {200002: -100.0, 17: 1.5}
    assert (request.slo.ttft_ms, request.slo.itl_ms, request.priority, request.latency_weight) == (250, 12.5, -5, 0.9)
    assert request.request_id == response.headers["x-request-id"] == "my-id"
    assert 0 < stack.router.deadlines_s[0] < 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ahead", [False, True], ids=["told at the end", "told ahead"])
async def test_route_is_told_in_a_header_and_if_asked_in_the_body(start, stream: bool, ahead: bool):
    stack = await start()
    stack.router.sends_decision = ahead
    headers = {"x-tandem-include-route": "true"}
    response = await stack.http.post("/v1/chat/completions", json=body(stream=stream), headers=headers)
    assert response.headers.get("x-tandem-route", "").startswith("prefill=prefill-tp1; decode=decode-ep4; ttft_ms=120.500") == (
        ahead or not stream
    )
    last = events(response.text)[-1] if stream else response.json()
    candidates = last["tandem"]["route"]["decision"]["candidates"]
    assert [c["prefill_pool"] for c in candidates] == ["prefill-tp4", "prefill-tp1"]
    silent = await stack.http.post("/v1/chat/completions", json=body())
    assert "tandem" not in silent.json()


async def test_usage_is_streamed_only_if_asked(start):
    stack = await start()
    chunks = events((await stack.http.post("/v1/chat/completions", json=body(stream=True))).text)
    assert not any("usage" in chunk for chunk in chunks)
    asked = body(stream=True, stream_options={"include_usage": True})
    chunks = events((await stack.http.post("/v1/chat/completions", json=asked)).text)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 19


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_kept_apart(start, ids_of, stream: bool):
    texts = [f"<|channel|>final<|message|>answer {i}<|return|>" for i in range(3)]
    stack = await start(lambda request, index: Script(ids_of(texts[index])))
    response = await stack.http.post("/v1/chat/completions", json=body(n=3, stream=stream))
    for index in range(3):
        choice = joined(events(response.text), index) if stream else whole(response.json(), index)
        assert choice["content"] == f"answer {index}"


@pytest.mark.parametrize("chunk", [1, 2, 7])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_never_leak_and_end_the_request(start, ids_of, stream: bool, chunk: int):
    text = (
        "<|channel|>analysis<|message|>DEFG in thought<|end|><|start|>assistant<|channel|>final<|message|>ABCDEFGHIJKLMN and on<|return|>"
    )
    stack = await start(Script(ids_of(text), chunk=chunk, gap_s=0.002))
    response = await stack.http.post("/v1/chat/completions", json=body(stop=["DEFG", "XYZ"], stream=stream))
    choice = joined(events(response.text)) if stream else whole(response.json())
    assert (choice["content"], choice["reasoning_content"], choice["finish"]) == ("ABC", "DEFG in thought", "stop")
    await stack.until_idle()


async def test_text_that_only_began_a_stop_string_is_sent(start, ids_of):
    stack = await start(Script(ids_of("<|channel|>final<|message|>ABCDEF<|return|>")))
    response = await stack.http.post("/v1/chat/completions", json=body(stop="DEFGHIJ", stream=True))
    assert joined(events(response.text))["content"] == "ABCDEF"


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 8])
async def test_length_is_told_and_the_rest_is_whole(start, ids_of, limit: int):
    stack = await start(Script(ids_of("<|channel|>final<|message|>👩‍🚀👩‍🚀<|return|>")))
    response = await stack.http.post("/v1/chat/completions", json=body(max_completion_tokens=limit))
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].count("\ufffd") <= 1
    assert choice.get("tandem", {}).get("content_missing", False) == (choice["message"]["content"] == "")


async def test_missing_content_and_repairs_are_flagged_and_counted(start):
    stack = await start("<|channel|>analysis<|message|>hm<|end|><|end|><|return|>", settings=FrontendSettings())
    choice = (await stack.http.post("/v1/chat/completions", json=body())).json()["choices"][0]
    assert choice["message"]["content"] == ""
    assert choice["tandem"] == {"content_missing": True, "repairs": {"extra_stop": 2}}
    metrics = await stack.metrics()
    assert 'tandem_frontend_harmony_repairs_total{kind="extra_stop"} 2.0' in metrics
    assert "tandem_frontend_content_missing_total 1.0" in metrics


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_calls_can_be_switched_off(start, stream: bool, parallel: bool):
    stack = await start(TEXTS["two calls"])
    response = await stack.http.post("/v1/chat/completions", json=body(tools=[WEATHER], parallel_tool_calls=parallel, stream=stream))
    choice = joined(events(response.text)) if stream else whole(response.json())
    assert [call["arguments"] for call in choice["tool_calls"]] == ["{}", "[]"][: 2 if parallel else 1]


async def test_a_forced_call_is_answered_as_a_call(start):
    stack = await start('{"city":"Ulm"}<|call|>')
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = (await stack.http.post("/v1/chat/completions", json=body(tools=[WEATHER], tool_choice=choice))).json()
    assert whole(answer)["tool_calls"] == [{"name": "get_weather", "arguments": '{"city":"Ulm"}'}]
    assert stack.router.requests[0].tokenized.input_ids[-1] == 200008, "the prompt ends in the call's header"


@pytest.mark.parametrize("logprob", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_finite(start, ids_of, logprob: float, stream: bool):
    stack = await start(Script(ids_of(TEXTS["answer"]), logprob=logprob))
    response = await stack.http.post("/v1/chat/completions", json=body(logprobs=True, top_logprobs=1, stream=stream))
    choice = joined(events(response.text)) if stream else whole(response.json())
    assert {token["logprob"] for token in choice["logprobs"]} == {-9999.0}


async def test_an_engine_that_runs_past_the_call_is_stopped(start, ids_of):
    stack = await start(
        Script(ids_of(CALL + "<|start|>assistant<|channel|>final<|message|>x" + " and on" * 1000), runs_on=True, gap_s=0.002)
    )
    answer = (await stack.http.post("/v1/chat/completions", json=body(tools=[WEATHER]))).json()
    assert whole(answer)["finish"] == "tool_calls"
    assert whole(answer)["content"] == ""
    await stack.until_idle()
    assert stack.router.num_cancelled == 1


async def test_a_stop_token_told_but_not_sent_still_ends_the_call(start, ids_of):
    def script(request, index):
        return Script(ids_of(CALL)[:-1], reason=types_pb2.FINISH_REASON_STOP)

    stack = await start(script)
    answer = (await stack.http.post("/v1/chat/completions", json=body(tools=[WEATHER]))).json()
    assert whole(answer)["finish"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_router_that_breaks_after_the_last_token_spoils_nothing(start, ids_of, stream: bool):
    stack = await start(Script(ids_of(TEXTS["answer"]), error=(grpc.StatusCode.UNAVAILABLE, "gone"), fails_after=1000))
    response = await stack.http.post("/v1/chat/completions", json=body(stream=stream))
    choice = joined(events(response.text)) if stream else whole(response.json())
    assert (response.status_code, choice["finish"], choice["content"]) == (200, "stop", "The 👩‍🚀 answer is 4.")
