"""`GenerateMany`: calls that share a stream answer as calls of their own do, and end apart from each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc
import pytest

from cluster.router.multiplex import FRAME_BYTES, Multiplexer
from common.proto import router_pb2
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup, tokens_of
from tests.support.router_bed import Bed, bed, request_of, until

OK, INVALID, EXHAUSTED, CANCELLED, DEADLINE = 0, 3, 8, 1, 4


@dataclass
class Call:
    """What came for one call id."""

    tokens: list[int] = field(default_factory=list)
    route: router_pb2.RouteDecision | None = None
    complete: router_pb2.GenerateComplete | None = None
    end: router_pb2.CallEnd | None = None


class ManyCalls:
    """A client of one `GenerateMany` stream; `calls` by id, `frames` counts messages."""

    def __init__(self, router: Bed):
        self.stream = router.stub.GenerateMany()
        self.calls: dict[int, Call] = {}
        self.frames = 0

    async def start(self, call_id: int, request: router_pb2.GenerateRequest | bytes, timeout_ms: int = 20_000) -> None:
        data = request if isinstance(request, bytes) else request.SerializeToString()
        start = router_pb2.CallStart(request=data, timeout_ms=timeout_ms)
        self.calls[call_id] = Call()
        await self.stream.write(router_pb2.GenerateManyRequest(items=[router_pb2.CallItem(call_id=call_id, start=start)]))

    async def cancel(self, call_id: int) -> None:
        await self.stream.write(router_pb2.GenerateManyRequest(items=[router_pb2.CallItem(call_id=call_id, cancel=True)]))

    async def read_until_ended(self, *call_ids: int) -> None:
        async with asyncio.timeout(20):
            while not all(self.calls[call_id].end for call_id in call_ids):
                frame = await self.stream.read()
                assert frame is not grpc.aio.EOF
                self.frames += 1
                for event in frame.events:
                    self._on_event(event)

    def _on_event(self, event: router_pb2.CallEvent) -> None:
        call = self.calls[event.call_id]
        assert call.end is None, "something came after the end"
        kind = event.WhichOneof("event")
        if kind == "route":
            assert not call.tokens, "the route comes ahead of the tokens"
            call.route = router_pb2.RouteDecision.FromString(event.route)
        elif kind == "end":
            call.end = event.end
        else:
            response = router_pb2.GenerateResponse.FromString(event.response)
            if response.HasField("complete"):
                call.complete = response.complete
            else:
                assert response.chunk.first_token_index == len(call.tokens)
                call.tokens += response.chunk.token_ids


async def test_many_calls_in_one_stream_all_get_their_own_tokens():
    async with bed(FakePrefillGroup(), FakeDecodeGroup()) as router:
        many = ManyCalls(router)
        prompts = {i: (i, i + 1, i + 2) for i in range(1, 40)}
        for call_id, prompt in prompts.items():
            await many.start(call_id, request_of(prompt, max_tokens=12))
        await many.read_until_ended(*prompts)
    for call_id, prompt in prompts.items():
        call = many.calls[call_id]
        assert call.tokens == tokens_of(prompt, 12)
        assert call.end is not None
        assert call.end.code == OK
        assert call.complete is not None
        assert call.complete.usage.completion_tokens == 12
        assert call.route is not None
        assert [c.chosen for c in call.route.candidates] == [True]
    assert many.frames < 39 * 12 / 2, "a frame carries the tokens of many calls"


async def test_generate_tells_the_route_in_its_initial_metadata():
    async with bed(FakePrefillGroup(), FakeDecodeGroup()) as router:
        call = router.stub.Generate(request_of(max_tokens=3), timeout=20)
        metadata = dict(await call.initial_metadata())
        decision = router_pb2.RouteDecision.FromString(metadata["tandem-route-bin"])
        complete = [response async for response in call][-1].complete
    chosen = next(c for c in decision.candidates if c.chosen)
    assert (chosen.prefill_pool, chosen.decode_pool) == ("prefill", "decode")
    assert chosen.prediction == next(c for c in complete.route.decision.candidates if c.chosen).prediction


async def test_a_wrong_request_fails_its_own_call_alone():
    async with bed(FakePrefillGroup(), FakeDecodeGroup()) as router:
        many = ManyCalls(router)
        await many.start(1, request_of((1, 2), max_tokens=30))
        await many.start(2, b"\xff\xff\xff")
        await many.start(3, request_of((), max_tokens=3))
        await many.read_until_ended(1, 2, 3)
    ends = {call_id: call.end for call_id, call in many.calls.items()}
    assert [ends[i].code for i in (1, 2, 3)] == [OK, INVALID, INVALID]
    assert ends[3].details.startswith("tokenized.input_ids")
    assert len(many.calls[1].tokens) == 30


async def test_cancel_and_deadline_end_one_call_and_free_its_blocks():
    decode = FakeDecodeGroup(step_ms=5)
    async with bed(FakePrefillGroup(), decode) as router:
        many = ManyCalls(router)
        for call_id in (1, 2, 3):
            await many.start(
                call_id, request_of((call_id, 7), max_tokens=100_000 if call_id < 3 else 60), timeout_ms=300 if call_id == 2 else 0
            )
        await until(lambda: len(router.router.generator.running) == 3)
        await many.cancel(1)
        await many.read_until_ended(2, 3)
        assert many.calls[2].end.code == DEADLINE
        assert many.calls[3].tokens == tokens_of((3, 7), 60)
        assert many.calls[1].end is None, "whoever cancels is told nothing more"
        await until(lambda: decode.free_blocks == decode.total_blocks)


async def test_the_end_of_the_stream_ends_its_calls():
    decode = FakeDecodeGroup(step_ms=5)
    async with bed(FakePrefillGroup(), decode) as router:
        many = ManyCalls(router)
        for call_id in range(5):
            await many.start(call_id, request_of((call_id, 7), max_tokens=100_000))
        await until(lambda: len(router.router.generator.running) == 5)
        many.stream.cancel()
        await until(lambda: len(router.router.generator.running) == 0)
        await until(lambda: decode.free_blocks == decode.total_blocks)


async def test_an_id_that_runs_already_ends_the_stream():
    async with bed(FakePrefillGroup(), FakeDecodeGroup(step_ms=5)) as router:
        many = ManyCalls(router)
        await many.start(1, request_of(max_tokens=100_000))
        await many.start(1, request_of(max_tokens=3))
        with pytest.raises(grpc.aio.AioRpcError, match="running already"):
            await many.read_until_ended(1)
        await until(lambda: len(router.router.generator.running) == 0)


async def test_a_drained_router_ends_its_streams_after_their_calls():
    async with bed(FakePrefillGroup(), FakeDecodeGroup(step_ms=5)) as router:
        many = ManyCalls(router)
        await many.start(1, request_of((4, 4), max_tokens=40))
        await until(lambda: len(router.router.generator.running) == 1)
        draining = asyncio.create_task(router.router.server.drain(10))
        await many.read_until_ended(1)
        assert many.calls[1].tokens == tokens_of((4, 4), 40)
        assert await many.stream.read() is grpc.aio.EOF
        await draining


async def test_frames_that_are_not_taken_stay_bounded():
    """A call hands over one message and waits; so what a lagging client has not taken stays where it is bounded."""
    written: list[int] = []
    taken = asyncio.Event()

    async def handle(request: bytes, context) -> None:
        for number in range(5):
            await context.write(b"x" * (FRAME_BYTES // 4))
            written.append(number)

    class Context:
        frames: list[router_pb2.GenerateManyResponse] = []

        async def write(self, frame) -> None:
            self.frames.append(frame)
            await taken.wait()

    async def requests():
        for call_id in range(16):
            yield router_pb2.GenerateManyRequest(items=[router_pb2.CallItem(call_id=call_id, start=router_pb2.CallStart())])

    serving = asyncio.create_task(Multiplexer(handle).serve(requests(), Context()))
    await until(lambda: bool(Context.frames))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not written
    taken.set()
    await asyncio.wait_for(serving, 5)
    assert len(written) == 16 * 5
    assert all(frame.ByteSize() < 2 * FRAME_BYTES for frame in Context.frames)
    assert sum(event.HasField("end") for frame in Context.frames for event in frame.events) == 16
