"""Carries out what the writer's ledger says: stops pushes, commits and abandons at decode groups, renews leases, keeps promises.

Lives on the leader's event loop, but for `try_begin`, which the engine thread calls; a lock keeps a fence and a begin of the same transfer
from crossing. Producer of StopPush, Cancel and Release commands to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from common.errors import KVTransferError, PeerLost, RemoteError, ServingError, TransferTimeout
from common.proto import worker_pb2
from kv_transfer.writer_ledger import Action, PushFailed, SendAbandon, SendCommit, StopRanks, WriterLedger
from prefill_worker.engine import Command, Release, StopPush
from prefill_worker.job import FirstToken
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.peers import DecodePeers

logger = logging.getLogger(__name__)
_RETRY_S = 0.1
_RENEW_TICK_S = 0.1


class HandoverCall(Protocol):
    """The request that a reservation belongs to."""

    key: str

    async def first_to_commit(self) -> FirstToken | None:
        """The first token once it is sampled; None if the request ends without a hand-over."""

    def commit_until_s(self) -> float:
        """When to give up committing, on the loop's clock."""

    def handed_over(self, num_bytes: int) -> None: ...

    def fail(self, error: ServingError) -> None: ...


class Handovers:
    """All reservations that this group was given."""

    def __init__(self, ledger: WriterLedger, peers: DecodePeers, command: Callable[[Command], None], metrics: PrefillMetrics):
        self.metrics = metrics
        self._ledger = ledger
        self._lock = threading.Lock()  # guards the ledger
        self._peers = peers
        self._command = command
        self._calls: dict[int, HandoverCall] = {}
        self._tasks: set[asyncio.Task] = set()

    def try_begin(self, transfer_id: int) -> bool:
        """From the engine thread. Returns: whether ranks may be told to write"""
        with self._lock:
            try:
                self._ledger.start(transfer_id)
            except KVTransferError:
                return False
            return True

    def accept(self, reservation: worker_pb2.Reservation, call: HandoverCall) -> None:
        """Raises: KVTransferError if the transfer was given up or is here already"""
        with self._lock:
            self._ledger.accept(reservation, self._now_s())
        self._calls[reservation.transfer_id] = call

    def report(self, report: worker_pb2.PushReport) -> None:
        self.metrics.wrote(report.uses)
        with self._lock:
            actions = self._ledger.report(report)
        self._carry_out(actions)

    def stop(self, transfer_id: int, reason: str) -> None:
        """The request wants no hand-over any more."""
        with self._lock:
            actions = self._ledger.stop(transfer_id, reason)
        self._carry_out(actions)

    def fence(self, transfer_id: int) -> bool:
        """Returns: whether nothing will be written for the transfer any more, as a promise"""
        with self._lock:
            is_stopped, actions = self._ledger.fence(transfer_id, self._now_s())
        self._carry_out(actions)
        return is_stopped

    async def renew_forever(self) -> None:
        """Keeps the leases of all open transfers; gives up those that their decode group does not know any more."""
        while True:
            await asyncio.sleep(_RENEW_TICK_S)
            with self._lock:
                due = self._ledger.due_renewals(self._now_s())
            for renewal in due:
                self._spawn(self._renew(renewal.address, renewal.incarnation, renewal.transfer_ids))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StopRanks(transfer_id):
                    self._command(StopPush(transfer_id))
                case SendCommit():
                    self._spawn(self._commit(action))
                case SendAbandon(reservation, reason):
                    self._spawn(self._abandon(reservation, reason))
                case PushFailed(_, error, error_status):
                    self._failed_call(action.internal_id).fail(RemoteError(error_status, error))

    async def _commit(self, action: SendCommit) -> None:
        reservation = action.reservation
        call = self._calls[reservation.transfer_id]
        first = await call.first_to_commit()
        if first is None:
            await self._abandon(reservation, "the request ended without a hand-over")
            return
        request = worker_pb2.CommitRequest(
            transfer_id=reservation.transfer_id,
            incarnation=reservation.incarnation,
            first_token=first.token_id,
            first_logprobs=first.logprobs,
            bytes_per_rank=action.bytes_per_rank,
            digest_per_rank=action.digest_per_rank,
        )
        try:
            await self._until_answered(lambda: self._peers.commit(reservation.decode_address, request), call.commit_until_s())
            call.handed_over(sum(action.bytes_per_rank))
        except ServingError as exc:
            self.metrics.failed()
            call.fail(exc)
        self._ended(reservation.transfer_id)

    async def _abandon(self, reservation: worker_pb2.Reservation, reason: str) -> None:
        self.metrics.abandoned()
        request = worker_pb2.AbandonRequest(transfer_id=reservation.transfer_id, incarnation=reservation.incarnation, reason=reason)
        until_s = self._now_s() + reservation.lease_ms / 1000
        try:
            await self._until_answered(lambda: self._peers.abandon(reservation.decode_address, request), until_s)
        except ServingError as exc:  # the decode group will fence by itself when the lease is over, and learn that we have stopped
            logger.warning("transfer %x could not be abandoned: %s", reservation.transfer_id, exc)
        self._ended(reservation.transfer_id)

    async def _until_answered(self, call, until_s: float) -> None:
        """Repeats an idempotent call. Raises: TransferTimeout if no answer came by `until_s`; RemoteError as it was answered"""
        while True:
            try:
                await call()
                return
            except PeerLost as exc:
                if self._now_s() >= until_s:
                    raise TransferTimeout(exc.message) from exc
                await asyncio.sleep(_RETRY_S)

    async def _renew(self, address: str, incarnation: int, transfer_ids: tuple[int, ...]) -> None:
        request = worker_pb2.RenewRequest(transfer_ids=transfer_ids, incarnation=incarnation)
        try:
            unknown = list((await self._peers.renew(address, request)).unknown_ids)
        except PeerLost as exc:
            logger.warning("leases not renewed: %s", exc)
            return
        except RemoteError as exc:
            logger.warning("leases refused: %s", exc)
            unknown = list(transfer_ids)
        with self._lock:
            actions = self._ledger.renewed(unknown, self._now_s())
        self._carry_out(actions)

    def _failed_call(self, internal_id: str) -> HandoverCall:
        return next(call for call in self._calls.values() if call.key == internal_id)

    def _ended(self, transfer_id: int) -> None:
        with self._lock:
            self._ledger.ended(transfer_id, self._now_s())
        self._command(Release(self._calls.pop(transfer_id).key))

    def _spawn(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
