"""Fake prefill and decode groups: real grpc.aio servers that keep the rules of `worker.proto`, with set times and tokens from a hash.

`token_at(prompt, output_index)` is a function of the prompt and the index alone, so a resumed request must go on exactly. Faults are plain
attributes and callables that a test sets. No KV moves; everything else (reserve, commit, abandon, fence, abort, frames) does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from common.auth import sign, verify
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc

KEY = b"fake cluster key"
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)  # else a failed connection holds up the next group at that address
KV = types_pb2.KVGeometry(
    num_layers=4,
    num_kv_heads=8,
    head_dim=64,
    block_size_tokens=16,
    dtype="bfloat16",
    window_tokens=128,
    sliding=[True, False, True, False],
)


def token_at(prompt_ids, index: int) -> int:
    """The token that every fake group samples at output `index` for this prompt; below 200,000, so never a control token."""
    return zlib.crc32(bytes(str((tuple(prompt_ids[-8:]), len(prompt_ids), index)), "ascii")) % 199_000


def tokens_of(prompt_ids, count: int) -> list[int]:
    return [token_at(prompt_ids, i) for i in range(count)]


def finish_at(sampling: types_pb2.SamplingParams, token: int, index: int) -> types_pb2.Finish | None:
    """What ends the output with this token, if anything does."""
    if token in sampling.stop_token_ids:
        return types_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP, stop_token_id=token)
    if index + 1 >= sampling.max_tokens:
        return types_pb2.Finish(reason=types_pb2.FINISH_REASON_LENGTH)
    return None


def pick_token(work: worker_pb2.Work, index: int) -> int:
    """A logit_bias of 100 forces its token; else the hash decides."""
    for token, bias in work.sampling.logit_bias.items():
        if bias >= 100:
            return token
    return token_at(work.prompt_ids, index)


class FakeGroup:
    """Server, description and faults of either role."""

    role = types_pb2.ROLE_UNSPECIFIED

    def __init__(self, pool: str, group: str, *, tp: int = 1, capacity_tokens: int = 1 << 20, max_batch: int = 64):
        self.description = types_pb2.GroupDescription(
            pool=pool,
            group=group,
            role=self.role,
            layout=types_pb2.Layout(tp=tp, ep=tp, dp=1),
            incarnation=random.getrandbits(64),
            kv=KV,
            capacity_tokens=capacity_tokens,
            max_batch=max_batch,
            max_model_len=131072,
            weights="mxfp4",
            transports=["fake"],
        )
        self.draining = False
        self.calls: list[str] = []
        self.traceparents: list[str] = []
        self.load_delay_s = 0.0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return self.description.address

    @property
    def is_up(self) -> bool:
        return self._server is not None

    async def start(self, address: str = "127.0.0.1:0") -> FakeGroup:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)))
        self._register(self._server)
        port = self._server.add_insecure_port(address)
        self.description.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def kill(self) -> None:
        """The process dies: connections break, nothing is answered any more."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def restart(self) -> None:
        """A new incarnation at the same address, with nothing left of the old one."""
        await self.kill()
        self.description.incarnation = random.getrandbits(64)
        self._reset()
        await self.start(self.description.address)

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def _reset(self) -> None:
        raise NotImplementedError

    def load(self) -> types_pb2.GroupLoad:
        raise NotImplementedError

    async def Describe(self, request, context):
        return self.description

    async def GetLoad(self, request, context):
        await asyncio.sleep(self.load_delay_s)
        return self.load()

    async def Drain(self, request, context):
        self.draining = request.drain
        return worker_pb2.DrainReply()


class FakePrefillGroup(FakeGroup, worker_pb2_grpc.PrefillGroupServicer):
    """One request at a time; `prefill_ms` by number of tokens. `before_first` runs before the first token is sent and may abort."""

    role = types_pb2.ROLE_PREFILL

    def __init__(self, pool="prefill", group="prefill-0", *, prefill_ms: Callable[[int], float] = lambda tokens: 2.0, **kwargs):
        super().__init__(pool, group, **kwargs)
        self.prefill_ms = prefill_ms
        self.transfer_ms = 0.5
        self.before_first: Callable[[worker_pb2.PrefillTask, grpc.aio.ServicerContext], Awaitable[None]] | None = None
        self.before_commit: Callable[[worker_pb2.PrefillTask, grpc.aio.ServicerContext], Awaitable[None]] | None = None
        self.commits_before_first = False
        self.prefilled: list[worker_pb2.Work] = []
        self.cancelled: list[str] = []
        self._reset()

    def _register(self, server) -> None:
        worker_pb2_grpc.add_PrefillGroupServicer_to_server(self, server)

    def _reset(self) -> None:
        self._turn = asyncio.Lock()
        self._running = 0

    def load(self) -> types_pb2.GroupLoad:
        return types_pb2.GroupLoad(running=min(self._running, 1), waiting=max(self._running - 1, 0), draining=self.draining)

    async def Fence(self, request, context):
        verify(request, KEY)
        return worker_pb2.FenceReply(stopped=True)

    async def Prefill(self, request, context):
        work = request.work
        self.calls.append(work.internal_id)
        self.traceparents.append(work.traceparent)
        if self.draining:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this prefill group is draining")
        self._running += 1
        try:
            async with self._turn:
                yield worker_pb2.PrefillEvent(started=worker_pb2.PrefillEvent.Started())
                tokens = len(work.prompt_ids) + len(work.output_ids)
                took_ms = self.prefill_ms(tokens)
                await asyncio.sleep(took_ms / 1e3)
                if self.before_first is not None:
                    await self.before_first(request, context)
                self.prefilled.append(work)
            index = len(work.output_ids)
            token = pick_token(work, index)
            output = worker_pb2.SequenceOutput(internal_id=work.internal_id, first_index=index, token_ids=[token])
            finish = finish_at(work.sampling, token, index)
            if finish is not None:
                output.finish.CopyFrom(finish)
            first = worker_pb2.PrefillEvent(first_token=worker_pb2.PrefillEvent.FirstToken(output=output, prefill_ms=took_ms))
            if finish is None and self.commits_before_first:
                await self._commit(request, token, context)
                await asyncio.sleep(0.05)
                yield first
            else:
                yield first
                if finish is None:
                    if self.before_commit is not None:
                        await self.before_commit(request, context)
                    await self._commit(request, token, context)
            if finish is None:
                yield worker_pb2.PrefillEvent(handed_over=worker_pb2.PrefillEvent.HandedOver(transfer_ms=self.transfer_ms, bytes=1))
            elif request.HasField("reservation"):
                await self._abandon(request.reservation, "finished at its first token")
        except asyncio.CancelledError:
            self.cancelled.append(work.internal_id)
            if request.HasField("reservation"):
                asyncio.get_running_loop().create_task(self._abandon(request.reservation, "cancelled"))
            raise
        finally:
            self._running -= 1

    async def _commit(self, task: worker_pb2.PrefillTask, token: int, context) -> None:
        reservation = task.reservation
        await asyncio.sleep(self.transfer_ms / 1e3)
        request = worker_pb2.CommitRequest(transfer_id=reservation.transfer_id, incarnation=reservation.incarnation, first_token=token)
        sign(request, KEY)
        try:
            async with grpc.aio.insecure_channel(reservation.decode_address, options=OWN_CONNECTION) as channel:
                await worker_pb2_grpc.DecodeGroupStub(channel).Commit(request)
        except grpc.RpcError as exc:
            await context.abort(exc.code(), f"commit failed: {exc.details()}")

    async def _abandon(self, reservation: worker_pb2.Reservation, reason: str) -> None:
        request = worker_pb2.AbandonRequest(transfer_id=reservation.transfer_id, incarnation=reservation.incarnation, reason=reason)
        sign(request, KEY)
        try:
            async with grpc.aio.insecure_channel(reservation.decode_address, options=OWN_CONNECTION) as channel:
                await worker_pb2_grpc.DecodeGroupStub(channel).Abandon(request, timeout=1)
        except grpc.RpcError:
            pass


@dataclass(eq=False)
class _Sequence:
    work: worker_pb2.Work
    router_id: str
    blocks: int
    transfer_id: int
    next_index: int = 0
    is_running: bool = False


@dataclass(eq=False)
class _Subscriber:
    frames: asyncio.Queue[worker_pb2.StepFrame | None] = field(default_factory=asyncio.Queue)


class FakeDecodeGroup(FakeGroup, worker_pb2_grpc.DecodeGroupServicer):
    """Continuous batching at `step_ms` per step, `tokens_per_step` tokens of each sequence. Admits by blocks and batch places."""

    role = types_pb2.ROLE_DECODE

    def __init__(self, pool: str = "decode", group: str = "decode-0", *, step_ms: float = 2.0, **kwargs):
        super().__init__(pool, group, **kwargs)
        self.step_ms = step_ms
        self.tokens_per_step = 1
        self.on_reserve: Callable[[worker_pb2.ReserveRequest, grpc.aio.ServicerContext], Awaitable[None]] | None = None
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.peak_running = 0
        self.paused = False
        self._stepper: asyncio.Task | None = None
        self._reset()

    def _register(self, server) -> None:
        worker_pb2_grpc.add_DecodeGroupServicer_to_server(self, server)

    def _reset(self) -> None:
        self._by_transfer: dict[int, _Sequence] = {}
        self._by_id: dict[str, _Sequence] = {}
        self._subscribers: dict[str, _Subscriber] = {}
        self._pending: dict[str, list[worker_pb2.SequenceOutput]] = {}
        self.total_blocks = self.description.capacity_tokens // KV.block_size_tokens
        self.free_blocks = self.total_blocks
        self._steps = itertools.count(1)

    async def start(self, address: str = "127.0.0.1:0") -> FakeDecodeGroup:
        await super().start(address)
        self._stepper = asyncio.create_task(self._step_forever())
        return self

    async def kill(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.gather(self._stepper, return_exceptions=True)
            self._stepper = None
        await super().kill()

    @property
    def running(self) -> list[_Sequence]:
        return [s for s in self._by_id.values() if s.is_running]

    def load(self) -> types_pb2.GroupLoad:
        running = self.running
        return types_pb2.GroupLoad(
            running=len(running),
            free_full_blocks=self.free_blocks,
            total_full_blocks=self.total_blocks,
            context_tokens=sum(len(s.work.prompt_ids) + s.next_index for s in running),
            last_step_ms=self.step_ms,
            draining=self.draining,
            transfers=len(self._by_id) - len(running),
        )

    async def Reserve(self, request, context):
        work = request.work
        self.calls.append(work.internal_id)
        self.traceparents.append(work.traceparent)
        if request.incarnation != self.description.incarnation:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "another incarnation is meant")
        if self.on_reserve is not None:
            await self.on_reserve(request, context)
        if self.draining:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this decode group is draining")
        blocks = -(-(len(work.prompt_ids) + work.sampling.max_tokens) // KV.block_size_tokens)
        if blocks > self.free_blocks or len(self._by_id) >= self.description.max_batch:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{blocks} blocks wanted, {self.free_blocks} free")
        self.free_blocks -= blocks
        sequence = _Sequence(work, request.router_id, blocks, random.getrandbits(64))
        self._by_transfer[sequence.transfer_id] = self._by_id[work.internal_id] = sequence
        reservation = worker_pb2.Reservation(
            internal_id=work.internal_id,
            transfer_id=sequence.transfer_id,
            incarnation=self.description.incarnation,
            decode_address=self.address,
            layout=self.description.layout,
            kv=KV,
            lease_ms=10_000,
        )
        sign(reservation, KEY)
        return reservation

    async def Renew(self, request, context):
        return worker_pb2.RenewReply(unknown_ids=[i for i in request.transfer_ids if i not in self._by_transfer])

    async def Commit(self, request, context):
        verify(request, KEY)
        sequence = self._by_transfer.get(request.transfer_id)
        if sequence is None or request.incarnation != self.description.incarnation:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no such transfer here")
        sequence.next_index = len(sequence.work.output_ids) + 1
        sequence.is_running = True
        self.peak_running = max(self.peak_running, len(self.running))
        return worker_pb2.CommitReply()

    async def Abandon(self, request, context):
        verify(request, KEY)
        sequence = self._by_transfer.get(request.transfer_id)
        if sequence is not None and not sequence.is_running:
            self._free(sequence)
        return worker_pb2.AbandonReply()

    async def Abort(self, request, context):
        sequence = self._by_id.get(request.internal_id)
        self.aborted.append(request.internal_id)
        if sequence is not None:
            self._free(sequence)
        return worker_pb2.AbortReply(found=sequence is not None)

    async def Subscribe(self, request, context):
        """Frames wait for a router that is away, as long as nobody declares it gone."""
        subscriber = self._subscribers.setdefault(request.router_id, _Subscriber())
        await context.send_initial_metadata(())
        while (frame := await subscriber.frames.get()) is not None:
            yield frame
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream breaks")

    def break_streams(self) -> None:
        """The token streams end, the process lives on."""
        for subscriber in self._subscribers.values():
            subscriber.frames.put_nowait(None)

    def fail_sequence(self, internal_id: str, status: str, message: str) -> None:
        """The group answers this request with an error."""
        sequence = self._by_id[internal_id]
        output = worker_pb2.SequenceOutput(internal_id=internal_id, error_status=status, error_message=message)
        self._pending.setdefault(sequence.router_id, []).append(output)
        self._free(sequence)

    def _free(self, sequence: _Sequence) -> None:
        if self._by_id.pop(sequence.work.internal_id, None) is not None:
            del self._by_transfer[sequence.transfer_id]
            self.free_blocks += sequence.blocks

    async def _step_forever(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self.step_ms / 1e3, time.monotonic())
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if self.paused:
                continue
            outputs, self._pending = self._pending, {}
            for sequence in self.running:
                outputs.setdefault(sequence.router_id, []).append(self._advance(sequence))
            for router_id, items in outputs.items():
                subscriber = self._subscribers.get(router_id)
                if subscriber is not None:
                    subscriber.frames.put_nowait(worker_pb2.StepFrame(step=next(self._steps), outputs=items, load=self.load()))

    def _advance(self, sequence: _Sequence) -> worker_pb2.SequenceOutput:
        work = sequence.work
        output = worker_pb2.SequenceOutput(internal_id=work.internal_id, first_index=sequence.next_index)
        for _ in range(self.tokens_per_step):
            token = pick_token(work, sequence.next_index)
            finish = finish_at(work.sampling, token, sequence.next_index)
            output.token_ids.append(token)
            sequence.next_index += 1
            if finish is not None:
                output.finish.CopyFrom(finish)
                self.finished.append(work.internal_id)
                self._free(sequence)
                break
        return output
