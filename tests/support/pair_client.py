"""A small stand-in for the router: drives one prefill and one decode group over worker.proto, as `docs/architecture.md` says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from dataclasses import dataclass, field

import grpc

from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.requests import SamplingParams, sampling_to_proto
from tests.support.groups import Group
from tests.support.pace import within

_counter = itertools.count()


@dataclass
class Answer:
    """What one request came to. `error`: gRPC status name. `events`: names of the prefill events that came.

    Outputs of the decode group may overtake the first token, which comes on another connection: they wait in `early`.
    """

    internal_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprobs] = field(default_factory=list)
    finish: types_pb2.Finish | None = None
    error: str = ""
    message: str = ""
    events: list[str] = field(default_factory=list)
    handed_over_bytes: int = 0
    has_first: bool = False
    early: list[worker_pb2.SequenceOutput] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def take_first(self, output: worker_pb2.SequenceOutput) -> None:
        self.has_first = True
        for one in (output, *self.early):
            self.take(one)

    def take_decoded(self, output: worker_pb2.SequenceOutput) -> None:
        if self.has_first or output.error_status:
            self.take(output)
        else:
            self.early.append(output)

    def take(self, output: worker_pb2.SequenceOutput) -> None:
        if output.error_status:
            self.fail(output.error_status, output.error_message)
            return
        known = len(self.tokens) - output.first_index
        assert known >= 0, f"{self.internal_id}: tokens {len(self.tokens)} to {output.first_index} are missing"
        self.tokens += output.token_ids[known:]
        self.logprobs += output.logprobs[known:]
        if output.HasField("finish"):
            assert not self.done.is_set() or known, "a request ended twice"
            self.finish = output.finish
            self.done.set()

    def fail(self, status: str, message: str) -> None:
        if not self.done.is_set():
            self.error, self.message = status, message
            self.done.set()


class PairClient:
    """One router's connections. Use as an async context manager."""

    def __init__(self, prefill: Group, decode: Group):
        self.prefill_group, self.decode_group = prefill, decode
        self.router_id = f"router-{secrets.token_hex(4)}"
        self.answers: dict[str, Answer] = {}
        self.frames = 0

    async def __aenter__(self) -> PairClient:
        self._channels = [grpc.aio.insecure_channel(group.description.address) for group in (self.prefill_group, self.decode_group)]
        self.prefill = worker_pb2_grpc.PrefillGroupStub(self._channels[0])
        self.decode = worker_pb2_grpc.DecodeGroupStub(self._channels[1])
        self.subscribe()
        return self

    async def __aexit__(self, *_) -> None:
        await self.unsubscribe()
        for channel in self._channels:
            await channel.close()

    def subscribe(self) -> None:
        self._reader = asyncio.create_task(self._read())

    async def unsubscribe(self) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def generate(self, prompt: list[int], sampling: SamplingParams, *, sent: tuple[int, ...] = (), **options) -> Answer:
        """One request to its end. Cancelling the task cancels both legs."""
        work = self.work(prompt, sampling, sent=sent, **options)
        answer = self.answers[work.internal_id] = Answer(work.internal_id, tokens=list(sent))
        try:
            reservation = None
            if sampling.max_tokens - len(sent) > 1:
                reservation = await self.reserve(work)
            await self.run_prefill(work, reservation, answer)
            if not answer.done.is_set() and reservation is None:
                answer.fail("INTERNAL", "prefill ended without a finish")
            await answer.done.wait()
        except grpc.aio.AioRpcError as exc:
            answer.fail(exc.code().name, exc.details())
        except asyncio.CancelledError:
            answer.fail("CANCELLED", "")
            await asyncio.shield(self.decode.Abort(worker_pb2.AbortRequest(internal_id=work.internal_id, reason="cancelled")))
            raise
        return answer

    def work(self, prompt: list[int], sampling: SamplingParams, *, sent: tuple[int, ...] = (), deadline_ms: int = 0) -> worker_pb2.Work:
        return worker_pb2.Work(
            internal_id=f"r{next(_counter)}",
            label="test",
            prompt_ids=prompt,
            output_ids=sent,
            sampling=sampling_to_proto(sampling),
            deadline_ms=deadline_ms,
        )

    async def reserve(self, work: worker_pb2.Work) -> worker_pb2.Reservation:
        request = worker_pb2.ReserveRequest(work=work, router_id=self.router_id, writer=self.prefill_group.description)
        return await self.decode.Reserve(request, timeout=20)

    async def run_prefill(self, work: worker_pb2.Work, reservation: worker_pb2.Reservation | None, answer: Answer) -> None:
        async for event in self.prefill.Prefill(worker_pb2.PrefillTask(work=work, reservation=reservation)):
            kind = event.WhichOneof("event")
            answer.events.append(kind)
            if kind == "first_token":
                answer.take_first(event.first_token.output)
            elif kind == "handed_over":
                answer.handed_over_bytes = event.handed_over.bytes

    async def loads(self) -> tuple[types_pb2.GroupLoad, types_pb2.GroupLoad]:
        """(prefill, decode)"""
        request = worker_pb2.LoadRequest()
        return await asyncio.gather(self.prefill.GetLoad(request), self.decode.GetLoad(request))

    async def wait_idle(self, timeout_s: float) -> None:
        """Raises: AssertionError if a block is still taken or a request still there after `timeout_s`"""
        deadline = asyncio.get_running_loop().time() + within(timeout_s)
        while True:
            prefill, decode = await self.loads()
            if is_idle(prefill) and is_idle(decode):
                return
            assert asyncio.get_running_loop().time() < deadline, f"not idle after {timeout_s} s:\nprefill {prefill}\ndecode {decode}"
            await asyncio.sleep(0.02)

    async def _read(self) -> None:
        try:
            async for frame in self.decode.Subscribe(worker_pb2.SubscribeRequest(router_id=self.router_id)):
                self.frames += 1
                for output in frame.outputs:
                    if output.internal_id in self.answers:
                        self.answers[output.internal_id].take_decoded(output)
        except (grpc.aio.AioRpcError, AssertionError) as exc:
            for answer in self.answers.values():
                answer.fail("UNAVAILABLE", f"the token stream broke: {exc}")


def is_idle(load: types_pb2.GroupLoad) -> bool:
    return (
        load.free_full_blocks == load.total_full_blocks
        and load.free_sliding_blocks == load.total_sliding_blocks
        and load.running == load.waiting == load.transfers == 0
    )
