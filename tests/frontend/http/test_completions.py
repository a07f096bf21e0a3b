"""/v1/completions: text and token ids in, plain text out, several prompts side by side."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from frontend.harmony.format import HarmonyFormat
from tests.frontend.support.fake_router import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-oss-20b", "prompt": "Say it", **fields}


def stream_text(text: str, index: int = 0) -> str:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] is not None for choice in choices].count(True) == 1
    return "".join(choice["text"] for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_text_in_text_out(start, harmony: HarmonyFormat, ids_of, stream: bool):
    stack = await start(Script(ids_of(" naïve 👩‍🚀<|return|>")))
    response = await stack.http.post("/v1/completions", json=body(stream=stream))
    text = stream_text(response.text) if stream else response.json()["choices"][0]["text"]
    assert text == " naïve 👩‍🚀"
    assert list(stack.router.requests[0].tokenized.input_ids) == harmony.encode_text("Say it", field="prompt")


async def test_ids_in_ids_out_with_the_real_client(start):
    stack = await start(Script([11, 22, 200002]))
    answer = await stack.openai.completions.create(model="gpt-oss-20b", prompt=[1, 200006, 3], extra_body={"return_token_ids": True})
    assert list(stack.router.requests[0].tokenized.input_ids) == [1, 200006, 3]
    assert answer.choices[0].token_ids == [11, 22, 200002]
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_times_choices_are_numbered_in_order(start, ids_of, stream: bool):
    def script(request, index):
        return Script(ids_of(f"p{request.tokenized.input_ids[0]} c{index}<|return|>"), gap_s=0.001)

    stack = await start(script)
    response = await stack.http.post("/v1/completions", json=body(prompt=[[5], [6, 7], [8]], n=2, stream=stream))
    expected = [f"p{p} c{c}" for p in (5, 6, 8) for c in range(2)]
    if stream:
        assert [stream_text(response.text, i) for i in range(6)] == expected
    else:
        assert [choice["text"] for choice in response.json()["choices"]] == expected
        assert response.json()["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_prompt_fails_the_request_and_frees_the_others(start, ids_of, stream: bool):
    def script(request, index):
        if request.tokenized.input_ids[0] == 6:
            return Script([1], error=(grpc.StatusCode.UNAVAILABLE, "lost"))
        return Script(ids_of(" and on" * 500), gap_s=0.05)

    stack = await start(script)
    response = await stack.http.post("/v1/completions", json=body(prompt=[[5], [6]], stream=stream))
    assert response.status_code == 503 or '"lost"' in response.text or "lost" in response.text
    await stack.until_idle()


async def test_log_probabilities_have_the_legacy_form(start, ids_of):
    stack = await start(Script(ids_of("ab c<|return|>")))
    answer = (await stack.http.post("/v1/completions", json=body(logprobs=2))).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["ab", " c"]
    assert logprobs["text_offset"] == [0, 2]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert len(logprobs["top_logprobs"][0]) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_act_on_the_text(start, ids_of, stream: bool):
    stack = await start(Script(ids_of("ABCDEFGHIJKLM" * 50), gap_s=0.001))
    response = await stack.http.post("/v1/completions", json=body(stop="FGH", stream=stream))
    assert (stream_text(response.text) if stream else response.json()["choices"][0]["text"]) == "ABCDE"
    await stack.until_idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "x"]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**32]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1]] * 17}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
async def test_wrong_fields_are_refused_by_name(start, fields: dict[str, Any], param: str):
    stack = await start()
    response = await stack.http.post("/v1/completions", json=body(**fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
