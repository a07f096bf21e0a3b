"""The event loop's thread never works longer than 50 ms at a stretch, whatever bodies come: others' streams would stand still.

Measured as CPU time of the loop's own thread between two turns of a watcher, which a busy machine does not stretch.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from typing import Any

import pytest

from common.heap import settle_memory
from tests.frontend.support.fake_router import Script
from tests.support.pace import within

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
LIMIT_S = 0.05


def asked(content: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "gpt-oss-20b", "messages": [{"role": "user", "content": content}], **fields}).encode()


BODIES = {
    "x": asked("x" * 1_000_000),
    "cjk": asked("中" * 300_000),
    "emoji": asked("😀" * 200_000),
    "blanks": asked(" " * 99_000 + "x" + "\n" * 99_000),
    "escapes": asked("\u0001" * 300_000),
    "many messages": json.dumps({"model": "gpt-oss-20b", "messages": [{"role": "user", "content": "a"}] * 20_000}).encode(),
    "many parts": asked([{"type": "text", "text": "a"}] * 30_000),
    "many ids": json.dumps({"model": "gpt-oss-20b", "prompt": [7] * 150_000}).encode(),
    "wrong items": json.dumps({"model": "gpt-oss-20b", "messages": [1] * 190_000}).encode(),
    "a large schema": asked(
        "hi",
        tools=[
            {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
            for i in range(4_000)
        ],
    ),
}


@pytest.fixture(autouse=True)
def settled_memory():
    """As in a process that serves."""
    thresholds = gc.get_threshold()
    settle_memory()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_the_loop(start, ids_of, name: str):
    stack = await start(Script(ids_of("<|channel|>final<|message|>" + " so" * 30 + "<|return|>"), gap_s=0.002))
    path = "/v1/completions" if name == "many ids" else CHAT
    held: list[float] = []

    async def watch() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            held.append(now - before)
            before = now

    async def send() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(BODIES[name])}\r\n\r\n"
        writer.write(head.encode() + BODIES[name])
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status

    normal = asyncio.create_task(stack.http.post(CHAT, content=asked("hi", stream=True)))
    await stack.router.until_open(1)
    watching = asyncio.create_task(watch())
    statuses = await asyncio.gather(*(send() for _ in range(2)))
    watching.cancel()
    assert all(status in (200, 400) for status in statuses), statuses
    assert max(held) < LIMIT_S
    assert (await normal).text.endswith("[DONE]\n\n")


async def test_small_requests_do_not_wait_for_the_rendering_of_large_ones(start, ids_of):
    stack = await start(Script(ids_of("<|channel|>final<|message|>yes<|return|>")))
    is_over = threading.Event()
    large = [asyncio.create_task(stack.service.generator.encode(is_over.wait, 1 << 20)) for _ in range(8)]  # more than there are threads
    try:
        answer = await asyncio.wait_for(stack.http.post(CHAT, content=asked("hi")), within(5.0))
        assert answer.json()["choices"][0]["message"]["content"] == "yes"
    finally:
        is_over.set()
    assert await asyncio.gather(*large) == [True] * 8
