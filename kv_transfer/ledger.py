"""The decode leader's book of reservations: which transfer may still write, whose lease ran out, when blocks are free again.

Pure: no clock (callers pass `now`, monotonic seconds), no I/O, no block ids. Returns actions for the leader to carry out. Called from the
leader's thread only; signatures are checked before.

    reserve
       |
       v        begin_commit            end_commit(None)
    RESERVED ----------------> VERIFYING ----------------> COMMITTED     AdmitSequence: the blocks are the sequence's from now on
       |   |                       |
       |   | abandon               | end_commit(error), or abort or abandon meanwhile
       |   | writer dead           |
       |   +-------------> FREE <--+                                     ReleaseBlocks, and the entry is forgotten
       | abort              ^
       | lease over         | confirm_stopped, abandon, writer dead
       v                    |
    FENCING ----------------+                                            FenceWriter, again and again until one of these proofs

ReleaseBlocks comes only once nothing of the transfer can land any more: its writer said so (a commit says so too), or every process of
the writer is known dead, or the leader called `confirm_stopped` because the transport itself refuses. Silence proves nothing. Before the
blocks are handed out again every rank revokes the grant, in the same ordered log that carries later grants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from common.errors import KVTransferError, PeerLost, ServingError, TransferGivenUp, TransferTimeout, WriterDead
from common.proto import types_pb2, worker_pb2
from kv_transfer.deadline import settle_s

_ON_ITS_WAY_S = 5.0  # a call between leaders: 2 s at most, and what clocks and a busy loop add
_DEAD_REMEMBERED = 1024  # a router may name one of them as a writer until it has the news itself


class TransferState(Enum):
    RESERVED = "reserved"
    VERIFYING = "verifying"
    COMMITTED = "committed"
    FENCING = "fencing"
    FREE = "free"


@dataclass(frozen=True)
class FenceWriter:
    """Ask the prefill leader at `address` to stop; or, if every rank's transport refuses after a revoke, call `confirm_stopped`."""

    transfer_id: int
    address: str


@dataclass(frozen=True)
class ReleaseBlocks:
    """Revoke on every rank, then put the blocks back."""

    transfer_id: int


@dataclass(frozen=True)
class AdmitSequence:
    transfer_id: int
    internal_id: str


@dataclass(frozen=True)
class FailRequest:
    """Tell the router; at most one per reservation, none if the router or the writer has ended it."""

    internal_id: str
    error: ServingError


Action = FenceWriter | ReleaseBlocks | AdmitSequence | FailRequest


@dataclass
class _Transfer:
    internal_id: str
    writer: types_pb2.GroupDescription
    lease_s: float
    lease_ends: float
    state: TransferState = TransferState.RESERVED
    is_given_up: bool = False  # ended by router or writer while the bytes were being verified
    fence_again_at: float = 0.0
    commit_until: float = 0.0  # its writer does not send a commit again after that


class TransferLedger:
    """Units: incarnation: of this decode group; fence_retry_s: between two FenceWriter for the same transfer"""

    def __init__(self, incarnation: int, *, fence_retry_s: float = 0.5):
        self._incarnation = incarnation
        self._fence_retry_s = fence_retry_s
        self._open: dict[int, _Transfer] = {}
        self._by_request: dict[str, int] = {}
        self._committed: dict[int, float] = {}  # id -> until when a commit may be sent again, because its answer was lost
        self._dead: OrderedDict[int, None] = OrderedDict()  # incarnations of writers

    @property
    def num_open(self) -> int:
        """Reserved and neither committed nor freed."""
        return len(self._open)

    @property
    def num_committed(self) -> int:
        """That are remembered, for commits that are sent again."""
        return len(self._committed)

    def find(self, internal_id: str) -> int | None:
        """Returns: the open transfer of a request"""
        return self._by_request.get(internal_id)

    def state(self, transfer_id: int) -> TransferState:
        """Returns: FREE also for ids that never were"""
        if transfer_id in self._committed:
            return TransferState.COMMITTED
        transfer = self._open.get(transfer_id)
        return transfer.state if transfer else TransferState.FREE

    def reserve(self, transfer_id: int, internal_id: str, writer: types_pb2.GroupDescription, lease_s: float, now: float) -> None:
        """Raises: KVTransferError if either id is in use, WriterDead if the writer is known dead; then nothing has changed"""
        if writer.incarnation in self._dead:
            raise WriterDead(f"prefill group {writer.group} is dead", request_id=internal_id)
        if transfer_id in self._open or transfer_id in self._committed:
            raise KVTransferError(f"transfer {transfer_id:x} exists already")
        if internal_id in self._by_request:
            raise KVTransferError("the request has a reservation here already", request_id=internal_id)
        self._open[transfer_id] = _Transfer(internal_id, writer, lease_s, now + lease_s)
        self._by_request[internal_id] = transfer_id

    def renew(self, transfer_ids: list[int], now: float) -> list[int]:
        """Starts the leases anew, but not that of one that has run out and was noticed by `expire`.

        Returns: the ids that must not be written for any more
        """
        unknown = []
        for transfer_id in transfer_ids:
            transfer = self._open.get(transfer_id)
            if transfer is None or transfer.state is TransferState.FENCING:
                unknown.append(transfer_id)
            else:
                transfer.lease_ends = now + transfer.lease_s
        return unknown

    def begin_commit(self, request: worker_pb2.CommitRequest, now: float, handover_bytes: int = 0) -> bool:
        """The writer has finished and stopped, and tries to commit for `settle_s` from its first token on, which was before this.

        Units: handover_bytes: of the prompt

        Returns: True: verify the bytes, then call `end_commit`; False: it was committed before, answer as then
        Raises: PeerLost if meant for an earlier incarnation; TransferGivenUp if there is nothing to commit
        """
        if request.incarnation != self._incarnation:
            raise PeerLost(f"commit for incarnation {request.incarnation:x}, this is {self._incarnation:x}")
        self._forget_committed(now)
        if request.transfer_id in self._committed:
            return False
        transfer = self._open.get(request.transfer_id)
        if transfer is None or transfer.state is not TransferState.RESERVED:
            raise TransferGivenUp(f"transfer {request.transfer_id:x} is {self.state(request.transfer_id).value} and can't be committed")
        transfer.state = TransferState.VERIFYING
        transfer.commit_until = now + settle_s(transfer.lease_s, handover_bytes) + _ON_ITS_WAY_S
        return True

    def end_commit(self, transfer_id: int, error: ServingError | None) -> list[Action]:
        """`error` None: bytes and digests agree on every rank. The writer has stopped either way."""
        transfer = self._open.get(transfer_id)
        if transfer is None or transfer.state is not TransferState.VERIFYING:
            return []
        if error is None and not transfer.is_given_up:
            self._forget(transfer_id)
            self._committed[transfer_id] = transfer.commit_until
            return [AdmitSequence(transfer_id, transfer.internal_id)]
        failure = [FailRequest(transfer.internal_id, error)] if error is not None and not transfer.is_given_up else []
        return [*self._release(transfer_id), *failure]

    def abandon(self, transfer_id: int) -> list[Action]:
        """The writer has stopped for good, or never started. It reports the request's end itself. Too late after a commit."""
        transfer = self._open.get(transfer_id)
        if transfer is None:
            return []
        if transfer.state is TransferState.VERIFYING:
            transfer.is_given_up = True
            return []
        return self._release(transfer_id)

    def abort(self, internal_id: str, now: float) -> list[Action]:
        """The router does not want the request any more. Nothing to do here after a commit: then the sequence is to be ended."""
        transfer_id = self._by_request.get(internal_id)
        if transfer_id is None:
            return []
        transfer = self._open[transfer_id]
        if transfer.state is TransferState.VERIFYING:
            transfer.is_given_up = True
        elif transfer.state is TransferState.RESERVED:
            return [self._fence(transfer_id, now)]
        return []

    def expire(self, now: float) -> list[Action]:
        """Gives up reservations whose lease is over, and asks again where a writer has not answered. Call several times per second."""
        self._forget_committed(now)
        actions: list[Action] = []
        for transfer_id, transfer in self._open.items():
            if transfer.state is TransferState.RESERVED and now > transfer.lease_ends:
                actions.append(self._fence(transfer_id, now))
                error = TransferTimeout(f"no sign of the prefill group for {transfer.lease_s} s", request_id=transfer.internal_id)
                actions.append(FailRequest(transfer.internal_id, error))
            elif transfer.state is TransferState.FENCING and now >= transfer.fence_again_at:
                actions.append(self._fence(transfer_id, now))
        return actions

    def confirm_stopped(self, transfer_id: int) -> list[Action]:
        """Nothing more can land: the writer answered a fence with `stopped`, or every rank's transport refuses since its revoke."""
        transfer = self._open.get(transfer_id)
        return self._release(transfer_id) if transfer and transfer.state is TransferState.FENCING else []

    def writer_died(self, incarnation: int) -> list[Action]:
        """Every process of that prefill group is known to be gone: nothing it was granted is held for it, nothing is granted any more."""
        self._dead[incarnation] = None
        if len(self._dead) > _DEAD_REMEMBERED:
            self._dead.popitem(last=False)
        actions: list[Action] = []
        for transfer_id, transfer in list(self._open.items()):
            if transfer.writer.incarnation != incarnation or transfer.state is TransferState.VERIFYING:
                continue
            if transfer.state is TransferState.RESERVED:
                error = PeerLost(f"prefill group {transfer.writer.group} died", request_id=transfer.internal_id)
                actions.append(FailRequest(transfer.internal_id, error))
            actions += self._release(transfer_id)
        return actions

    def sweep_dead(self, is_known_dead: Callable[[types_pb2.ProcessIdentity], bool]) -> list[Action]:
        """As `writer_died` for each writer of an open transfer all of whose processes are known dead; one that lists none never is."""
        writers = {transfer.writer.incarnation: transfer.writer for transfer in self._open.values()}
        actions: list[Action] = []
        for incarnation, writer in writers.items():
            if writer.ranks and all(is_known_dead(process) for process in writer.ranks):
                actions += self.writer_died(incarnation)
        return actions

    def _fence(self, transfer_id: int, now: float) -> FenceWriter:
        transfer = self._open[transfer_id]
        transfer.state = TransferState.FENCING
        transfer.fence_again_at = now + self._fence_retry_s
        return FenceWriter(transfer_id, transfer.writer.address)

    def _release(self, transfer_id: int) -> list[Action]:
        self._forget(transfer_id)
        return [ReleaseBlocks(transfer_id)]

    def _forget_committed(self, now: float) -> None:
        """Oldest first, as far as nobody asks any more; one that has longer holds up those behind it."""
        while self._committed and next(iter(self._committed.values())) < now:
            del self._committed[next(iter(self._committed))]

    def _forget(self, transfer_id: int) -> None:
        del self._by_request[self._open.pop(transfer_id).internal_id]
