"""A real router server on a real port over fake groups, and a client for it. Used by the tests of `cluster/router` and by benchmarks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from cluster.profile import Profile, builtin_profile
from cluster.router.directory import StaticDirectory
from cluster.router.dispatch import Dispatcher, DispatchSettings
from cluster.router.generate import Generator
from cluster.router.groups import Liveness
from cluster.router.main import Router
from cluster.router.pools import Pools
from cluster.router.queue import QueueLimits
from cluster.router.server import RouterServer, RouterServicer, ServerFacts
from common.proto import router_pb2, router_pb2_grpc, types_pb2
from common.requests import ModelLimits
from common.wire import PLAIN, Wire
from tests.support.fake_groups import FakeGroup
from tests.support.pace import within

LIMITS = ModelLimits(201088, 131072)
CLIENT_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.bdp_probe", 0),  # keeps the client's own window at 64 KiB, so that not reading is felt by the server soon
)


@dataclass
class Answer:
    """All of one stream. `arrivals_s`: when each chunk came."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    completes: dict[int, router_pb2.GenerateComplete] = field(default_factory=dict)
    arrivals_s: list[float] = field(default_factory=list)

    def add(self, response: router_pb2.GenerateResponse) -> None:
        if response.HasField("chunk"):
            chunk = response.chunk
            own = self.tokens.setdefault(chunk.index, [])
            assert chunk.first_token_index == len(own), "gap or repeat in the stream"
            own.extend(chunk.token_ids)
            self.arrivals_s.append(time.monotonic())
        else:
            assert response.complete.index not in self.completes
            self.completes[response.complete.index] = response.complete


def request_of(prompt=(1, 2, 3), *, max_tokens: int | None = 8, request_id: str = "", **fields) -> router_pb2.GenerateRequest:
    """`fields` not in GenerateRequest are sampling parameters."""
    own = {name: fields.pop(name) for name in ("priority", "latency_weight", "slo", "explain") if name in fields}
    sampling = types_pb2.SamplingParams(**{"temperature": 0.0} | fields)
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    return router_pb2.GenerateRequest(
        request_id=request_id, tokenized=types_pb2.TokenizedInput(input_ids=prompt), sampling_params=sampling, **own
    )


@dataclass
class Bed:
    router: Router
    address: str
    channel: grpc.aio.Channel
    stub: router_pb2_grpc.RouterStub

    async def generate(self, request: router_pb2.GenerateRequest, timeout: float | None = 20.0) -> Answer:
        answer = Answer()
        async for response in self.stub.Generate(request, timeout=timeout):
            answer.add(response)
        return answer

    async def raw(self, data: bytes, timeout: float = 5.0) -> list[bytes]:
        """`Generate` with these very bytes."""
        call = self.channel.unary_stream("/tandem.router.v1.Router/Generate")(data, timeout=timeout)
        return [message async for message in call]

    async def until_ready(self, groups: int, timeout_s: float = 10.0) -> None:
        async def all_healthy() -> bool:
            loads = await self.stub.GetLoads(router_pb2.GetLoadsRequest())
            return sum(group.healthy for group in loads.groups) == groups

        await until(all_healthy, timeout_s)


async def until(condition, timeout_s: float = 5.0) -> None:
    """Waits until the condition (a plain or an async function) holds. Raises: TimeoutError"""
    async with asyncio.timeout(within(timeout_s)):
        while True:
            holds = condition()
            if await holds if asyncio.iscoroutine(holds) else holds:
                return
            await asyncio.sleep(0.01)


def make_router(
    profile: Profile | None = None,
    *,
    limits: QueueLimits | None = None,
    settings: DispatchSettings | None = None,
    liveness: Liveness | None = None,
    default_deadline_s: float = 60.0,
    stream_buffer_tokens: int = 4096,
    model_limits: ModelLimits = LIMITS,
    router_id: str = "router-test",
    specs=(),
    wire: Wire = PLAIN,
) -> Router:
    settings = settings or DispatchSettings()
    pools = Pools(
        profile or builtin_profile(None, on_cuda=False),
        specs,
        router_id=router_id,
        limits=limits or QueueLimits(),
        liveness=liveness or Liveness(),
        retry=settings.retry,
    )
    dispatcher = Dispatcher(pools, settings, seed=1)
    generator = Generator(
        dispatcher, lambda: model_limits, default_deadline_s=default_deadline_s, stream_buffer_tokens=stream_buffer_tokens
    )
    facts = ServerFacts("fake", model_limits.vocab_size, (200002, 200012), "test", router_id)
    servicer = RouterServicer(facts, dispatcher, generator, lambda: model_limits)
    return Router(pools, dispatcher, generator, RouterServer(servicer, generator, pools, wire))


@asynccontextmanager
async def bed(*groups: FakeGroup, directory=None, token: str = "", **kwargs) -> AsyncIterator[Bed]:
    """Starts the groups that are not running yet and a router over them; takes everything down again."""
    for group in groups:
        if not group.address:
            await group.start()
    router = make_router(**kwargs)
    follow = asyncio.create_task(router.pools.follow(directory or StaticDirectory([group.address for group in groups])))
    address = await router.server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
            stub = Wire(token=token).stub(router_pb2_grpc.RouterStub(channel))
            test_bed = Bed(router, address, channel, stub)
            if directory is None:
                await test_bed.until_ready(len(groups))
            yield test_bed
    finally:
        await router.server.drain(0)
        follow.cancel()
        await asyncio.gather(follow, return_exceptions=True)
        await router.pools.close()
        await asyncio.gather(*(group.kill() for group in groups))
