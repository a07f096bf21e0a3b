"""One stream to the router for all requests: who gets what, what waits is joined, and what its end means for those that run."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import OverloadedError, WorkerLost
from common.proto import router_pb2
from frontend import router_link
from frontend.generation import Generator, Job
from frontend.metrics import FrontendMetrics
from frontend.raw import STOP, RawFormat, RawReplyParser
from frontend.router_client import RouterClient
from frontend.router_link import RouterStream
from tests.frontend.support.fake_router import Script, running_router


def request(*ids: int) -> router_pb2.GenerateRequest:
    message = router_pb2.GenerateRequest(request_id="r")
    message.tokenized.input_ids.extend(ids)
    return message


def chunk(*ids: int, index: int = 0) -> bytes:
    return router_pb2.GenerateResponse(chunk=router_pb2.GenerateChunk(index=index, token_ids=ids)).SerializeToString()


async def tokens_of(stream: RouterStream) -> list[int]:
    got: list[int] = []
    while responses := await stream.take():
        for response in responses:
            got += response.chunk.token_ids
    return got


async def test_every_request_gets_its_own_tokens_over_one_stream():
    async with running_router(lambda request, index: Script([request.tokenized.input_ids[0]] * 20)) as router:
        client = RouterClient(router.address)
        streams = [client.generate(request(number), timeout_s=10) for number in range(50)]
        got = await asyncio.gather(*map(tokens_of, streams))
        assert got == [[number] * 20 for number in range(50)]
        assert all(stream.route for stream in streams)
        await client.close()


async def test_a_broken_stream_fails_what_runs_and_the_next_request_opens_another():
    async with running_router(lambda request, index: Script([1] * 1000, gap_s=0.01)) as router:
        client = RouterClient(router.address)
        running = [client.generate(request(1), timeout_s=10) for _ in range(3)]
        await router.until_open(3)
        assert client._link is not None
        client._link._call.cancel()
        for stream in running:
            with pytest.raises(WorkerLost):
                await tokens_of(stream)
        await router.until_open(0)
        router.reset(lambda request, index: Script([5, 6]))
        assert await tokens_of(client.generate(request(1), timeout_s=10)) == [5, 6]
        await client.close()


async def test_what_waits_for_a_busy_loop_goes_out_as_one_piece_and_joins_exactly():
    text = "Zürich 🍎 and on"
    ids = [*text.encode(), STOP]
    async with running_router(lambda request, index: Script(ids)) as router:
        client = RouterClient(router.address)
        generator = Generator(client, RawFormat(), FrontendMetrics())
        pieces: list[str] = []
        async for update in generator.start(Job(request(1), RawReplyParser)):
            pieces += [event.text for event in update.events if hasattr(event, "text")]
            await asyncio.sleep(0.3)  # meanwhile all the rest arrives
        assert "".join(pieces) == text
        assert len(pieces) <= 4
        generator.close()
        await client.close()


async def test_while_the_streams_are_behind_tokens_are_gathered_and_none_is_late_for_long(monkeypatch):
    """The first piece goes out at once; after streams that took long, what comes meanwhile goes out together."""
    monkeypatch.setattr(router_link, "_BEHIND_S", -1.0)  # always behind
    monkeypatch.setattr(router_link, "_GATHER_S", 0.05)
    monkeypatch.setattr(router_link.RouterLink, "_note_busy", lambda link, since_s: setattr(link, "_busy_s", 1.0))
    async with running_router(lambda request, index: Script([*range(100)], gap_s=0.001)) as router:
        client = RouterClient(router.address)
        stream = client.generate(request(1), timeout_s=20)
        pieces = []
        while responses := await stream.take():
            pieces.append([token for response in responses for token in response.chunk.token_ids])
        assert [token for piece in pieces for token in piece] == [*range(100)]
        assert len(pieces) <= 60
        await client.close()


async def test_a_client_that_takes_nothing_is_bounded_and_leaves_others_alone():
    dropped: list[RouterStream] = []
    stream = RouterStream(dropped.append)
    for _ in range(20_000):
        stream.put(chunk(7))
    assert dropped == [stream]
    with pytest.raises(OverloadedError):
        await stream.take()


async def test_responses_before_an_error_are_not_lost():
    stream = RouterStream(lambda _: None)
    stream.put(chunk(1))
    stream.end(WorkerLost("gone"))
    assert [list(response.chunk.token_ids) for response in await stream.take()] == [[1]]
    with pytest.raises(WorkerLost):
        await stream.take()
