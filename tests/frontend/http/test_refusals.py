"""What is not served is refused by name, as OpenAI's clients expect errors; good streams beside it don't notice."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontend.harmony.format import HarmonyFormat
from frontend.settings import FrontendSettings
from tests.frontend.support.fake_router import Script
from tests.frontend.support.stack import Stack, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
WRONG_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**20}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"seed": 10**20}, "seed"),
    ({"seed": -(10**20)}, "seed"),
    ({"seed": "100"}, "seed"),
    ({"seed": True}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"x": 5}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "5"}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream": "yes"}, "stream"),
]


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """None of these requests may reach the router."""
    shared_stack.router.requests.clear()
    return shared_stack


@pytest.mark.parametrize(("fields", "param"), WRONG_CHAT, ids=lambda value: str(value)[:50])
async def test_wrong_fields_are_refused_by_name(stack, fields: dict[str, Any], param: str):
    response = await stack.http.post(CHAT, json={"model": "gpt-oss-20b", "messages": USER, **fields})
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert (error["type"], error["param"].split("[")[0]) == ("invalid_request_error", param.split("[")[0])
    assert error["param"].startswith(param)
    assert error["message"]
    assert not stack.router.requests


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 100_000, b"NaN", b"{}"]
    + [b'{"model":"m","metadata":{"a":%s}}' % value for value in (b"NaN", b"-Infinity", b"1e999")],
    ids=lambda raw: str(raw[:12]),
)
async def test_bodies_that_are_no_request_are_400(stack, path: str, raw: bytes):
    response = await stack.http.post(path, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_model_path_and_method_have_openai_bodies(stack):
    with pytest.raises(openai.NotFoundError, match="gpt-oss-20b"):
        await stack.openai.chat.completions.create(model="gpt-9", messages=USER)
    assert (await stack.http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
    assert (await stack.http.get(CHAT)).status_code == 405
    assert (await stack.http.get("/v1/models/gpt-9")).status_code == 404
    assert (await stack.http.get("/v1/models/gpt-oss-20b")).json()["id"] == "gpt-oss-20b"
    assert [model.id async for model in stack.openai.models.list()] == ["gpt-oss-20b", "/models/gpt-oss-20b"]


@pytest.mark.parametrize(
    "header", ["x-tandem-ttft-ms", "x-tandem-itl-ms", "x-tandem-priority", "x-tandem-latency-weight", "x-tandem-deadline-ms"]
)
@pytest.mark.parametrize("value", ["", "fast", "nan", "inf", "-1e9", "1e99"])
async def test_wrong_headers_are_refused_by_name(stack, header: str, value: str):
    response = await stack.http.post(CHAT, json={"model": "gpt-oss-20b", "messages": USER}, headers={header: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == header


@pytest.mark.parametrize("has_length", [False, True])
async def test_large_bodies_are_413_before_they_are_read(start, has_length: bool):
    stack = await start(settings=FrontendSettings(max_body_bytes=10_000))
    data = json.dumps({"model": "gpt-oss-20b", "messages": [{"role": "user", "content": "x" * 20_000}]}).encode()

    async def parts():
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    response = await stack.http.post(CHAT, content=data if has_length else parts())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "raw", [b'{"a":[' + b"1," * 2_000_000 + b"1]}", b"{" + b'"k":1,' * 600_000, b"[" + b"{}," * 1_300_000], ids=["ints", "keys", "objects"]
)
async def test_bodies_of_countless_values_are_413_at_once(stack, raw: bytes):
    started = time.process_time()
    response = await stack.http.post(CHAT, content=raw)
    assert response.status_code == 413
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("status", "details", "http", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "sampling_params.max_tokens: 9; 1 to 5 fit", 400, "invalid_request_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full", 429, "rate_limit_error"),
        (grpc.StatusCode.UNAVAILABLE, "no healthy group", 503, "service_unavailable_error"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline", 504, "timeout_error"),
        (grpc.StatusCode.UNIMPLEMENTED, "no grammar", 400, "invalid_request_error"),
        (grpc.StatusCode.INTERNAL, "boom", 500, "server_error"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
async def test_router_errors_before_the_first_token_have_their_status(start, status, details, http, kind, stream):
    stack = await start(Script([1], error=(status, details)))
    response = await stack.http.post(CHAT, json={"model": "gpt-oss-20b", "messages": USER, "stream": stream})
    assert response.status_code == http
    assert response.json()["error"]["type"] == kind
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(http)
    if http == 400 and status is grpc.StatusCode.INVALID_ARGUMENT:
        assert response.json()["error"]["param"] == "max_completion_tokens"
        assert "sampling_params" not in response.text


async def test_an_error_after_the_first_token_is_an_event_that_the_client_raises(start, ids_of):
    text = "<|channel|>final<|message|>one two three four"
    stack = await start(Script(ids_of(text), error=(grpc.StatusCode.UNAVAILABLE, "group lost"), fails_after=5))
    seen = ""
    with pytest.raises(openai.APIError, match="group lost"):  # noqa: PT012  # the chunks before the error count too
        async for chunk in await stack.openai.chat.completions.create(model="gpt-oss-20b", messages=USER, stream=True):
            seen += chunk.choices[0].delta.content or ""
    assert seen == "one two"


async def test_no_router_is_503_and_unhealthy(harmony: HarmonyFormat):
    async with running_stack(harmony, lambda r, i: Script([])) as stack:
        assert (await stack.http.get("/health")).status_code == 200
        await stack.service.generator.router.close()
        from frontend.router_client import RouterClient

        stack.service.generator.router = RouterClient("127.0.0.1:1")
        assert (await stack.http.get("/health")).status_code == 503
        response = await stack.http.post(CHAT, json={"model": "gpt-oss-20b", "messages": USER})
        assert response.status_code == 503


_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from([10**20, -1, 2**31, "\ud800", "<|end|>", "a" * 5000]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    [
        "messages",
        "model",
        "stream",
        "n",
        "stop",
        "seed",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "temperature",
        "top_p",
        "max_tokens",
        "logit_bias",
        "prompt",
        "input",
        "instructions",
        "reasoning",
        "text",
        "reasoning_effort",
        "stream_options",
        "response_format",
        "metadata",
        "parallel_tool_calls",
        "user",
    ]
)


async def test_generated_bodies_never_give_5xx_and_leave_good_streams_alone(start):
    stack = await start()
    loop = asyncio.get_running_loop()
    good = [asyncio.create_task(stack.http.post(CHAT, json={"model": "gpt-oss-20b", "messages": USER, "stream": True})) for _ in range(4)]

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        path=st.sampled_from([CHAT, "/v1/completions", "/v1/responses"]),
        fields=st.dictionaries(_NAMES, _VALUES, max_size=4),
        keeps=st.booleans(),
    )
    def check(path: str, fields: dict[str, Any], keeps: bool):
        base = {"model": "gpt-oss-20b", "messages": USER} if path == CHAT else {"model": "gpt-oss-20b", "prompt": "x"}
        if path == "/v1/responses":
            base = {"model": "gpt-oss-20b", "input": "x"}
        data = json.dumps((base if keeps else {}) | fields).encode()
        response = asyncio.run_coroutine_threadsafe(stack.http.post(path, content=data), loop).result(20)
        assert response.status_code in (200, 400, 404), (response.text, data)
        if response.status_code != 200:
            assert response.json()["error"]["message"]

    await asyncio.to_thread(check)
    for response in await asyncio.gather(*good):
        assert response.text.endswith("data: [DONE]\n\n")
    await stack.until_idle()


async def test_cors_is_off_unless_origins_are_given(start):
    origin = {"origin": "https://page.example"}
    closed = await start()
    assert "access-control-allow-origin" not in (await closed.http.get("/health", headers=origin)).headers
    opened = await start(settings=FrontendSettings(cors_origins=("https://page.example",)))
    headers = (await opened.http.get("/health", headers=origin)).headers
    assert headers["access-control-allow-origin"] == "https://page.example"
