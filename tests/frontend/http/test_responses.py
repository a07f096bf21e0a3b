"""/v1/responses: items in, items out; the stream's events add up to the whole answer, and the real client reads both."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from common.proto import types_pb2
from frontend.harmony.format import HarmonyFormat
from tests.frontend.support.fake_router import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
CALL = (
    "<|channel|>analysis<|message|>look<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see<|end|>"
    '<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city":"Ulm"}<|call|>'
)
ANSWER = "<|channel|>analysis<|message|>think 🍎<|end|><|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>"


def events(text: str) -> list[dict[str, Any]]:
    parsed = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    return parsed


def parts_of(stream: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["part"] for event in stream if event["type"] == kind]


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("text", [CALL, ANSWER, "I can’t.<|end|>", "<|channel|>analysis<|message|>hm<|return|>"])
@pytest.mark.parametrize("chunk", [1, 7])
async def test_stream_and_whole_answer_agree(start, ids_of, text: str, chunk: int):
    stack = await start(Script(ids_of(text), chunk=chunk))
    request = {"model": "gpt-oss-20b", "input": "hi", "tools": [TOOL], "top_logprobs": 1}
    whole = (await stack.http.post("/v1/responses", json=request)).json()
    stream = events((await stack.http.post("/v1/responses", json=request | {"stream": True})).text)
    assert stream[-1]["type"] == "response.completed"
    assert [event["response"]["output"] for event in stream[:2]] == [[], []], "nothing is there yet, however much comes with it"
    assert all(not part["text"] and not part.get("logprobs") for part in parts_of(stream, "response.content_part.added"))
    assert without_ids(stream[-1]["response"]) == without_ids(whole)
    deltas: dict[int, str] = {}
    for event in stream:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    said = [item.get("arguments") or item["content"][0]["text"] for item in whole["output"]]
    assert list(deltas.values()) == said


async def test_tool_loop_with_the_real_client(start, ids_of, harmony: HarmonyFormat):
    stack = await start(lambda request, index: Script(ids_of([CALL, ANSWER][len(stack.router.requests) - 1])))
    first = await stack.openai.responses.create(model="gpt-oss-20b", input="weather?", tools=[TOOL], instructions="Be brief.")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[-1]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Ulm"})
    items: list[Any] = [{"role": "user", "content": "weather?"}, *[item.model_dump(exclude_none=True) for item in first.output]]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    async with stack.openai.responses.stream(model="gpt-oss-20b", input=items, tools=[TOOL]) as running:
        last = await running.get_final_response()
    assert last.output_text == "It is sunny."
    assert last.usage.output_tokens_details.reasoning_tokens == 3
    prompt = b"".join(harmony.token_bytes(i) for i in stack.router.requests[-1].tokenized.input_ids).decode()
    assert prompt.endswith(
        "assistantanalysislook"
        "assistantcommentaryLet me see"
        'assistant to=functions.get_weathercommentary json{"city":"Ulm"}'
        "functions.get_weather to=assistantcommentarysunny"
        "assistant"
    )


async def test_a_cut_answer_is_incomplete(start, ids_of):
    stack = await start(Script(ids_of(ANSWER)))
    answer = await stack.openai.responses.create(model="gpt-oss-20b", input="hi", max_output_tokens=len(ids_of(ANSWER)) - 2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in answer.output] == ["completed", "incomplete"]


async def test_a_cut_call_is_incomplete(start, ids_of):
    stack = await start(Script(ids_of(CALL)[:-3], reason=types_pb2.FINISH_REASON_LENGTH))
    answer = await stack.openai.responses.create(model="gpt-oss-20b", input="hi", tools=[TOOL])
    assert [(item.type, item.status) for item in answer.output][-1] == ("function_call", "incomplete")


async def test_include_asks_for_log_probabilities(start, ids_of):
    stack = await start(Script(ids_of(ANSWER)))
    fields = {"model": "gpt-oss-20b", "input": "hi", "include": ["reasoning.encrypted_content"]}
    assert not (await stack.openai.responses.create(**fields)).output[-1].content[0].logprobs
    fields["include"].append("message.output_text.logprobs")
    logprobs = (await stack.openai.responses.create(**fields)).output[-1].content[0].logprobs
    assert "".join(token.token for token in logprobs) == "It is sunny."
    assert not any(token.top_logprobs for token in logprobs)


async def test_a_failure_in_the_stream_is_a_failed_response(start, ids_of):
    stack = await start(Script(ids_of(ANSWER), error=(grpc.StatusCode.UNAVAILABLE, "group lost"), fails_after=6))
    stream = events((await stack.http.post("/v1/responses", json={"model": "gpt-oss-20b", "input": "hi", "stream": True})).text)
    assert stream[-1]["type"] == "response.failed"
    assert "group lost" in stream[-1]["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].content"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"instructions": "Be brief.", "input": [{"role": "clown", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "no such name!", "arguments": "{}"}]}, "input[0].name"),
        (
            {
                "input": [
                    {"role": "assistant", "content": "I look."},
                    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                    {"type": "function_call", "call_id": "b", "name": "f", "arguments": 5},
                ]
            },
            "input[2].arguments",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
    ids=str,
)
async def test_wrong_fields_are_refused_by_name(start, fields: dict[str, Any], param: str):
    stack = await start()
    response = await stack.http.post("/v1/responses", json={"model": "gpt-oss-20b", "input": "hi", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
async def test_half_characters_of_the_client_come_back_replaced(start, ids_of, stream: bool):
    stack = await start(ANSWER)
    fields = {"instructions": "a\ud800", "metadata": {"\udc00k": "\ud83d\ude00\ud83d"}, "user": "\udfff"}
    body = json.dumps({"model": "gpt-oss-20b", "input": "hi", "stream": stream} | fields).encode()
    response = await stack.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200
    answer = events(response.text)[-1]["response"] if stream else response.json()
    assert answer["instructions"] == "a�"
    assert answer["metadata"] == {"�k": "😀�"}


async def test_a_body_that_is_no_utf_8_is_refused(start):
    stack = await start(ANSWER)
    for body in (b'{"model": "gpt-oss-20b", "input": "\xed\xa0\x80"}', '{"input": "hi"}'.encode("utf-16")):
        response = await stack.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
