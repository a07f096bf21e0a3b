"""The leader's loop of a decode group: continuous batching over all ranks.

Runs in a thread of its own and owns scheduler, reservations, running sequences and the control channel. Knows nothing of gRPC: the event
loop puts commands into `commands` and takes outputs from `publish`. One turn of the loop:

    commands -> operations of a plan + one row per running sequence -> all ranks -> replies settle the operations -> launch a step ->
    tokens of the oldest step under way -> stop matching -> publish one set of outputs per router

While sequences run, a turn takes only as many admissions as `AdmissionPace` allows, oldest first: looks at what has arrived before new
reservations. Whatever ends something is never kept waiting.

On a CPU the oldest step is the one just launched. On a GPU it is the one before, so that all of this happens while the device works.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from common.errors import DeadlineError, InvalidRequestError, OverloadedError, RemoteError, ServingError
from common.proto import plan_pb2, types_pb2, worker_pb2
from common.tracing import Attributes, Tracing
from decode_worker import commands as cmd
from decode_worker.admission_pace import AdmissionPace
from decode_worker.arrivals import Arrivals
from decode_worker.executor import DecodeExecutor, wants_reply
from decode_worker.metrics import DecodeMetrics
from decode_worker.reservations import Reservations
from decode_worker.run_ahead import Row, RunAhead, is_greedy
from decode_worker.scheduler import DecodeScheduler, Place
from decode_worker.sequence import Sequence
from kv_transfer.transfer_id import TransferIds
from model.control import LeaderChannel
from model.sampling import TokenChoice

logger = logging.getLogger(__name__)
_TICK_S = 0.1  # leases, fences and deadlines are looked at this often while there are any

Publish = Callable[[int, dict[str, list[worker_pb2.SequenceOutput]], types_pb2.GroupLoad], None]


@dataclass(frozen=True)
class ModelFacts:
    """What requests are checked and sampled against. `token_bytes` None: no vocabulary, stop strings are refused."""

    vocab_size: int
    max_len: int
    eos_token_ids: frozenset[int]
    token_bytes: Callable[[int], bytes | None] | None


class DecodeEngine:
    """`publish(step, outputs by router, load)` must not block. `load` may be read from any thread."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        reservations: Reservations,
        executor: DecodeExecutor,
        channel: LeaderChannel,
        facts: ModelFacts,
        commands: queue.SimpleQueue[cmd.Command],
        publish: Publish,
        metrics: DecodeMetrics,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
        pace: AdmissionPace | None = None,
    ):
        self.load = types_pb2.GroupLoad()
        self._scheduler = scheduler
        self._reservations = reservations
        self._executor = executor
        self._channel = channel
        self._facts = facts
        self._commands = commands
        self._publish = publish
        self._metrics = metrics
        self._tracing = tracing
        self._clock = clock
        self._ids = TransferIds(clock())
        self._pace = pace or AdmissionPace()
        self._arrivals = Arrivals()
        self._running: dict[str, Sequence] = {}  # by internal id, in the order of admission
        self._ahead = RunAhead(executor.lookahead)
        self._ended: list[Sequence] = []  # whose blocks are still written to by a step under way
        self._outputs: dict[str, list[worker_pb2.SequenceOutput]] = {}
        self._step = 0
        self._next_tick_s = 0.0
        self._last_step_s = 0.0
        self._step_began_s = 0.0
        self._is_draining = False
        self._update_load()

    def run(self) -> None:
        """Until ShutDown.

        Raises: WorkerLost if a rank is gone; whatever the model raises: then the whole group has to go
        """
        while self._take_commands():
            self._tick()
            self._turn()
            self._update_load()
            if self._outputs:
                outputs, self._outputs = self._outputs, {}
                self._publish(self._step, outputs, self.load)
        self._channel.send(plan_pb2.DecodePlan(shut_down=True).SerializeToString())

    # -- commands ----------------------------------------------------------------------------------------------------------------------

    def _take_commands(self) -> bool:
        """Handles all that waits; blocks for the first one if there is nothing to do. Returns: False after ShutDown"""
        is_idle = not self._running and not self._ahead.num_under_way
        may_block = is_idle and not self._reservations.has_operations and not self._arrivals
        if not self._running:
            self._metrics.idle()
        timeout_s = _TICK_S if self._reservations.num_open else None
        while True:
            try:
                command = self._commands.get(block=may_block, timeout=timeout_s)
            except queue.Empty:
                return True
            if isinstance(command, cmd.ShutDown):
                return False
            self._handle(command)
            may_block = False

    def _handle(self, command: cmd.Command) -> None:
        now_s = self._clock()
        match command:
            case cmd.Reserve():
                self._arrivals.put(command, now_s)
            case cmd.Renew(transfer_ids, done):
                cmd.answer(done, self._reservations.renew(transfer_ids, now_s))
            case cmd.Commit():
                self._try(command.done, lambda: self._reservations.commit(command, now_s))
            case cmd.Abandon(transfer_id):
                self._reservations.abandon(transfer_id)
            case cmd.Abort(internal_id, reason, done):
                cmd.answer(done, self._abort(internal_id, RemoteError("CANCELLED", reason or "aborted by the router")))
            case cmd.WriterStopped(transfer_id):
                self._reservations.writer_stopped(transfer_id)
            case cmd.WritersDied(incarnations):
                self._reservations.writers_died(incarnations)
            case cmd.RouterGone(router_id):
                self._router_gone(router_id)
            case cmd.Drain(drain):
                self._is_draining = drain
                self._update_load()

    def _try(self, done: Future, work: Callable[[], None], on_refused: Callable[[], None] = lambda: None) -> None:
        """Runs the first half of a command whose answer comes later; a refusal is an answer at once."""
        try:
            work()
        except ServingError as exc:
            on_refused()
            cmd.refuse(done, exc)

    def _take_admissions(self, limit: int) -> int:
        """The oldest of them, into the next plan. Returns: how many"""
        taken = self._reservations.ask(limit)
        while self._arrivals and taken < limit:
            command, arrived_s = self._arrivals.pop()
            self._try(command.done, partial(self._reserve, command, arrived_s), lambda: self._metrics.reservation("refused"))
            taken += 1
        return taken

    def _reserve(self, command: cmd.Reserve, arrived_s: float) -> None:
        if self._is_draining:
            raise OverloadedError("this decode group is draining")
        if command.work.internal_id in self._running:
            raise InvalidRequestError("work.internal_id", f"{command.work.internal_id!r} runs here already")
        facts = self._facts
        sequence = Sequence(
            command.work,
            command.router_id,
            transfer_id=self._ids.make(self._clock()),
            vocab_size=facts.vocab_size,
            max_len=facts.max_len,
            eos_token_ids=facts.eos_token_ids,
            token_bytes=facts.token_bytes,
            now_s=arrived_s,
        )
        now_s = self._clock()
        if sequence.deadline_s is not None and sequence.deadline_s <= now_s:
            raise DeadlineError("the request's deadline passed before there was a reservation")
        self._reservations.reserve(command, sequence, now_s)

    def _abort(self, internal_id: str, error: ServingError) -> bool:
        was_waiting = self._arrivals.forget(lambda command: command.work.internal_id == internal_id)
        sequence = self._running.get(internal_id)
        if sequence is not None:
            self._end(sequence, error)
            return True
        is_here = self._reservations.abort(internal_id, self._clock()) or was_waiting
        if is_here:
            self._metrics.aborted(error)
        return is_here

    def _router_gone(self, router_id: str) -> None:
        error = RemoteError("CANCELLED", "its router is gone")
        self._arrivals.forget(lambda command: command.router_id == router_id)
        for sequence in [*self._running.values(), *self._reservations.sequences()]:
            if sequence.router_id == router_id:
                logger.info("request %s ends: router %s is gone", sequence.internal_id, router_id)
                self._abort(sequence.internal_id, error)

    def _tick(self) -> None:
        now_s = self._clock()
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + _TICK_S
        self._reservations.tick(now_s)
        for sequence in [*self._running.values(), *self._reservations.sequences()]:
            if sequence.deadline_s is not None and sequence.deadline_s <= now_s:
                self._abort(sequence.internal_id, DeadlineError("the request's deadline passed"))

    # -- one turn ----------------------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One plan, if there is anything to do: operations first, so that their answers don't wait for the forward pass."""
        rows = self._ahead.next_rows(self._running.values())
        is_waited_for = bool(self._running or self._ahead.num_under_way)
        started_s = self._clock()
        admissions = self._take_admissions(self._pace.allowance() if is_waited_for else sys.maxsize)
        plan = self._reservations.take_operations()
        for row in rows:
            sequence = row.sequence
            token = 0 if row.follows else sequence.next_token
            plan.rows.add(transfer_id=sequence.transfer_id, token_id=token, position=row.position, follows=row.follows)
        if rows:
            plan.sampled = not is_greedy(rows)
        if plan.ByteSize():
            self._carry_out(plan)
        took_s = self._clock() - started_s
        if admissions and is_waited_for:  # many in a row cost less each than one now and then
            self._pace.took(admissions, took_s)
        if rows and (admissions or wants_reply(plan)):
            self._metrics.operated(took_s)
        if rows:
            if not self._ahead.num_under_way:
                self._step_began_s = self._clock()
            self._executor.launch(plan, [row.sequence.state for row in rows])
            self._ahead.launched(rows)
        if self._ahead.must_finish(bool(rows)):
            self._finish_step()

    def _carry_out(self, plan: plan_pb2.DecodePlan) -> None:
        """All of a plan but its step, on all ranks."""
        started_s = self._clock()
        if wants_reply(plan):
            self._update_load()  # whoever gets an answer finds it in the load
        self._channel.send(plan.SerializeToString())
        replies = [self._executor.operate(plan)]
        if not wants_reply(plan):
            return
        replies += map(plan_pb2.DecodeReply.FromString, self._channel.collect())
        outcome = self._reservations.settle(plan, replies)
        for sequence, error in outcome.failed:
            self._put_error(sequence, error)
        for sequence in outcome.admitted:
            sequence.admitted_s = started_s
            self._running[sequence.internal_id] = sequence

    def _finish_step(self) -> None:
        asked_s = self._clock()
        choices = self._executor.finish()
        self._pace.waited(self._clock() - asked_s)
        rows = self._ahead.finished()
        self._advance(rows, choices)
        over, self._ended = self._ended, []
        for sequence in over:
            self._release(sequence)
        self._step += 1
        now_s = self._clock()
        self._last_step_s, self._step_began_s = now_s - self._step_began_s, now_s
        self._pace.stepped(self._last_step_s)
        self._metrics.stepped(self._last_step_s, len(rows), now_s)

    def _advance(self, rows: list[Row], choices: list[TokenChoice | ServingError]) -> None:
        for row, choice in zip(rows, choices, strict=True):
            sequence = row.sequence
            if self._running.get(sequence.internal_id) is not sequence:
                continue  # it ended while this step was under way
            if isinstance(choice, ServingError):
                logger.error("request %s failed: %s", sequence.internal_id, choice)
                self._end(sequence, choice)
                continue
            output = sequence.advance(choice)
            if output.token_ids or output.HasField("finish"):
                self._put(sequence, output)
            if output.HasField("finish"):
                reason = types_pb2.FinishReason.Name(output.finish.reason)
                logger.info(
                    "request %s (%s) finished: %d tokens, %s", sequence.internal_id, sequence.label, sequence.state.num_output, reason
                )
                self._end(sequence, None)

    def _end(self, sequence: Sequence, error: ServingError | None) -> None:
        """A running sequence is over, and whoever waits for it is told; its blocks may be needed for one more step."""
        del self._running[sequence.internal_id]
        self._release(sequence)
        self._trace(sequence, error)
        if error is not None:
            self._metrics.aborted(error)
            self._put_error(sequence, error)

    def _release(self, sequence: Sequence) -> None:
        """Gives blocks and place back once no step under way writes there; the next plan lets every rank forget the sequence, before the
        blocks are handed out again."""
        if self._ahead.count(sequence):
            self._ended.append(sequence)
            return
        self._scheduler.release(sequence.transfer_id)
        self._reservations.forget(sequence.transfer_id)

    def _trace(self, sequence: Sequence, error: ServingError | None) -> None:
        if self._tracing is not None and sequence.traceparent:
            how = error.grpc_status if error is not None else "OK"
            attributes: Attributes = {"tandem.tokens": sequence.state.num_output, "tandem.status": how}
            self._tracing.record("decode", sequence.traceparent, sequence.admitted_s, self._clock(), attributes)

    def _put_error(self, sequence: Sequence, error: ServingError) -> None:
        self._put(
            sequence,
            worker_pb2.SequenceOutput(internal_id=sequence.internal_id, error_status=error.grpc_status, error_message=error.message),
        )

    def _put(self, sequence: Sequence, output: worker_pb2.SequenceOutput) -> None:
        self._outputs.setdefault(sequence.router_id, []).append(output)

    def _update_load(self) -> None:
        """Replaces `load` as a whole: other threads read it."""
        scheduler = self._scheduler
        self.load = types_pb2.GroupLoad(
            running=scheduler.count(Place.RUNNING),
            **scheduler.pools.counts(),
            context_tokens=sum(sequence.position for sequence in self._running.values()),
            last_step_ms=self._last_step_s * 1000,
            draining=self._is_draining,
            transfers=self._reservations.num_open,
        )
