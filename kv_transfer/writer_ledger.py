"""The prefill leader's book of outgoing transfers: what its ranks report, which leases to renew, what a decode leader was promised.

Pure: no clock (callers pass `now`, monotonic seconds), no I/O. Returns actions for the leader to carry out. Called from the leader's
thread only; signatures are checked before.

    accept                start                 every rank reported, no error
    ------> WAITING --------------> PUSHING -------------------------------> COMMITTING    SendCommit
               |                       | stop, an error, a fence, unknown to the decode group
               | stop, fence           v
               |                   STOPPING                                                StopRanks
               |                       | every rank reported
               v                       v
            STOPPED <------------------+                                                   SendAbandon

Each rank reports exactly once per started transfer, when it will never write for it again. `ended` forgets a transfer once the decode
leader has answered. A fence for an unknown id is a promise too: a task with that id is refused afterwards.

A task whose id has ended is refused for ever, though the id is remembered for about a lease only: a reservation that is older than its
lease when its task comes has not been renewed by anybody, so its decode group has given it up (`Horizon`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from common.errors import TransferGivenUp
from common.proto import worker_pb2
from kernels.digest import MASK
from kv_transfer.transfer_id import Horizon

_GROUPS_REMEMBERED = 1024  # decode groups, by when a task last named them; nothing can be written to one that is gone


class WriterState(Enum):
    WAITING = "waiting"
    PUSHING = "pushing"
    STOPPING = "stopping"
    STOPPED = "stopped"
    COMMITTING = "committing"


@dataclass(frozen=True)
class StopRanks:
    """Let every rank abort its push."""

    transfer_id: int


@dataclass(frozen=True)
class SendCommit:
    """Commit with first token and these sums over all ranks, by decode rank; then call `ended`."""

    reservation: worker_pb2.Reservation
    bytes_per_rank: tuple[int, ...]
    digest_per_rank: tuple[int, ...]


@dataclass(frozen=True)
class SendAbandon:
    """Tell the decode leader that nothing will be written any more; then call `ended`."""

    reservation: worker_pb2.Reservation
    reason: str


@dataclass(frozen=True)
class PushFailed:
    """End the request with this error; comes once, as soon as it is known, and not for a stop that the leader asked for."""

    internal_id: str
    error: str
    error_status: str


@dataclass(frozen=True)
class Renewal:
    """Renew these leases at one decode leader; pass the answer's unknown ids to `renewed`."""

    address: str
    incarnation: int
    transfer_ids: tuple[int, ...]


Action = StopRanks | SendCommit | SendAbandon | PushFailed


@dataclass
class _Writing:
    reservation: worker_pb2.Reservation
    renew_at: float
    state: WriterState = WriterState.WAITING
    reason: str = ""
    reports: dict[int, worker_pb2.PushReport] = field(default_factory=dict)


class WriterLedger:
    """Units: num_ranks: of this prefill group; promise_s: how long a promise about an id that never came is kept, longer than any task is
    on its way: nothing tells whose id it is"""

    def __init__(self, num_ranks: int, *, promise_s: float = 3600.0):
        self._num_ranks = num_ranks
        self._promise_s = promise_s
        self._open: dict[int, _Writing] = {}
        self._horizons: OrderedDict[int, Horizon] = OrderedDict()  # by incarnation of the decode group
        self._ended: dict[int, int] = {}  # id -> incarnation, within its horizon; in the order of their ends
        self._promised: dict[int, float] = {}  # id -> until when, in the order of time

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_remembered(self) -> int:
        """Ids that are not open and would be refused because they are known."""
        return len(self._ended) + len(self._promised)

    def accept(self, reservation: worker_pb2.Reservation, now: float) -> None:
        """A task has arrived; its lease is renewed from now on.

        Raises: TransferGivenUp if the id was fenced, has ended, is older than its lease, or is here already
        """
        transfer_id, horizon = reservation.transfer_id, self._horizon_of(reservation)
        is_known = transfer_id in self._open or transfer_id in self._ended or transfer_id in self._promised
        if is_known or horizon.is_past(transfer_id, now):
            raise TransferGivenUp(f"transfer {transfer_id:x} was given up or is here already", request_id=reservation.internal_id)
        horizon.saw(transfer_id, now)
        self._open[transfer_id] = _Writing(reservation, now + self._renew_every_s(reservation))

    def start(self, transfer_id: int) -> None:
        """The ranks are about to be told to push.

        Raises: TransferGivenUp if it was stopped or fenced meanwhile
        """
        writing = self._open.get(transfer_id)
        if writing is None or writing.state is not WriterState.WAITING:
            raise TransferGivenUp(f"transfer {transfer_id:x} was given up before its prefill began")
        writing.state = WriterState.PUSHING

    def report(self, report: worker_pb2.PushReport) -> list[Action]:
        """One rank has stopped writing: all acknowledged, or failed, or aborted. Repeated and unknown reports change nothing."""
        writing = self._open.get(report.transfer_id)
        if writing is None or writing.state not in (WriterState.PUSHING, WriterState.STOPPING) or report.rank in writing.reports:
            return []
        writing.reports[report.rank] = report
        actions: list[Action] = []
        if report.error_status and writing.state is WriterState.PUSHING:
            actions.append(PushFailed(writing.reservation.internal_id, report.error, report.error_status))
            actions += self.stop(report.transfer_id, report.error)
        if len(writing.reports) == self._num_ranks:
            actions.append(self._all_reported(writing))
        return actions

    def stop(self, transfer_id: int, reason: str) -> list[Action]:
        """The leader wants no hand-over (cancelled, failed, or ended with the first token). Idempotent; too late once all have reported."""
        writing = self._open.get(transfer_id)
        if writing is None:
            return []
        if writing.state is WriterState.WAITING:
            writing.state = WriterState.STOPPED
            return [SendAbandon(writing.reservation, reason)]
        if writing.state is WriterState.PUSHING:
            writing.state, writing.reason = WriterState.STOPPING, reason
            return [StopRanks(transfer_id)]
        return []

    def fence(self, transfer_id: int, now: float) -> tuple[bool, list[Action]]:
        """The decode leader has given the transfer up.

        Returns: (stopped: nothing will be written for it any more, and that is a promise; what to do)
        """
        writing = self._open.get(transfer_id)
        if writing is None:
            if transfer_id not in self._ended:
                self._promised.pop(transfer_id, None)
                self._promised[transfer_id] = now + self._promise_s
            return True, []
        actions: list[Action] = []
        if writing.state in (WriterState.WAITING, WriterState.PUSHING):
            reason = "the decode group gave the transfer up"
            actions = [PushFailed(writing.reservation.internal_id, reason, "UNAVAILABLE"), *self.stop(transfer_id, reason)]
        return writing.state in (WriterState.STOPPED, WriterState.COMMITTING), actions

    def due_renewals(self, now: float) -> list[Renewal]:
        """Call several times per lease. Every open transfer comes up each third of its lease."""
        self._forget(now)
        due: dict[tuple[str, int], list[int]] = {}
        for transfer_id, writing in self._open.items():
            if now >= writing.renew_at:
                writing.renew_at = now + self._renew_every_s(writing.reservation)
                due.setdefault((writing.reservation.decode_address, writing.reservation.incarnation), []).append(transfer_id)
        return [Renewal(address, incarnation, tuple(ids)) for (address, incarnation), ids in due.items()]

    def renewed(self, unknown_ids: list[int], now: float) -> list[Action]:
        """What the decode leader does not know any more must not be written for. Commits under way are left alone."""
        return [action for transfer_id in unknown_ids if transfer_id in self._open for action in self.fence(transfer_id, now)[1]]

    def ended(self, transfer_id: int, now: float) -> None:
        """The decode leader has answered the commit or the abandon, or is known to be gone. Raises nothing; idempotent."""
        writing = self._open.get(transfer_id)
        if writing is not None and writing.state in (WriterState.STOPPED, WriterState.COMMITTING):
            del self._open[transfer_id]
            self._ended[transfer_id] = writing.reservation.incarnation

    def _all_reported(self, writing: _Writing) -> Action:
        if writing.state is WriterState.STOPPING:
            writing.state = WriterState.STOPPED
            return SendAbandon(writing.reservation, writing.reason)
        writing.state = WriterState.COMMITTING
        reports = writing.reports.values()
        return SendCommit(
            writing.reservation,
            tuple(sum(parts) for parts in zip(*(report.bytes_per_rank for report in reports), strict=True)),
            tuple(sum(parts) & MASK for parts in zip(*(report.digest_per_rank for report in reports), strict=True)),
        )

    def _horizon_of(self, reservation: worker_pb2.Reservation) -> Horizon:
        horizon = self._horizons.setdefault(reservation.incarnation, Horizon(reservation.lease_ms / 1000))
        self._horizons.move_to_end(reservation.incarnation)
        if len(self._horizons) > _GROUPS_REMEMBERED:
            self._horizons.popitem(last=False)
        return horizon

    def _forget(self, now: float) -> None:
        """Ids that would be refused without being known, oldest first."""
        while self._ended:
            transfer_id, incarnation = next(iter(self._ended.items()))
            horizon = self._horizons.get(incarnation)
            if horizon is not None and not horizon.is_past(transfer_id, now):
                break
            del self._ended[transfer_id]
        while self._promised and next(iter(self._promised.values())) <= now:
            del self._promised[next(iter(self._promised))]

    def _renew_every_s(self, reservation: worker_pb2.Reservation) -> float:
        return reservation.lease_ms / 1000 / 3
