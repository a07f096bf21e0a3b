"""What stands on both sides of a measured frontend: the load, the fake router and the clients. Used by `benchmarks.frontend`.

Both stamp what they see of each request with CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import re
import resource
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import grpc
import grpc.aio

from common.proto import router_pb2, types_pb2

HEAD, WORDS, END = (200005, 17196, 200008), (976, 6052, 382, 220, 19, 13), 200002
PROMPT = ("hi", "please", "explain,", "in", "plain", "words,", "how", "tides", "follow", "the", "moon", "and", "why", "2026", "differs.")
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the kernel's stamp of what it received
_CONTENT = re.compile(rb'"content":"[^"]')


@dataclass(frozen=True)
class Load:
    """`streams` at once, started over `ramp_s`; `groups` of them step every `step_ms`, `tokens` times.

    While they run, `arrivals` more come by chance, `arrivals_per_s` in the mean, and each of these is left at its first content.
    All prompts have `prompt_words` words.
    """

    streams: int
    tokens: int
    step_ms: float
    groups: int
    ramp_s: float
    arrivals: int = 0
    arrivals_per_s: float = 1.0
    prompt_words: int = 1

    def starts_s(self, seed: int) -> list[float]:
        """When each request is sent, from the first one on [s]."""
        chance = random.Random(seed)
        ramp = [self.ramp_s * i / self.streams for i in range(self.streams)]
        gaps_s = (chance.expovariate(self.arrivals_per_s) for _ in range(self.arrivals))
        return ramp + [self.ramp_s + passed_s for passed_s in itertools.accumulate(gaps_s)]


def cpu_s() -> float:
    """CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class FakeRouter:
    """Answers `GenerateMany`: the header and the first token of a call at once, then one token per step of its group, a frame per group.

    Groups step by the clock, whether or not the frontend keeps up; tokens of a call that wait for the stream go out as one chunk, as the
    router's own buffers have it. `stamps_s`: per call id when it had the request and when it began to write the first token.
    """

    def __init__(self, load: Load):
        self.stamps_s: dict[int, tuple[float, float]] = {}
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
        """The handler of the one stream."""
        steps = [asyncio.create_task(self._step(group, context)) for group in range(self._load.groups)]
        try:
            async for request in requests:
                received_s = time.monotonic()
                frame = router_pb2.GenerateManyResponse()
                for item in request.items:
                    if item.cancel:
                        for calls in self._calls:
                            calls.pop(item.call_id, None)
                    if item.HasField("start"):
                        self._calls[self._started % self._load.groups][item.call_id] = len(HEAD) + 1
                        self._started += 1
                        frame.events.add(call_id=item.call_id, response=self._chunk(0, len(HEAD) + 1))
                written_s = await self._write(context, frame)
                self.stamps_s |= {event.call_id: (received_s, written_s) for event in frame.events}
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

    async def _write(self, context: grpc.aio.ServicerContext, frame: router_pb2.GenerateManyResponse) -> float:
        """Returns: when the write began, after those before it"""
        async with self._writing:
            begun_s = time.monotonic()
            if frame.events:
                await context.write(frame)
        return begun_s


async def run_router(pipe: Connection, load: Load) -> None:
    """Sends its address by `pipe` and then, until it is told to end, its CPU seconds or its stamps, as asked."""
    router = FakeRouter(load)
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        router.generate_many, router_pb2.GenerateManyRequest.FromString, router_pb2.GenerateManyResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tandem.router.v1.Router", {"GenerateMany": handler}),))
    pipe.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    while (asked := await asyncio.to_thread(pipe.recv)) != "end":
        pipe.send(cpu_s() if asked == "cpu" else router.stamps_s)
    await server.stop(None)


@dataclass
class Stream:
    """One request as its client sees it, all times CLOCK_MONOTONIC [s]. `leaves`: at its first content.

    `sent_s`: connected, about to send; `arrived_s`: the first content was in the client's kernel; `read_s`: and in its hands.
    `running`: streams that ran when it was started.
    """

    connection: socket.socket
    leaves: bool
    running: int
    begun_s: float
    sent_s: float = 0.0
    arrived_s: float = 0.0
    read_s: float = 0.0
    tail: bytes = field(default=b"", repr=False)


def request_bytes(request_id: int, prompt_words: int) -> bytes:
    """A chat of one message, streamed."""
    content = " ".join(PROMPT[i % len(PROMPT)] for i in range(prompt_words))
    fields = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": content}]}
    body = json.dumps(fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: %d\r\ncontent-length: %d\r\n\r\n"
    return head % (request_id, len(body)) + body


class Clients:
    """All streams of one run in one epoll loop. `streams` by request id; `tokens` as the frontend counts them."""

    def __init__(self, port: int, stays: int, prompt_words: int = 1):
        """`stays`: so many streams, the first ones, are read to their end; later ones are left at their first content."""
        self._port = port
        self._stays = stays
        self._prompt_words = prompt_words
        self._poll = select.epoll()
        self._open: dict[int, Stream] = {}
        self.streams: list[Stream] = []
        self.tokens = 0
        self.failed = 0

    def run(self, starts_s: list[float]) -> float:
        """Until all streams have ended, or until the last one is left. Returns: seconds it took"""
        begun_s = time.monotonic()
        while len(self.streams) < len(starts_s) or (self._open and not self._has_left_last()):
            while len(self.streams) < len(starts_s) and time.monotonic() - begun_s >= starts_s[len(self.streams)]:
                self._start()
            has_more = len(self.streams) < len(starts_s)
            wait_s = max(0.0, starts_s[len(self.streams)] - (time.monotonic() - begun_s)) if has_more else 0.1
            for fileno, _ in self._poll.poll(wait_s):
                self._read(self._open[fileno])
        for stream in self._open.values():
            stream.connection.close()
        return time.monotonic() - begun_s

    def _has_left_last(self) -> bool:
        return len(self.streams) > self._stays and not any(stream.leaves for stream in self._open.values())

    def _start(self) -> None:
        request = request_bytes(len(self.streams), self._prompt_words)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        stream = Stream(connection, len(self.streams) >= self._stays, len(self._open), time.monotonic())
        connection.connect(("127.0.0.1", self._port))
        stream.sent_s = time.monotonic()
        connection.sendall(request)
        connection.setblocking(False)
        self.streams.append(stream)
        self._open[connection.fileno()] = stream
        self._poll.register(connection.fileno(), select.EPOLLIN)

    def _read(self, stream: Stream) -> None:
        piece, ancillary, _, _ = stream.connection.recvmsg(1 << 16, 64 if not stream.read_s else 0)
        if not stream.read_s and _CONTENT.search(piece):
            stream.read_s = time.monotonic()
            seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
            stream.arrived_s = seconds + nanoseconds / 1e9 - (time.time() - time.monotonic())
        if piece and not (stream.leaves and stream.read_s):
            stream.tail = piece if len(piece) > 600 else (stream.tail + piece)[-600:]
            return
        self._poll.unregister(stream.connection.fileno())
        del self._open[stream.connection.fileno()]
        stream.connection.close()
        if stream.leaves and stream.read_s:
            return
        counted = stream.tail.rsplit(b'"completion_tokens":', 1)
        if len(counted) == 2 and b"[DONE]" in stream.tail:
            self.tokens += int(counted[1].split(b",")[0])
        else:
            self.failed += 1
