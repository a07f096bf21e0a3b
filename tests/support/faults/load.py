"""Clients of a fault run: requests with known answers, closed or open loop, every stream read to its end and written into the ledger."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from common.proto import router_pb2, router_pb2_grpc
from common.requests import SamplingParams
from tests.support.fake_model import expected_tokens, seeded_tokens
from tests.support.faults.oracle import Oracle, Record

CLIENT_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50))


@dataclass(frozen=True)
class Shape:
    """Ranges of a request's sizes. `seeded_in`: one request of so many samples with a seed instead of greedily."""

    prompt_tokens: tuple[int, int] = (4, 120)
    max_tokens: tuple[int, int] = (2, 20)
    seeded_in: int = 4
    deadline_s: float = 60.0


class Clients:
    """`cancel(number)`: after how many seconds the client goes away, None for never."""

    def __init__(self, address: str, shape: Shape, oracle: Oracle, *, seed: int = 1, channels: int = 4):
        self.oracle = oracle
        self._shape = shape
        self._seed = seed
        self._channels = [grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) for _ in range(channels)]
        self._stubs = [router_pb2_grpc.RouterStub(channel) for channel in self._channels]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def closed_loop(self, count: int, at_once: int, cancel: Callable[[int], float | None] = lambda number: None) -> None:
        """`count` requests, `at_once` under way at any time."""
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await self.one(number, cancel(number))

        await asyncio.gather(*(worker() for _ in range(at_once)))

    async def open_loop(self, per_s: float, seconds: float, first: int = 0) -> None:
        """Requests at their own times, whatever becomes of the others."""
        began, tasks, number = time.monotonic(), set(), first
        while (due := (number - first) / per_s) < seconds:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            task = asyncio.create_task(self.one(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
        await asyncio.gather(*tasks)

    async def until(self, stop: Callable[[], bool], at_once: int) -> None:
        """Closed loop until `stop`."""
        numbers = iter(range(1 << 60))

        async def worker() -> None:
            while not stop():
                await self.one(next(numbers))

        await asyncio.gather(*(worker() for _ in range(at_once)))

    async def one(self, number: int, cancel_after_s: float | None = None) -> Record:
        message, expected = self._request(number)
        now_s = time.monotonic()
        record = Record(number, expected, now_s + self._shape.deadline_s, now_s)
        self.oracle.records.append(record)
        call = self._stubs[number % len(self._stubs)].Generate(message, timeout=self._shape.deadline_s)
        if cancel_after_s is not None:
            asyncio.get_running_loop().call_later(cancel_after_s, call.cancel)
        await guard(record, lambda: _read(call, record))
        return record

    def _request(self, number: int) -> tuple[router_pb2.GenerateRequest, list[int]]:
        shape, rng = self._shape, random.Random(f"{self._seed} {number}")
        prompt = rng.choices(range(3, 890), k=rng.randint(*shape.prompt_tokens))
        max_tokens = rng.randint(*shape.max_tokens)
        message = router_pb2.GenerateRequest(request_id=f"fault-{number}")
        message.tokenized.input_ids.extend(prompt)
        sampling = message.sampling_params
        sampling.max_tokens, sampling.ignore_eos, sampling.temperature = max_tokens, True, 0.0
        if shape.seeded_in and number % shape.seeded_in == 0:
            sampling.temperature, sampling.seed = 3.0, number
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=3.0, seed=number)
            return message, seeded_tokens(prompt, params)
        return message, expected_tokens(prompt, max_tokens)


async def _read(call, record: Record) -> None:
    async for response in call:
        if response.HasField("chunk"):
            record.is_gapless &= response.chunk.first_token_index == len(record.tokens)
            record.tokens.extend(response.chunk.token_ids)
            record.arrivals_s.append(time.monotonic())
        elif response.HasField("complete"):
            route = response.complete.route
            record.attempts = route.attempts
            chosen = [c for c in route.decision.candidates if c.chosen]
            record.groups = (chosen[0].prefill_group, chosen[0].decode_group) if chosen else ("", "")
            record.ends.append("ok")


async def guard(record: Record, read: Callable[[], Awaitable[None]]) -> None:
    """Runs `read` and writes into the record how it ended."""
    try:
        await read()
    except grpc.aio.AioRpcError as exc:
        record.ends.append(exc.code().name)
        record.detail = str(exc.details())
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():
            raise
        if not record.ends:  # else the whole answer was there before the client took its call back
            record.ends.append("cancelled")
    record.ended_s = time.monotonic()
