"""Measures one frontend process on one core: tokens/s under many SSE streams, and what it adds to the time to first token.

The router is a fake in a process of its own: groups of streams step together, as the sequences of a decode group do, one token per stream
and step. The clients are a raw epoll loop in another process. Both share the core that the frontend does not run on.
    python -m benchmarks.frontend                    # everything, written to benchmarks/results/frontend.json
    python -m benchmarks.frontend throughput --streams 2000 --step-ms 100
    python -m benchmarks.frontend ttft --streams 200
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import functools
import json
import multiprocessing
import os
import platform
import resource
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import grpc.aio
import uvloop

from common.proto import router_pb2, types_pb2

RESULTS = Path(__file__).parent / "results" / "frontend.json"
HEAD, WORDS, END = (200005, 17196, 200008), (976, 6052, 382, 220, 19, 13), 200002
FRONTEND_CORE, OTHER_CORE = 0, 1


@dataclass(frozen=True)
class Load:
    """`streams` at once, started over `ramp_s`; `groups` of them step every `step_ms`, `tokens` times."""

    streams: int
    tokens: int
    step_ms: float
    groups: int
    ramp_s: float


# --- the fake router


class FakeRouter:
    """Answers `GenerateMany`: the header and the first token of a call at once, then one token per step of its group, a frame per group.

    Groups step by the clock, whether or not the frontend keeps up; tokens of a call that wait for the stream go out as one chunk, as the
    router's own buffers have it.
    """

    def __init__(self, load: Load):
        self._load = load
        self._calls: list[dict[int, int]] = [{} for _ in range(load.groups)]  # per group: call id -> tokens sent
        self._started = 0
        self._writing = asyncio.Lock()
        self._ids = [*HEAD, *(WORDS[i % len(WORDS)] for i in range(load.tokens)), END]
        complete = router_pb2.GenerateComplete(
            finish_reason=types_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP), usage=types_pb2.Usage(completion_tokens=len(self._ids))
        )
        self._complete = router_pb2.GenerateResponse(request_id="r", complete=complete).SerializeToString()

    @functools.cache  # noqa: B019  # one router per process
    def _chunk(self, start: int, end: int) -> bytes:
        chunk = router_pb2.GenerateChunk(first_token_index=start, token_ids=self._ids[start:end])
        return router_pb2.GenerateResponse(request_id="r", chunk=chunk).SerializeToString()

    async def generate_many(self, requests, context: grpc.aio.ServicerContext) -> None:
        steps = [asyncio.create_task(self._step(group, context)) for group in range(self._load.groups)]
        try:
            async for request in requests:
                frame = router_pb2.GenerateManyResponse()
                for item in request.items:
                    if item.cancel:
                        for calls in self._calls:
                            calls.pop(item.call_id, None)
                    if item.HasField("start"):
                        self._calls[self._started % self._load.groups][item.call_id] = len(HEAD) + 1
                        self._started += 1
                        frame.events.add(call_id=item.call_id, response=self._chunk(0, len(HEAD) + 1))
                await self._write(context, frame)
        finally:
            for task in steps:
                task.cancel()

    async def _step(self, group: int, context: grpc.aio.ServicerContext) -> None:
        period_s = self._load.step_ms / 1e3
        next_s = time.monotonic() + period_s * (1 + group / self._load.groups)
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            steps = 1 + int(max(0.0, time.monotonic() - next_s) / period_s)
            next_s += steps * period_s
            calls, frame = self._calls[group], router_pb2.GenerateManyResponse()
            for call_id, sent in list(calls.items()):
                end = calls[call_id] = min(sent + steps, len(self._ids))
                frame.events.add(call_id=call_id, response=self._chunk(sent, end))
                if end == len(self._ids):
                    frame.events.add(call_id=call_id, response=self._complete)
                    frame.events.add(call_id=call_id, end=router_pb2.CallEnd())
                    del calls[call_id]
            await self._write(context, frame)

    async def _write(self, context: grpc.aio.ServicerContext, frame: router_pb2.GenerateManyResponse) -> None:
        if frame.events:
            async with self._writing:
                await context.write(frame)


def serve_router(pipe: Connection, load: Load) -> None:
    async def run() -> None:
        router = FakeRouter(load)
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            router.generate_many, router_pb2.GenerateManyRequest.FromString, router_pb2.GenerateManyResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tandem.router.v1.Router", {"GenerateMany": handler}),))
        pipe.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        await asyncio.to_thread(pipe.recv)
        pipe.send(cpu_s())
        await server.stop(None)

    os.sched_setaffinity(0, {OTHER_CORE})
    uvloop.run(run())


# --- the frontend


def serve_frontend(pipe: Connection, router: str) -> None:
    from frontend.harmony.format import HarmonyFormat
    from frontend.server import serve
    from frontend.settings import FrontendSettings
    from frontend.vocab import load_vocabulary

    def answer() -> None:
        while pipe.recv() == "cpu":
            pipe.send(cpu_s())
        os.kill(os.getpid(), signal.SIGTERM)

    os.sched_setaffinity(0, {FRONTEND_CORE})
    settings = FrontendSettings(router=router, port=0, model_names=("m",), max_streams=100_000)
    threading.Thread(target=answer, daemon=True).start()
    serve(settings, HarmonyFormat(load_vocabulary()), pipe.send)


# --- the clients


@dataclass
class Stream:
    connection: socket.socket
    started_s: float
    first_s: float = 0.0
    tail: bytes = b""


def request_bytes() -> bytes:
    fields = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps(fields).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body


class Clients:
    """All streams of one run in one epoll loop. `firsts_s`: from connecting to the first byte; `tokens` as the frontend counts them."""

    def __init__(self, port: int, load: Load, *, leaves_at_once: bool = False):
        """`leaves_at_once`: streams are left at their first byte, which warms a frontend up."""
        self._port = port
        self._load = load
        self._leaves_at_once = leaves_at_once
        self._poll = select.epoll()
        self._open: dict[int, Stream] = {}
        self._request = request_bytes()
        self.firsts_s: list[float] = []
        self.tokens = 0
        self.failed = 0

    def run(self) -> float:
        """Returns: seconds from the first request to the last byte"""
        begun_s = time.perf_counter()
        started = 0
        while started < self._load.streams or self._open:
            now_s = time.perf_counter() - begun_s
            while started < self._load.streams and now_s >= self._load.ramp_s * started / self._load.streams:
                self._start()
                started += 1
            wait_s = 0.5 if started == self._load.streams else self._load.ramp_s / self._load.streams / 2
            for fileno, _ in self._poll.poll(wait_s):
                self._read(self._open[fileno])
        return time.perf_counter() - begun_s

    def _start(self) -> None:
        connection = socket.socket()
        started_s = time.perf_counter()
        connection.connect(("127.0.0.1", self._port))
        connection.sendall(self._request)
        connection.setblocking(False)
        self._open[connection.fileno()] = Stream(connection, started_s)
        self._poll.register(connection.fileno(), select.EPOLLIN)

    def _read(self, stream: Stream) -> None:
        piece = stream.connection.recv(1 << 16)
        if piece and not stream.first_s:
            stream.first_s = time.perf_counter() - stream.started_s
            self.firsts_s.append(stream.first_s)
        if piece and not self._leaves_at_once:
            stream.tail = piece if len(piece) > 600 else (stream.tail + piece)[-600:]
            return
        self._poll.unregister(stream.connection.fileno())
        del self._open[stream.connection.fileno()]
        stream.connection.close()
        counted = stream.tail.rsplit(b'"completion_tokens":', 1)
        if len(counted) == 2 and b"[DONE]" in stream.tail:
            self.tokens += int(counted[1].split(b",")[0])
        else:
            self.failed += 1


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(load: Load) -> dict:
    """One run with fresh processes."""
    context = multiprocessing.get_context("spawn")
    router_pipe, router_end = context.Pipe()
    pipe, end = context.Pipe()
    router = context.Process(target=serve_router, args=(router_end, load), daemon=True)
    router.start()
    frontend = context.Process(target=serve_frontend, args=(end, router_pipe.recv()), daemon=True)
    frontend.start()
    port = pipe.recv()
    os.sched_setaffinity(0, {OTHER_CORE})
    Clients(port, Load(8, 1, load.step_ms, load.groups, 0.1), leaves_at_once=True).run()
    pipe.send("cpu")
    before_s, own_before_s = pipe.recv(), cpu_s()
    clients = Clients(port, load)
    wall_s = clients.run()
    own_s = cpu_s() - own_before_s
    pipe.send("cpu")
    frontend_s = pipe.recv() - before_s
    pipe.send("end")
    router_pipe.send("end")
    router_s = router_pipe.recv()
    frontend.join(10)
    router.join(10)
    firsts_ms = sorted(first * 1e3 for first in clients.firsts_s)
    return {
        "streams": load.streams,
        "step_ms": load.step_ms,
        "groups": load.groups,
        "ramp_s": load.ramp_s,
        "failed_streams": clients.failed,
        "tokens": clients.tokens,
        "offered_tokens_per_s": load.streams / load.step_ms * 1e3,
        "tokens_per_s": clients.tokens / wall_s,
        "tokens_per_frontend_cpu_s": clients.tokens / frontend_s,
        "frontend_cpu_us_per_token": frontend_s / clients.tokens * 1e6,
        "frontend_cpu_us_per_stream": frontend_s / load.streams * 1e6,
        "frontend_cpu_share": frontend_s / wall_s,
        "router_cpu_share": router_s / wall_s,
        "client_cpu_share": own_s / wall_s,
        "first_byte_p50_ms": firsts_ms[len(firsts_ms) // 2],
        "first_byte_p99_ms": firsts_ms[int(len(firsts_ms) * 0.99)],
    }


def facts() -> dict:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", nargs="?", choices=("all", "throughput", "ttft"), default="all")
    options.add_argument("--streams", type=int)
    options.add_argument("--tokens", type=int)
    options.add_argument("--step-ms", type=float)
    options.add_argument("--runs", type=int, default=3)
    chosen = options.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loads = {
        "throughput": Load(chosen.streams or 2000, chosen.tokens or 120, chosen.step_ms or 100.0, 16, 2.0),
        "ttft": Load(chosen.streams or 200, chosen.tokens or 100, chosen.step_ms or 50.0, 16, 4.0),
    }
    runs = []
    for name, load in loads.items():
        if chosen.what in ("all", name):
            for _ in range(chosen.runs):
                run = {**facts(), "run": name, **measure(load)}
                runs.append(run)
                print(json.dumps(run, indent=1))
    if chosen.what == "all":
        RESULTS.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
