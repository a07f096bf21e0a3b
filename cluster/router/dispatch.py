"""The life of a job: choose -> wait for a prefill group -> reserve -> attempt -> report; and again elsewhere when a group died.

Owns the order of these steps and every decision about a failure. State of pools is in `pools.py`, of one try in `attempt.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.router import report
from cluster.router.attempt import Attempt
from cluster.router.choice import Decision, explain
from cluster.router.chooser import Chooser, Objective
from cluster.router.groups import UNARY_TIMEOUT_S, GroupLink, PrefillLink
from cluster.router.job import Job
from cluster.router.metrics import RouterMetrics
from cluster.router.pool import DecodePool, MovedOn, PrefillPool
from cluster.router.pools import Pools
from cluster.router.retry_budget import RetryLimits
from cluster.router.status import StreamLost, is_retryable
from cluster.router.waiter import Waiter
from common.errors import CapacityError, DeadlineError, OverloadedError, ServingError, WorkerLost, WriterDead
from common.proto import types_pb2, worker_pb2

logger = logging.getLogger(__name__)
MOST_MOVES = 4  # times that a request may go on to another group because one was gone before it had begun: nothing was lost


@dataclass(frozen=True)
class DispatchSettings:
    latency_weight: float = 0.5
    max_wait_s: float = 30.0
    retry: RetryLimits = field(default_factory=RetryLimits)
    max_model_len: int = 131072


class _AttemptFailed(Exception):
    """A group failed a job. `suspects`: the groups that it may have been; `had_begun`: whether one was at work on it."""

    def __init__(self, error: ServingError, suspects: Sequence[GroupLink], *, had_begun: bool):
        super().__init__(error.message)
        self.error = error
        self.suspects = frozenset(link.description.incarnation for link in suspects)
        self.pools = {(link.description.role, link.description.pool) for link in suspects}
        self.had_begun = had_begun


class _Shunned(NamedTuple):
    """Incarnations that an attempt of the job ended on: by a failure, or because they would not take it."""

    failed: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()


@dataclass(eq=False)
class _Placement:
    """What a job holds while it has a place: undone by `Dispatcher._release`, whatever happened."""

    job: Job
    decision: Decision
    prefill_pool: PrefillPool
    decode_pool: DecodePool | None
    waiter: Waiter
    prefill: PrefillLink | None = None
    attempt: Attempt | None = None
    reservation: worker_pb2.Reservation | None = None
    is_finished: bool = False


class Dispatcher:
    def __init__(self, pools: Pools, settings: DispatchSettings, seed: int):
        self.pools = pools
        self.chooser = Chooser(pools.set, pools.profile, Objective(settings.latency_weight, settings.max_model_len), seed)
        self.metrics = RouterMetrics()
        self._settings = settings
        self._attempts = 0

    def decide(self, job: Job, avoid: frozenset[int] = frozenset()) -> Decision:
        """The pair of pools for what is left of a job.

        Raises: ServingError if no pair can take it
        """
        request = job.request
        shape = self.chooser.shape_of(len(request.prompt_ids) + len(job.tokens), job.max_tokens - len(job.tokens))
        aim = self.chooser.aim_of(request.latency_weight, request.ttft_slo_ms, request.itl_slo_ms)
        return self.chooser.plan(shape, aim, self._now(), request.priority, job.number, avoid)

    async def run(self, job: Job) -> None:
        """Drives a job to its end; its tokens and its `Complete` go to its stream.

        Raises: ServingError, once
        """
        try:
            await self._run(job)
        finally:
            self.pools.leave_front(job)

    async def _run(self, job: Job) -> None:
        shunned = _Shunned()
        failure: _AttemptFailed | None = None
        retries = moves = 0
        while True:
            job.attempts += 1
            try:
                await self._one_attempt(job, shunned)
                return
            except _AttemptFailed as exc:
                failure = exc
            except ServingError as exc:
                raise self._final(job, failure.error if failure else exc) from exc
            if isinstance(failure.error, CapacityError):  # nothing died: any group that was not asked yet may have room
                shunned = shunned._replace(refused=shunned.refused | failure.suspects)
            elif self._may_retry(failure, retries, moves):
                retries, moves = retries + failure.had_begun, moves + (not failure.had_begun)
                shunned = shunned._replace(failed=shunned.failed | failure.suspects)
            else:
                raise self._final(job, failure.error) from failure.error
            logger.info("request %s goes elsewhere after %d tokens: %s", job.request.label, len(job.tokens), failure.error.message)

    def _may_retry(self, failure: _AttemptFailed, retries: int, moves: int) -> bool:
        """Within the request's own counts, and within the budgets of the pools whose groups failed."""
        is_spent = retries >= self._settings.retry.max_per_request if failure.had_begun else moves >= MOST_MOVES
        if is_spent or not is_retryable(failure.error):
            return False
        return all(self.pools.set.of_role(role)[name].retries.take() for role, name in failure.pools)

    async def _one_attempt(self, job: Job, shunned: _Shunned) -> None:
        place = await self._place(job, shunned)
        assert place.attempt is not None
        assert place.prefill is not None
        attempt = place.attempt
        if job.stream.route is None:
            job.stream.route = explain(place.decision, everybody=False)
        try:
            finish = await attempt.run(place.reservation)
            place.is_finished = True
        except ServingError as exc:
            if job.tokens:
                job.kv_version = place.prefill.description.kv_version
            if len(job.tokens) < job.max_tokens:
                raise _AttemptFailed(exc, attempt.suspects, had_begun=attempt.has_begun) from exc
            # All tokens are out; only the word that it was the last is lost.
            finish = types_pb2.Finish(reason=types_pb2.FINISH_REASON_LENGTH)
        finally:
            self._release(place)
        self.chooser.output_length.observe(len(job.tokens))
        if job.attempts == 1:
            report.learn(job.stamps, len(job.tokens), place.decision, place.prefill_pool, place.decode_pool, self._now())
        groups = (place.prefill.name, attempt.decode.name if attempt.decode is not None else "")
        job.stream.push_complete(report.complete(job, finish, place.decision, groups, self.metrics))

    async def _place(self, job: Job, shunned: _Shunned) -> _Placement:
        """Chooses and waits until a prefill group and, where one is needed, decode blocks are there; chooses anew when a pool fills up.

        Raises: OverloadedError, DeadlineError, or what `choose` raises when nobody is left
        """
        since_s = job.stamps.arrived_s if job.attempts == 1 else self._now()
        until_s = min(job.deadline_s, since_s + self._settings.max_wait_s)
        again = job.attempts > 1
        while True:
            decision, avoid = await self._decide_patiently(job, shunned, until_s)
            place = self._enqueue(job, decision, until_s, avoid, again)
            try:
                async with asyncio.timeout_at(until_s):
                    place.prefill = await place.waiter.granted
                    job.stamps.granted_s = self._now()
                    await self._reserve(place, avoid)
                    return place
            except TimeoutError:
                self._release(place)
                raise self._waited_too_long(job, place) from None
            except MovedOn:
                self._release(place, keeps_front=True)
            except BaseException:
                self._release(place)
                raise
            again = True

    async def _decide_patiently(self, job: Job, shunned: _Shunned, until_s: float) -> tuple[Decision, frozenset[int]]:
        """As `_decide_without`; while no pair has a healthy group, one may be about to appear: soon, or when a sleeping pool has woken."""
        patient_s = min(until_s, self._now() + self._settings.retry.patience_s)
        while True:
            try:
                return self._decide_without(job, shunned)
            except WorkerLost:
                give_up_s = until_s if self.pools.may_wake() else patient_s
                if self._now() >= give_up_s:
                    raise
            with contextlib.suppress(TimeoutError), self.pools.asking():
                async with asyncio.timeout_at(give_up_s):
                    await self.pools.wait_for_change()

    def _decide_without(self, job: Job, shunned: _Shunned) -> tuple[Decision, frozenset[int]]:
        """Leaves out the groups that failed or refused the job; if that leaves nobody, those that failed get another chance: the fault may
        have been a peer's. Returns: the decision, and the incarnations it left out"""
        out = shunned.refused | self.pools.of_other_versions(job.kv_version)
        try:
            return self.decide(job, shunned.failed | out), shunned.failed | out
        except WorkerLost:
            if not shunned.failed:
                raise
            return self.decide(job, out), out

    def _enqueue(self, job: Job, decision: Decision, until_s: float, avoid: frozenset[int], again: bool) -> _Placement:
        pool = self.pools.set.prefill[decision.prefill_pool.name]
        decode_pool = self.pools.set.decode[decision.decode_pool.name] if decision.decode_pool is not None else None
        if not again:
            pool.arrived_ms += decision.prefill_ms
            for asked in (pool, decode_pool):
                if asked is not None:
                    asked.retries.note_request()
        waiter = Waiter(
            prompt_tokens=decision.shape.prompt,
            service_ms=decision.prefill_ms,
            deadline_s=until_s,
            enqueued_s=job.stamps.arrived_s,
            priority=job.request.priority,
            decode_pool=decode_pool.spec.name if decode_pool is not None else "",
            granted=asyncio.get_running_loop().create_future(),
            avoid=avoid,
            owner=job,
        )
        pool.queue.push(waiter, decision.wait_ms, accepted_before=again)
        if decode_pool is not None:
            decode_pool.expect(job, decision.shape.prompt)
        self.pools.schedule_pump()
        return _Placement(job, decision, pool, decode_pool, waiter)

    async def _reserve(self, place: _Placement, avoid: frozenset[int]) -> None:
        """Makes the attempt and, if tokens are to be decoded, reserves blocks on the best group of the chosen pool that has room.

        Raises: MovedOn if none has; _AttemptFailed if one did not answer and no other had room
        """
        job, pool = place.job, place.decode_pool
        assert place.prefill is not None
        self._attempts += 1
        work = self._work_of(job, f"{self.pools.router_id}-{job.number}-{self._attempts}")
        prefill, waiter = place.prefill, place.waiter
        # not `place` itself: it holds the attempt, and what holds itself waits for the collector with all that the request had
        attempt = place.attempt = Attempt(job, work, prefill, None, lambda: prefill.take_back(waiter))
        if pool is None:
            return
        failure: _AttemptFailed | None = None
        shape = place.decision.shape
        for link in pool.by_room(shape.worst, place.decision.seed, avoid):
            attempt.decode = link
            link.attach(work.internal_id, attempt, shape.prompt + shape.output // 2)
            request = worker_pb2.ReserveRequest(
                work=work, router_id=self.pools.router_id, writer=prefill.description, incarnation=link.description.incarnation
            )
            try:
                place.reservation = await link.call(link.stub.Reserve, request, UNARY_TIMEOUT_S)
                pool.forget(job)
                self.pools.leave_front(job)
                return
            except CapacityError:
                link.detach(work.internal_id)
            except WriterDead as exc:
                link.detach(work.internal_id)
                prefill.lose(exc.message)
                raise _AttemptFailed(prefill.lost or exc, (prefill,), had_begun=False) from exc
            except ServingError as exc:
                failure = _AttemptFailed(exc, (link,), had_begun=False)
                link.detach(work.internal_id)
                link.abort(work.internal_id, "reservation failed")
            attempt.decode = None
        if failure is not None:
            raise failure
        self.pools.no_room(pool, job)
        raise MovedOn

    def _release(self, place: _Placement, *, keeps_front: bool = False) -> None:
        """Gives back everything that a placement holds; a decode group hears of it unless the request has finished there."""
        waiter, attempt = place.waiter, place.attempt
        granted = waiter.granted
        is_gone = place.prefill_pool.queue.remove(waiter) or not granted.done() or granted.cancelled()
        if not is_gone and granted.exception() is None:
            granted.result().take_back(waiter)
        if place.decode_pool is not None:
            place.decode_pool.forget(place.job)
        if not keeps_front:
            self.pools.leave_front(place.job)
        if attempt is not None and attempt.decode is not None:
            attempt.decode.detach(attempt.work.internal_id)
            if not place.is_finished:
                attempt.decode.abort(attempt.work.internal_id, "the router gave the attempt up")

    def _work_of(self, job: Job, internal_id: str) -> worker_pb2.Work:
        left_ms = max(1, round((job.deadline_s - self._now()) * 1e3))
        return worker_pb2.Work(
            internal_id=internal_id,
            label=job.request.label,
            prompt_ids=job.request.prompt_ids,
            output_ids=job.tokens,
            sampling=job.sampling,
            deadline_ms=min(left_ms, 0xFFFFFFFF),
            traceparent=job.traceparent,
        )

    def _waited_too_long(self, job: Job, place: _Placement) -> ServingError:
        if self._now() >= job.deadline_s - 1e-3:
            return DeadlineError("the deadline passed in the queue", request_id=job.request.label or None)
        retry_after_s = place.prefill_pool.queue.retry_after_s(place.decision.wait_ms)
        return OverloadedError(f"no group took the request within {self._settings.max_wait_s:g} s", retry_after_s=retry_after_s)

    def _final(self, job: Job, error: ServingError) -> ServingError:
        if isinstance(error, WorkerLost) and job.tokens:
            return StreamLost(error.message, tokens_sent=len(job.tokens), request_id=job.request.label or None)
        return error

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
