"""Keys, limits, clients that leave, long encodings, and the end of the process: every reply ends once, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import httpx
import pytest

from frontend.http.sse import EventStream
from frontend.settings import FrontendSettings
from tests.frontend.support.fake_router import Script
from tests.support.pace import within

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
KEYS = "- {key: sk-first-key, name: first, priority: 5, max_running: 1}\n- {key: sk-second-key}\n"


def body(**fields):
    return {"model": "gpt-oss-20b", "messages": [{"role": "user", "content": "hi"}], **fields}


def slow(ids_of, words: int = 400, gap_s: float = 0.01) -> Script:
    return Script(ids_of("<|channel|>final<|message|>" + " so" * words + "<|return|>"), gap_s=gap_s)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return path


async def test_keys_are_asked_for_and_never_shown(start, keys_file: Path):
    stack = await start(settings=FrontendSettings(keys_file=keys_file), key="sk-first-key")
    assert (await stack.http.post(CHAT, json=body())).status_code == 200
    for headers in ({"authorization": "Bearer sk-wrong-key"}, {"authorization": "Bearer"}, {"authorization": "Basic sk-first-key"}, {}):
        async with httpx.AsyncClient(base_url=stack.url) as anonymous:
            for response in (await anonymous.post(CHAT, json=body(), headers=headers), await anonymous.get("/v1/models", headers=headers)):
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert "sk-" not in response.text
            assert (await anonymous.get("/health")).status_code == 200, "probes have no key"


@pytest.mark.parametrize(("wanted", "priority"), [(None, 5), ("3", 3), ("50", 5)])
async def test_a_keys_priority_is_its_most(start, keys_file: Path, wanted, priority: int):
    stack = await start(settings=FrontendSettings(keys_file=keys_file), key="sk-first-key")
    await stack.http.post(CHAT, json=body(), headers={"x-tandem-priority": wanted} if wanted else {})
    assert stack.router.requests[0].priority == priority


async def test_a_keys_limit_is_its_own(start, ids_of, keys_file: Path):
    stack = await start(slow(ids_of, 40), settings=FrontendSettings(keys_file=keys_file), key="sk-first-key")
    running = asyncio.create_task(stack.http.post(CHAT, json=body(stream=True)))
    await stack.router.until_open(1)
    refused = await stack.http.post(CHAT, json=body())
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    other = await stack.http.post(CHAT, json=body(), headers={"authorization": "Bearer sk-second-key"})
    assert other.status_code == (await running).status_code == 200
    assert (await stack.http.post(CHAT, json=body())).status_code == 200, "the place is free again"


async def test_more_streams_than_the_limit_are_429(start, ids_of):
    stack = await start(slow(ids_of, 60), settings=FrontendSettings(max_streams=3))
    responses = await asyncio.gather(*(stack.http.post(CHAT, json=body(stream=True)) for _ in range(8)))
    assert sorted(response.status_code for response in responses) == [200] * 3 + [429] * 5
    assert "tandem_frontend_running_requests 0.0" in await stack.metrics()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/completions"])
async def test_a_client_that_leaves_frees_its_request(start, ids_of, path: str, stream: bool):
    stack = await start(slow(ids_of), settings=FrontendSettings())
    fields = {
        CHAT: body(),
        "/v1/responses": {"model": "gpt-oss-20b", "input": "x"},
        "/v1/completions": {"model": "gpt-oss-20b", "prompt": "x"},
    }
    client = asyncio.create_task(stack.http.post(path, json=fields[path] | {"stream": stream}))
    await stack.router.until_open(1)
    await asyncio.sleep(0.05)
    client.cancel()
    await stack.until_idle(within_s=1.0)
    assert stack.router.num_cancelled == 1
    metrics = await stack.metrics()
    assert "tandem_frontend_client_disconnects_total 1.0" in metrics
    assert "tandem_frontend_running_requests 0.0" in metrics


@pytest.mark.parametrize(
    "hostile", ["x" * 1_000_000, "中" * 300_000, "😀" * 200_000, " " * 99_000 + "x" + "\n" * 99_000], ids=["x", "cjk", "emoji", "blank"]
)
async def test_encoding_never_holds_the_loop(start, ids_of, hostile: str):
    """Beside it a normal stream goes on, and the loop's longest pause stays short."""
    stack = await start(slow(ids_of, 60))
    pauses: list[float] = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - before)

    normal = asyncio.create_task(stack.http.post(CHAT, json=body(stream=True)))
    render = stack.service.generator.chat_format.encode_text
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.05)
    pauses.clear()
    await asyncio.gather(*(stack.service.generator.encode(lambda: render(hostile, field="prompt"), len(hostile)) for _ in range(3)))
    watching.cancel()
    assert sorted(pauses)[-2] < 0.25, "a busy machine may stretch a pause; an encoder that holds the GIL takes seconds"
    assert (await normal).text.endswith("[DONE]\n\n")


async def test_draining_lets_replies_finish_and_refuses_new_ones(start, ids_of):
    stack = await start(slow(ids_of, 60), settings=FrontendSettings())
    running = [asyncio.create_task(stack.http.post(CHAT, json=body(stream=i % 2 == 0))) for i in range(6)]
    await stack.router.until_open(6)
    stack.service.drain()
    refused = await stack.http.post(CHAT, json=body())
    assert refused.status_code == 503
    assert (await stack.http.get("/health")).status_code == 503
    for task in running:
        response = await task
        assert response.status_code == 200
        assert response.text.count(" so") >= 60 if response.text.startswith("{") else response.text.endswith("[DONE]\n\n")


async def test_at_the_end_of_the_drain_running_replies_get_an_error(start, ids_of):
    stack = await start(slow(ids_of), settings=FrontendSettings(drain_s=0.3))
    streamed = asyncio.create_task(stack.http.post(CHAT, json=body(stream=True)))
    whole = asyncio.create_task(stack.http.post(CHAT, json=body()))
    await stack.router.until_open(2)
    stack.server.handle_exit(signal.SIGTERM, None)
    stack.server._captured_signals.clear()  # uvicorn would raise it again in the test's own process
    stream = await streamed
    assert stream.status_code == 200
    assert '"error"' in stream.text
    assert "shutting down" in stream.text
    assert (await whole).status_code == 503
    await stack.until_idle()


async def test_a_client_that_takes_nothing_is_given_up():
    gone: list[int] = []
    closed: list[int] = []

    async def events():
        try:
            while True:
                yield b"data: x"
        finally:
            closed.append(1)

    async def send(message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    cleanup = contextlib.AsyncExitStack()
    running = events()
    first = await anext(running)
    stream = EventStream(first, running, {}, cleanup, lambda: gone.append(1), stalled_s=0.1)
    async with asyncio.timeout(within(3)):
        await stream({"type": "http"}, asyncio.Event().wait, send)
    assert gone == closed == [1]
