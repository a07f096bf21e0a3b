"""The gRPC face of a prefill group, on its leader's event loop: checks what comes in, makes jobs, streams their events.

Owns no request: the engine thread computes, `Handovers` looks after reservations.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from common.auth import verify
from common.errors import CapacityError, InvalidRequestError, KVTransferError, ServingError, WorkerLost
from common.kv_layout import KVGeometry
from common.output import Output, stop_rules
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.requests import sampling_from_proto
from common.server_thread import abort_with
from common.tracing import Tracing
from common.wire import Wire
from kv_transfer.deadline import settle_s
from kv_transfer.writer_ledger import WriterLedger
from model.sampling import SamplingState
from prefill_worker.call import PrefillCall
from prefill_worker.engine import Drain, PrefillEngine, Submit
from prefill_worker.handover import Handovers
from prefill_worker.job import PrefillJob
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.peers import DecodePeers
from prefill_worker.trace import PrefillTrace


@dataclass(frozen=True)
class PrefillFacts:
    """What the service needs to know of its group. `token_bytes` None: no vocabulary, stop strings are refused."""

    description: types_pb2.GroupDescription
    geometry: KVGeometry
    vocab_size: int
    eos_token_ids: frozenset[int]
    token_bytes: Callable[[int], bytes | None] | None
    wire: Wire
    lease_s: float


class PrefillService(worker_pb2_grpc.PrefillGroupServicer):
    """Made on the event loop; `close` ends what it has running there."""

    def __init__(self, engine: PrefillEngine, facts: PrefillFacts, metrics: PrefillMetrics, tracing: Tracing | None = None):
        self._tracing = tracing
        self._engine = engine
        self._facts = facts
        self._loop = asyncio.get_running_loop()
        self._peers = DecodePeers(facts.wire)
        self._handovers = Handovers(WriterLedger(len(facts.description.ranks)), self._peers, engine.commands.put, metrics)
        self._calls: dict[str, PrefillCall] = {}
        self._renewing = self._loop.create_task(self._handovers.renew_forever())

    async def close(self) -> None:
        """Every call that is still open fails as UNAVAILABLE."""
        self._renewing.cancel()
        for call in list(self._calls.values()):
            call.fail(WorkerLost(f"prefill group {self._facts.description.group} is ending"))
        await self._handovers.close()
        await self._peers.close()

    def take_report(self, report: worker_pb2.PushReport) -> None:
        """The leader's own report; called from transport threads and the engine's."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._handovers.report, report)

    # -- RPCs --------------------------------------------------------------------------------------------------------------------------

    async def Describe(self, request, context):
        return self._facts.description

    async def GetLoad(self, request, context):
        return self._engine.load

    async def Drain(self, request, context):
        self._engine.commands.put(Drain(request.drain))
        return worker_pb2.DrainReply()

    async def Prefill(self, request, context):
        call = None
        trace = PrefillTrace(self._tracing, request.work, self._facts.description.group)
        try:
            call = self._open(request)
            async for event in call.events():
                trace.saw(event)
                yield event
        except ServingError as exc:
            await abort_with(context, exc)
        except (asyncio.CancelledError, GeneratorExit):
            if call is not None:
                call.fail(KVTransferError("the router cancelled the prefill"))
            raise
        finally:
            self._calls.pop(request.work.internal_id, None)

    async def Fence(self, request, context):
        await self._checked(context, request)
        if request.incarnation != self._facts.description.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"incarnation {request.incarnation:x} does not live here any more")
        return worker_pb2.FenceReply(stopped=self._handovers.fence(request.transfer_id))

    async def ReportPush(self, request, context):
        self._handovers.report(request)
        return worker_pb2.PushReportReply()

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    async def _checked(self, context, message) -> None:
        try:
            verify(message, self._facts.wire.keys)
        except KVTransferError as exc:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, exc.message)

    def _open(self, task: worker_pb2.PrefillTask) -> PrefillCall:
        """Raises: ServingError if the task can't be taken; a reservation that came with it is abandoned then"""
        work = task.work
        if work.internal_id in self._calls:
            raise InvalidRequestError("work.internal_id", f"{work.internal_id!r} is here already")
        reservation = task.reservation if task.HasField("reservation") else None
        if reservation is not None:
            verify(reservation, self._facts.wire.keys)
        call = PrefillCall(work.internal_id, reservation, self._handovers, self._engine.commands.put, self._settle_s(work))
        if reservation is not None:
            self._handovers.accept(reservation, call)
        try:
            job = self._job(work, reservation, call)
        except ServingError as exc:
            call.fail(exc)
            return call
        self._calls[work.internal_id] = call
        self._engine.commands.put(Submit(job))
        return call

    def _job(self, work: worker_pb2.Work, reservation: worker_pb2.Reservation | None, call: PrefillCall) -> PrefillJob:
        facts = self._facts
        token_ids = (*work.prompt_ids, *work.output_ids)
        if not token_ids or max(token_ids) >= facts.vocab_size:
            raise InvalidRequestError("work.prompt_ids", f"1 or more ids below {facts.vocab_size} are needed")
        if len(token_ids) > facts.description.max_model_len:
            raise CapacityError(f"{len(token_ids)} tokens; the context is {facts.description.max_model_len}")
        sampling = sampling_from_proto(work.sampling)
        if sampling.stop and facts.token_bytes is None:
            raise InvalidRequestError("sampling_params.stop", "this deployment has no vocabulary (model.vocab) to match text with")
        rules = stop_rules(sampling, facts.eos_token_ids)
        return PrefillJob(
            key=work.internal_id,
            token_ids=token_ids,
            state=SamplingState(sampling, work.prompt_ids, work.output_ids, rules.stop_token_ids, facts.vocab_size),
            output=Output(work.internal_id, tuple(work.output_ids), rules, facts.token_bytes),
            reservation=reservation,
            deadline_s=time.monotonic() + work.deadline_ms / 1000 if work.deadline_ms else None,
            listener=call,
        )

    def _settle_s(self, work: worker_pb2.Work) -> float:
        return settle_s(self._facts.lease_s, self._facts.geometry.handover_bytes(len(work.prompt_ids) + len(work.output_ids)))
