"""The leader's loop of a prefill group: takes jobs from the service, computes them chunk by chunk on all ranks, samples the first token.

Runs in a thread of its own and owns scheduler, jobs and the control channel. Knows nothing of gRPC: producers (the service and the
hand-overs, on the event loop) put commands into `commands`; results go to each job's listener.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from common.errors import DeadlineError, OverloadedError, PeerLost, RemoteError, ServingError
from common.proto import plan_pb2, types_pb2, worker_pb2
from model.control import DISAGREEMENT_S, LeaderChannel
from model.sampling import sample
from prefill_worker.executor import PrefillExecutor, wants_reply
from prefill_worker.job import FirstToken, PrefillJob
from prefill_worker.scheduler import Chunk, PrefillScheduler

_LONGEST_PUSH_S = 600.0  # from the first chunk on; the hand-over has a tighter limit from the first token on


@dataclass(frozen=True)
class Submit:
    job: PrefillJob


@dataclass(frozen=True)
class Cancel:
    """Ends a job that has no first token yet with `error`; others and unknown keys are left alone."""

    key: str
    error: ServingError


@dataclass(frozen=True)
class StopPush:
    """Every rank ends its push of this transfer and reports."""

    transfer_id: int


@dataclass(frozen=True)
class Release:
    """The push is over on every rank: the source blocks are free."""

    key: str


@dataclass(frozen=True)
class Drain:
    drain: bool


@dataclass(frozen=True)
class ShutDown:
    pass


Command = Submit | Cancel | StopPush | Release | Drain | ShutDown


class PrefillEngine:
    """`load` may be read from any thread; everything else belongs to the thread of `run`."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        executor: PrefillExecutor,
        channel: LeaderChannel,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.load = types_pb2.GroupLoad()
        self._scheduler = scheduler
        self._executor = executor
        self._channel = channel
        self._clock = clock
        self._jobs: dict[str, PrefillJob] = {}
        self._stops: list[int] = []  # transfers to stop with the next plan
        self._is_draining = False
        self._last_prefill_s = 0.0
        self._publish_load()

    def run(self) -> None:
        """Until ShutDown.

        Raises: WorkerLost if a rank is gone; whatever the model raises that is not a ServingError
        """
        while self._take_commands():
            self._expire()
            chunk = self._scheduler.next_chunk()
            if chunk is not None:
                self._compute(chunk)
            elif self._stops:
                self._execute(plan_pb2.PrefillPlan())
            self._publish_load()
        self._channel.send(plan_pb2.PrefillPlan(shut_down=True).SerializeToString())

    # -- commands ----------------------------------------------------------------------------------------------------------------------

    def _take_commands(self) -> bool:
        """Handles all that waits; blocks for the first one if there is nothing else to do. Returns: False after ShutDown"""
        may_block = self._scheduler.computing is None and not self._stops
        while True:
            try:
                command = self.commands.get(block=may_block, timeout=self._wait_s() if may_block else None)
            except queue.Empty:
                return True
            if isinstance(command, ShutDown):
                return False
            self._handle(command)
            may_block = False

    def _wait_s(self) -> float | None:
        """Until the next deadline of a waiting job; nothing else happens by itself. A prompt that waits for blocks waits for a Release."""
        if self._scheduler.num_waiting and self._scheduler.num_pushing == 0:
            return 0.0
        deadlines = [job.deadline_s for job in self._jobs.values() if job.deadline_s is not None]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(job):
                self._submit(job)
            case Cancel(key, error):
                self._cancel(key, error)
            case StopPush(transfer_id):
                self._stops.append(transfer_id)
            case Release(key):
                self._scheduler.release(key)
            case Drain(drain):
                self._is_draining = drain
        self._publish_load()

    def _submit(self, job: PrefillJob) -> None:
        try:
            if self._is_draining:
                raise OverloadedError("this prefill group is draining")
            self._scheduler.submit(job.key, len(job.token_ids))
        except ServingError as exc:
            job.listener.on_failed(exc)
            return
        self._jobs[job.key] = job

    def _cancel(self, key: str, error: ServingError) -> None:
        job = self._jobs.pop(key, None)
        if job is not None:
            self._leave(job)
            job.listener.on_failed(error)

    def _leave(self, job: PrefillJob) -> None:
        """The job needs no more compute. Blocks of a push that was begun stay taken until Release, because ranks may be reading them."""
        if job.is_begun:
            self._scheduler.finish()
        else:
            self._scheduler.release(job.key)

    def _expire(self) -> None:
        now_s = self._clock()
        for job in [job for job in self._jobs.values() if job.deadline_s is not None and job.deadline_s <= now_s]:
            self._cancel(job.key, DeadlineError("the request's deadline passed before its first token"))

    # -- compute -----------------------------------------------------------------------------------------------------------------------

    def _compute(self, chunk: Chunk) -> None:
        job = self._jobs[chunk.key]
        if chunk.start == 0:
            job.started_s = self._clock()
            job.listener.on_started()
            error = self._begin(job, job.reservation) if job.reservation is not None else None
            if error is not None:
                self._cancel(job.key, error)
                return
        plan = plan_pb2.PrefillPlan()
        plan.chunk.view.token_ids.extend(job.token_ids[chunk.start : chunk.end])
        plan.chunk.view.start = chunk.start
        plan.chunk.view.full_blocks.extend(chunk.full_blocks)
        plan.chunk.view.sliding_first = chunk.sliding_first
        plan.chunk.view.sliding_blocks.extend(chunk.sliding_blocks)
        plan.chunk.transfer_id = job.pushed_transfer_id
        plan.chunk.is_last = chunk.is_last
        error, logits = self._execute(plan)
        self._scheduler.chunk_done()
        if error is not None:
            self._cancel(job.key, error)
        elif chunk.is_last and logits is not None:
            self._first_token(job, logits)

    def _begin(self, job: PrefillJob, reservation: worker_pb2.Reservation) -> ServingError | None:
        """Opens the job's push on every rank."""
        if not job.listener.may_begin():
            return PeerLost("the reservation was given up before the prefill began")
        left_s = _LONGEST_PUSH_S if job.deadline_s is None else min(_LONGEST_PUSH_S, job.deadline_s - self._clock())
        plan = plan_pb2.PrefillPlan()
        plan.begin.reservation.CopyFrom(reservation)
        plan.begin.num_tokens = len(job.token_ids)
        plan.begin.full_blocks.extend(self._scheduler.full_blocks(job.key))
        plan.begin.deadline_ms = max(1, int(left_s * 1000))
        job.is_begun = True
        return self._execute(plan)[0]

    def _first_token(self, job: PrefillJob, logits: Tensor) -> None:
        (choice,) = sample(logits.float(), [job.state])
        if isinstance(choice, ServingError):
            self._cancel(job.key, choice)
            return
        output = job.output.push(choice.token_id, choice.logprobs)
        del self._jobs[job.key]
        self._last_prefill_s = self._clock() - job.started_s
        self._leave(job)
        job.listener.on_first_token(FirstToken(output, choice.token_id, choice.logprobs, self._last_prefill_s, len(job.token_ids)))

    def _execute(self, plan: plan_pb2.PrefillPlan) -> tuple[ServingError | None, Tensor | None]:
        """Runs a plan, and the stops that wait, on all ranks. Returns: (error of its request, logits)"""
        plan.stops.extend(self._stops)
        self._stops.clear()
        self._channel.send(plan.SerializeToString())
        reply, logits = self._executor.run(plan)
        if not wants_reply(plan):
            return None, None
        timeout_s = DISAGREEMENT_S if reply.error_status else None
        replies = [reply, *map(plan_pb2.PrefillReply.FromString, self._channel.collect(timeout_s))]
        failed = [r for r in replies if r.error_status]
        if not failed:
            return None, logits
        self._channel.send(plan_pb2.PrefillPlan().SerializeToString())  # tells ranks that failed that the others did too
        return RemoteError(failed[0].error_status, failed[0].error_message), None

    def _publish_load(self) -> None:
        """Replaces `load` as a whole: other threads read it."""
        scheduler = self._scheduler
        self.load = types_pb2.GroupLoad(
            running=int(scheduler.computing is not None),
            waiting=scheduler.num_waiting,
            **scheduler.pools.counts(),
            context_tokens=scheduler.unfinished_tokens,
            last_step_ms=self._last_prefill_s * 1000,
            draining=self._is_draining,
            transfers=scheduler.num_pushing,
        )
