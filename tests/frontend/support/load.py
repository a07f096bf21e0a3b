"""Measures one frontend process under many streams: tokens/s, CPU per token and time to the first token.

The fake router and the clients are processes of their own; for the figure of one core, leave them other cores:
    python -m tests.frontend.support.load --streams 2000 --tokens 60 --gap-ms 130
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import sys
import time
from multiprocessing.connection import Connection

from frontend.harmony.format import HarmonyFormat
from frontend.http.app import build_app
from frontend.server import FrontendServer
from frontend.settings import FrontendSettings
from frontend.vocab import load_vocabulary
from tests.frontend.support.fake_router import Script, running_router

_HEAD, _WORDS = (200005, 17196, 200008), (976, 6052, 382, 220, 19, 13)


def serve_router(pipe: Connection, tokens: int, gap_s: float) -> None:
    script = Script([*_HEAD, *(_WORDS[i % len(_WORDS)] for i in range(tokens)), 200002], gap_s=gap_s)

    async def run() -> None:
        async with running_router(lambda request, index: script) as router:
            pipe.send(router.address)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


def serve_frontend(pipe: Connection, router: str, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    settings = FrontendSettings(router=router, port=port, model_names=("m",), max_streams=100_000)
    server = FrontendServer(settings, build_app(settings, HarmonyFormat(load_vocabulary())))

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
            await asyncio.sleep(0.01)
        pipe.send(port)
        for _ in range(2):
            await asyncio.to_thread(pipe.recv)
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(usage.ru_utime + usage.ru_stime)
        server.should_exit = True
        await serving

    asyncio.run(run())


async def one_stream(port: int, delay_s: float) -> tuple[float, int]:
    """Seconds to the first byte, and tokens as the server counted them."""
    fields = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps(fields).encode()
    await asyncio.sleep(delay_s)
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    first_s, tail = 0.0, b""
    while piece := await reader.read(1 << 16):
        first_s = first_s or time.perf_counter() - started
        tail = (tail + piece)[-4096:]
    writer.close()
    counted = tail.rsplit(b'"completion_tokens":', 1)
    return first_s, int(counted[1].split(b",")[0]) if len(counted) == 2 else 0


async def measure(port: int, streams: int, ramp_s: float) -> tuple[float, list[float], int]:
    started = time.perf_counter()
    results = await asyncio.gather(*(one_stream(port, ramp_s * i / streams) for i in range(streams)))
    return time.perf_counter() - started, sorted(first for first, _ in results), sum(tokens for _, tokens in results)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", type=int, default=200)
    options.add_argument("--tokens", type=int, default=100)
    options.add_argument("--gap-ms", type=float, default=50.0, help="between two tokens of a stream")
    options.add_argument("--ramp-s", type=float, default=1.0, help="over which the streams start")
    options.add_argument("--core", type=int, help="pin the frontend to this core")
    chosen = options.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    context = multiprocessing.get_context("spawn")
    router_pipe, router_end = context.Pipe()
    pipe, end = context.Pipe()
    router = context.Process(target=serve_router, args=(router_end, chosen.tokens, chosen.gap_ms / 1e3), daemon=True)
    router.start()
    frontend = context.Process(target=serve_frontend, args=(end, router_pipe.recv(), chosen.core), daemon=True)
    frontend.start()
    port = pipe.recv()
    pipe.send("begin")
    before_s = pipe.recv()
    wall_s, firsts_s, tokens = asyncio.run(measure(port, chosen.streams, chosen.ramp_s))
    pipe.send("end")
    cpu_s = pipe.recv() - before_s
    router_pipe.send("end")
    frontend.join(10)
    sys.stdout.write(
        f"{chosen.streams} streams, {tokens} tokens in {wall_s:.2f} s: {tokens / wall_s:.0f} tokens/s; frontend CPU {cpu_s:.2f} s = "
        f"{cpu_s / tokens * 1e6:.0f} us/token; first byte p50 {firsts_s[len(firsts_s) // 2] * 1e3:.1f} ms, "
        f"p99 {firsts_s[int(len(firsts_s) * 0.99)] * 1e3:.1f} ms\n"
    )


if __name__ == "__main__":
    main()
