"""One `Generate` call: from raw bytes to n jobs, and from their buffer to the client. Owns the call's ending: exactly one, by its deadline.

Called by `server.py`; the jobs are driven by `dispatch.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence

import grpc

from cluster.router.dispatch import Dispatcher
from cluster.router.job import Job, Stamps
from cluster.router.multiplex import CallContext
from cluster.router.status import ROUTE_KEY, RequestAborted, abort
from cluster.router.streams import ClientStream
from cluster.router.trace import CallTrace
from common.errors import DeadlineError, OverloadedError, ServingError, WorkerLost
from common.proto import types_pb2
from common.requests import ModelLimits, Request, parse_request, sampling_to_proto
from common.tracing import Tracing

logger = logging.getLogger(__name__)


class Running:
    """The calls in progress, by the client's label. Producer and consumer: `Generator`; `Abort` looks them up."""

    def __init__(self) -> None:
        self._streams: dict[ClientStream, str] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: ClientStream, label: str) -> None:
        self._streams[stream] = label
        self._idle.clear()

    def remove(self, stream: ClientStream) -> None:
        self._streams.pop(stream, None)
        if not self._streams:
            self._idle.set()

    def abort(self, label: str) -> int:
        """Ends every call with that label. Returns: how many"""
        hit = [stream for stream, own in self._streams.items() if own == label]
        for stream in hit:
            stream.fail(RequestAborted("aborted on request", request_id=label or None))
        return len(hit)

    def fail_all(self, error: ServingError) -> None:
        for stream in list(self._streams):
            stream.fail(error)

    async def wait_idle(self) -> None:
        await self._idle.wait()


class Generator:
    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: Callable[[], ModelLimits],
        *,
        default_deadline_s: float,
        stream_buffer_tokens: int,
        tracing: Tracing | None = None,
    ):
        self._tracing = tracing
        self.running = Running()
        self.metrics = dispatcher.metrics
        self.is_draining = False
        self._dispatcher = dispatcher
        self._limits = limits
        self._default_deadline_s = default_deadline_s
        self._stream_buffer_tokens = stream_buffer_tokens
        self._numbers = itertools.count(1)

    async def handle(self, data: bytes, context: grpc.aio.ServicerContext | CallContext) -> None:
        """The body of the RPC: writes serialised messages and ends the call with OK or one error."""
        error: ServingError
        trace = CallTrace(self._tracing, context.invocation_metadata())
        try:
            self.metrics.ended_well(await self._serve(data, context, trace))
            trace.end()
            return
        except ServingError as exc:
            error = exc
        except asyncio.CancelledError as exc:
            self.metrics.cancelled()
            trace.end(exc)
            raise
        self.metrics.ended_badly(error)
        trace.end(error)
        is_turned_away = isinstance(error, OverloadedError) and not trace.jobs  # before anything was done: these come in floods
        logger.log(logging.DEBUG if is_turned_away else logging.INFO, "failed %s: %s", error.grpc_status, error)
        await abort(context, error)

    async def _serve(self, data: bytes, context: grpc.aio.ServicerContext | CallContext, trace: CallTrace) -> types_pb2.FinishReason:
        """Returns: why the (first) choice ended"""
        arrived_s = asyncio.get_running_loop().time()
        if self.is_draining:
            raise WorkerLost("this router is draining and takes no new request")
        request = parse_request(data, self._limits())
        self._dispatcher.chooser.check_room(len(request.prompt_ids), request.priority, arrived_s)
        remaining_s = context.time_remaining()
        deadline_s = arrived_s + (self._default_deadline_s if remaining_s is None else remaining_s)
        stream = ClientStream(request.label, self._stream_buffer_tokens)
        self.running.add(stream, request.label)
        trace.jobs = self._jobs_of(request, stream, arrived_s, deadline_s, trace.traceparent)
        jobs = asyncio.create_task(self._run_jobs(trace.jobs, stream))
        try:
            await self._send(stream, context, deadline_s)
            return stream.finish_reason
        finally:
            jobs.cancel()
            self.running.remove(stream)

    async def _send(self, stream: ClientStream, context: grpc.aio.ServicerContext | CallContext, deadline_s: float) -> None:
        """Until the end of the stream. A failure of the stream also interrupts a write that the client does not read."""
        try:
            async with asyncio.timeout_at(deadline_s) as scope:
                stream.on_failure = lambda: _end_now(scope)
                message = await stream.take()
                if stream.route is not None:
                    await context.send_initial_metadata(((ROUTE_KEY, stream.route.SerializeToString()),))
                while message is not None:
                    await context.write(message)
                    message = await stream.take()
        except TimeoutError:
            raise stream.error or DeadlineError("the request's deadline passed") from None

    async def _run_jobs(self, jobs: Sequence[Job], stream: ClientStream) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._dispatcher.run(job)) for job in jobs]
            if any(task.cancelled() for task in tasks):  # a group of tasks takes that for an end like any other
                raise WorkerLost("the request was dropped with a connection of its group")
            stream.close()
        except* ServingError as failures:
            stream.fail(_first(failures))
        except* Exception as bugs:
            logger.exception("request %s failed inside the router", jobs[0].request.label)
            stream.fail(ServingError(f"internal error: {bugs.exceptions[0]!r}"))

    def _jobs_of(self, request: Request, stream: ClientStream, arrived_s: float, deadline_s: float, traceparent: str) -> list[Job]:
        """n independent choices, seeds in a row from the request's (or from a random one)."""
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        jobs = []
        for index in range(request.sampling.n):
            sampling = sampling_to_proto(request.sampling)
            sampling.seed = (seed + index + 2**63) % 2**64 - 2**63
            sampling.n = 1
            stamps = Stamps(arrived_s)
            job = Job(request, next(self._numbers), index, sampling, stream, deadline_s, stamps, self.metrics.output_tokens, traceparent)
            jobs.append(job)
        return jobs


def _end_now(scope: asyncio.Timeout) -> None:
    if not scope.expired():  # else the deadline was faster
        scope.reschedule(asyncio.get_running_loop().time())


def _first(failures: ExceptionGroup[ServingError]) -> ServingError:
    error = failures.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
