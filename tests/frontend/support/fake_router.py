"""A router that answers from a script, over real gRPC: what the frontend's tests talk to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from cluster.router.multiplex import CallContext, Multiplexer
from common.proto import router_pb2, router_pb2_grpc, types_pb2
from tests.support.pace import within

Request = router_pb2.GenerateRequest


@dataclass(frozen=True)
class Script:
    """One choice's answer. `fails_after`: tokens sent before `error` (status, details) ends the call; `gap_s` between
    chunks; `runs_on`: send all ids whatever the stop tokens say; `waits_after`: tokens sent before `goes_on` is waited for."""

    ids: Sequence[int]
    reason: int = types_pb2.FINISH_REASON_STOP
    chunk: int = 1
    gap_s: float = 0.0
    error: tuple[grpc.StatusCode, str] | None = None
    fails_after: int = 0
    logprob: float = -0.5
    cached_tokens: int = 0
    runs_on: bool = False
    waits_after: int | None = None
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)


def route_report() -> router_pb2.RouteReport:
    prediction = router_pb2.Prediction(
        queue_ms=20, prefill_ms=100, transfer_ms=40, ttft_ms=120.5, itl_ms=6.25, cost_usd=0.000125, score=0.0031
    )
    candidates = [
        router_pb2.Candidate(prefill_pool="prefill-tp4", decode_pool="decode-ep4", prediction=prediction, reason="costs more"),
        router_pb2.Candidate(prefill_pool="prefill-tp1", decode_pool="decode-ep4", prediction=prediction, chosen=True),
    ]
    return router_pb2.RouteReport(
        decision=router_pb2.RouteDecision(candidates=candidates, latency_weight=0.5, expected_output_tokens=100),
        actual=prediction,
        attempts=1,
    )


class FakeRouter(router_pb2_grpc.RouterServicer):
    """`script(request, index)` gives the answer of choice `index`; `requests` holds what came in; `num_open` runs now.

    Calls share a stream, as with the real router: its multiplexer runs here too.
    """

    def __init__(self, script: Callable[[Request, int], Script]):
        self.num_open = 0
        self.address = ""
        self._changed = asyncio.Condition()
        self._multiplexer = Multiplexer(self._handle)
        self.reset(script)

    def reset(self, script: Callable[[Request, int], Script]) -> None:
        """Answers by another script from now on, and forgets what was seen."""
        self.script = script
        self.requests: list[Request] = []
        self.deadlines_s: list[float] = []
        self.traceparents: list[str] = []
        self.num_cancelled = 0
        self.sends_decision = True

    async def GenerateMany(self, requests, context: grpc.aio.ServicerContext) -> None:
        await self._multiplexer.serve(requests, context)

    async def _handle(self, data: bytes, context: CallContext) -> None:
        async for response in self._generate(Request.FromString(data), context):
            await context.write(response.SerializeToString())

    async def _generate(self, request: Request, context: CallContext) -> AsyncIterator[router_pb2.GenerateResponse]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining() or 0.0)
        self.traceparents.append(str(dict(context.invocation_metadata()).get("traceparent", "")))
        await self._count(1)
        try:
            num_choices = request.sampling_params.n or 1
            scripts = [self.script(request, index) for index in range(num_choices)]
            if self.sends_decision and not any(script.error and not script.fails_after for script in scripts):
                await context.send_initial_metadata((("tandem-route-bin", route_report().decision.SerializeToString()),))
            for index, script in enumerate(scripts):
                async for response in self._choice(request, context, index, script):
                    yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            await self._count(-1)

    async def until_open(self, count: int, within_s: float = 3.0) -> None:
        """Waits until exactly that many requests run; fails if it takes longer."""
        async with asyncio.timeout(within(within_s)), self._changed:
            await self._changed.wait_for(lambda: self.num_open == count)

    async def _count(self, change: int) -> None:
        self.num_open += change
        async with self._changed:
            self._changed.notify_all()

    async def _choice(self, request: Request, context, index: int, script: Script) -> AsyncIterator[router_pb2.GenerateResponse]:
        sent = 0
        limit = request.sampling_params.max_tokens or len(script.ids)
        ids = list(script.ids)[:limit]
        is_cut = limit < len(script.ids)
        stops = set(request.sampling_params.stop_token_ids)
        ends = [i for i, token in enumerate(ids) if token in stops]
        if ends and not script.runs_on:
            ids, is_cut = ids[: ends[0] + 1], False
        for start in range(0, len(ids), script.chunk):
            if script.error is not None and sent >= script.fails_after:
                break
            if script.waits_after is not None and sent >= script.waits_after:
                await script.goes_on.wait()
            piece = ids[start : start + script.chunk]
            chunk = router_pb2.GenerateChunk(index=index, first_token_index=start, token_ids=piece)
            if request.sampling_params.HasField("logprobs"):
                tops = [
                    types_pb2.TokenLogprob(token_id=200002 - k, logprob=script.logprob - k) for k in range(request.sampling_params.logprobs)
                ]
                chunk.logprobs.extend(types_pb2.TokenLogprobs(logprob=script.logprob, top=tops) for _ in piece)
            yield router_pb2.GenerateResponse(request_id=request.request_id, chunk=chunk)
            sent += len(piece)
            if script.gap_s:
                await asyncio.sleep(script.gap_s)
        if script.error is not None:
            metadata = (("retry-after-ms", "2500"),)
            await context.abort(script.error[0], script.error[1], metadata)
        finish = types_pb2.Finish(reason=types_pb2.FINISH_REASON_LENGTH if is_cut else script.reason)
        usage = types_pb2.Usage(
            prompt_tokens=len(request.tokenized.input_ids), completion_tokens=len(ids), cached_tokens=script.cached_tokens
        )
        complete = router_pb2.GenerateComplete(index=index, finish_reason=finish, usage=usage, route=route_report())
        yield router_pb2.GenerateResponse(request_id=request.request_id, complete=complete)

    async def GetModelInfo(self, request, context) -> router_pb2.GetModelInfoResponse:
        return router_pb2.GetModelInfoResponse(model="/models/gpt-oss-20b", vocab_size=201088, max_model_len=131072)

    async def ListPools(self, request, context) -> router_pb2.ListPoolsResponse:
        layout = types_pb2.Layout
        return router_pb2.ListPoolsResponse(
            pools=[
                router_pb2.Pool(
                    name="decode-ep4",
                    role=types_pb2.ROLE_DECODE,
                    layout=layout(tp=4, ep=4, dp=1),
                    groups=1,
                    gpus_per_group=4,
                    usd_per_gpu_hour=3,
                    weights="mxfp4",
                ),
                router_pb2.Pool(
                    name="prefill-tp1",
                    role=types_pb2.ROLE_PREFILL,
                    layout=layout(tp=1, ep=1, dp=1),
                    groups=1,
                    gpus_per_group=1,
                    usd_per_gpu_hour=3,
                    weights="fp8",
                ),
            ]
        )

    async def GetLoads(self, request, context) -> router_pb2.GetLoadsResponse:
        groups = [
            router_pb2.GroupStatus(
                description=types_pb2.GroupDescription(pool=pool, group=f"{pool}-0", max_batch=64),
                load=types_pb2.GroupLoad(running=running, waiting=1, free_full_blocks=250, total_full_blocks=1000),
                healthy=True,
            )
            for pool, running in (("prefill-tp1", 1), ("decode-ep4", 5))
        ]
        queues = [router_pb2.QueueStatus(pool="prefill-tp1", requests=2, prompt_tokens=640, predicted_wait_s=0.25)]
        return router_pb2.GetLoadsResponse(groups=groups, queues=queues, running_requests=7)


@contextlib.asynccontextmanager
async def running_router(script: Callable[[Request, int], Script]) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(script)
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 16 << 20), ("grpc.so_reuseport", 0)))  # a port of its own
    router_pb2_grpc.add_RouterServicer_to_server(router, server)
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield router
    finally:
        await server.stop(None)
