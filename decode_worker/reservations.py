"""Reservations of a decode group: from Reserve until the sequence runs or its blocks are free again.

Owned by the leader's engine thread. Turns commands and the ledger's actions into operations of the next plan, and the ranks' replies into
answers. The ledger knows who may write; the scheduler, shared with the engine, has the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from common.auth import sign
from common.errors import Corrupted, KVTransferError, LayoutMismatch, RemoteError, ServingError, TransferGivenUp
from common.keyring import Key, id_of, ring_of
from common.kv_layout import KVGeometry, check_join
from common.kv_proto import geometry_from_proto
from common.process import is_known_dead
from common.proto import plan_pb2, types_pb2, worker_pb2
from decode_worker.block_ring import BlockTables
from decode_worker.commands import Commit, Reserve, answer, refuse
from decode_worker.metrics import DecodeMetrics
from decode_worker.scheduler import Allotment, DecodeScheduler, Place
from decode_worker.sequence import Sequence
from kv_transfer.ledger import Action, AdmitSequence, FailRequest, FenceWriter, ReleaseBlocks, TransferLedger

Fence = Callable[[int, types_pb2.GroupDescription], None]


@dataclass
class _Open:
    """One reservation. `waiting`: for the verdict on what `committing` promises; several if the writer asked again."""

    sequence: Sequence
    writer: types_pb2.GroupDescription
    reservation: worker_pb2.Reservation
    committing: worker_pb2.CommitRequest = field(default_factory=worker_pb2.CommitRequest)
    waiting: list[Future] = field(default_factory=list)


@dataclass
class Outcome:
    """What a plan's replies have brought about."""

    admitted: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, ServingError]] = field(default_factory=list)


class Reservations:
    """`fence(transfer_id, writer)` asks a prefill group to stop, without waiting. `template`: what all reservations have in common.
    `is_quiet(process)`: whether nothing that a dead writer's process has begun can land any more."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        ledger: TransferLedger,
        geometry: KVGeometry,
        template: worker_pb2.Reservation,
        key: Key,
        fence: Fence,
        metrics: DecodeMetrics,
        is_quiet: Callable[[types_pb2.ProcessIdentity], bool] = is_known_dead,
    ):
        self._is_quiet = is_quiet
        self._metrics = metrics
        self._scheduler = scheduler
        self._ledger = ledger
        self._geometry = geometry
        self._template = template
        self._key = key
        self._fence = fence
        self._open: dict[int, _Open] = {}
        self._granting: dict[int, Future] = {}  # who waits for a grant of the next plan
        self._plan = plan_pb2.DecodePlan()  # operations to come
        self._unasked: dict[int, None] = {}  # commits that no rank has been asked about, oldest first
        self._outcome = Outcome()

    @property
    def has_operations(self) -> bool:
        return self._plan.ByteSize() > 0 or bool(self._unasked)

    def ask(self, limit: int) -> int:
        """Has the next plan ask all ranks what has arrived, for that many of the oldest commits. Returns: for how many"""
        asked = list(islice(self._unasked, limit))
        for transfer_id in asked:
            del self._unasked[transfer_id]
        self._plan.verifies.extend(asked)
        return len(asked)

    def take_operations(self) -> plan_pb2.DecodePlan:
        """The plan made of all operations so far; they are the engine's to run now."""
        plan, self._plan = self._plan, plan_pb2.DecodePlan()
        return plan

    def forget(self, transfer_id: int) -> None:
        """A running sequence has ended: every rank drops its tables."""
        self._plan.releases.append(transfer_id)

    @property
    def num_open(self) -> int:
        return self._ledger.num_open

    def sequences(self) -> list[Sequence]:
        return [entry.sequence for entry in self._open.values()]

    # -- commands ----------------------------------------------------------------------------------------------------------------------

    def reserve(self, command: Reserve, sequence: Sequence, now_s: float) -> None:
        """Allots everything and has every rank install the grant; the answer follows in `settle`.

        Raises: CapacityError, LayoutMismatch, KVTransferError, WriterDead; then nothing was taken
        """
        check_join(geometry_from_proto(command.writer.kv), command.writer.layout.tp, self._geometry, self._template.layout.tp)
        transfer_id = sequence.transfer_id
        allotment = self._scheduler.admit(transfer_id, sequence.max_total_tokens)
        try:
            self._ledger.reserve(transfer_id, sequence.internal_id, command.writer, self._template.lease_ms / 1000, now_s)
        except KVTransferError:
            self._scheduler.release(transfer_id)
            raise
        blocks = self._handover_blocks(allotment, sequence.num_handed_over)
        key_id = id_of(ring_of(self._key).current())
        self._plan.grants.add(
            transfer_id=transfer_id,
            num_tokens=sequence.num_handed_over,
            blocks=blocks,
            full_blocks=allotment.full.block_ids,
            sliding_ring=allotment.sliding.block_ids,
            key_id=key_id,
        )
        reservation = worker_pb2.Reservation()
        reservation.CopyFrom(self._template)
        reservation.internal_id, reservation.transfer_id = sequence.internal_id, transfer_id
        reservation.key_id = key_id
        reservation.blocks.extend(blocks)
        sign(reservation, self._key)
        self._open[transfer_id] = _Open(sequence, command.writer, reservation)
        self._granting[transfer_id] = command.done

    def renew(self, transfer_ids: list[int], now_s: float) -> list[int]:
        return self._ledger.renew(transfer_ids, now_s)

    def commit(self, command: Commit, now_s: float) -> None:
        """Has every rank look at what arrived, in as many plans as their devices take; the answer follows in `settle`.

        Raises: PeerLost, KVTransferError if there is nothing to commit
        """
        transfer_id = command.request.transfer_id
        entry = self._open.get(transfer_id)
        if entry is not None and entry.committing == command.request:
            entry.waiting.append(command.done)
            return
        num_bytes = self._geometry.handover_bytes(entry.sequence.num_handed_over) if entry is not None else 0
        if self._ledger.begin_commit(command.request, now_s, num_bytes):
            entry = self._open[transfer_id]
            entry.committing, entry.waiting = command.request, [command.done]
            self._unasked[transfer_id] = None
        else:
            answer(command.done, None)

    def abandon(self, transfer_id: int) -> None:
        self._carry_out(self._ledger.abandon(transfer_id))
        if transfer_id in self._unasked:
            self._give_up(transfer_id)

    def abort(self, internal_id: str, now_s: float) -> bool:
        """Returns: whether there is such a reservation"""
        transfer_id = self._ledger.find(internal_id)
        self._carry_out(self._ledger.abort(internal_id, now_s))
        if transfer_id in self._unasked:
            self._give_up(transfer_id)
        return transfer_id is not None

    def writer_stopped(self, transfer_id: int) -> None:
        self._carry_out(self._ledger.confirm_stopped(transfer_id))

    def writers_died(self, incarnations: list[int]) -> None:
        for incarnation in incarnations:
            self._carry_out(self._ledger.writer_died(incarnation))

    def tick(self, now_s: float) -> None:
        """Gives up reservations whose lease is over, repeats fences, looks for writers that died. A few times per second."""
        self._carry_out(self._ledger.expire(now_s))
        self._carry_out(self._ledger.sweep_dead(self._is_quiet))

    # -- replies -----------------------------------------------------------------------------------------------------------------------

    def settle(self, plan: plan_pb2.DecodePlan, replies: list[plan_pb2.DecodeReply]) -> Outcome:
        """Takes in what all ranks (rank 0 first) replied to a plan of operations. Returns: also what commands have failed meanwhile"""
        failures = {failure.transfer_id: failure for reply in replies for failure in reply.failures}
        for transfer_id in set(plan.revokes).intersection(*(set(reply.fenced) for reply in replies)):
            self.writer_stopped(transfer_id)
        for grant in plan.grants:
            self._granted(grant.transfer_id, failures.get(grant.transfer_id))
        unverified = {transfer_id for reply in replies for transfer_id in reply.unverified}
        results: dict[int, list[plan_pb2.VerifyResult]] = {transfer_id: [] for transfer_id in plan.verifies}
        for reply in replies:
            for result in reply.verified:
                results[result.transfer_id].append(result)
        for transfer_id in plan.verifies:
            if transfer_id in unverified and transfer_id not in failures:
                self._plan.verifies.append(transfer_id)
                continue
            self._verified(transfer_id, results[transfer_id], failures.get(transfer_id))
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def _granted(self, transfer_id: int, failure: plan_pb2.Failure | None) -> None:
        done = self._granting.pop(transfer_id)
        if failure is not None:
            refuse(done, RemoteError(failure.status, failure.message))
            self.abandon(transfer_id)  # nobody was told of it, so nobody writes
        else:
            self._metrics.reservation("granted")
            answer(done, self._open[transfer_id].reservation)

    def _verified(self, transfer_id: int, results: list[plan_pb2.VerifyResult], failure: plan_pb2.Failure | None) -> None:
        entry = self._open[transfer_id]
        self._end_commit(transfer_id, RemoteError(failure.status, failure.message) if failure else _difference(entry.committing, results))

    def _give_up(self, transfer_id: int) -> None:
        """Its request was ended before any rank was asked what has arrived: nobody needs to be."""
        del self._unasked[transfer_id]
        self._end_commit(transfer_id, None)

    def _end_commit(self, transfer_id: int, error: ServingError | None) -> None:
        entry = self._open[transfer_id]
        actions = self._ledger.end_commit(transfer_id, error)
        admitted = any(isinstance(action, AdmitSequence) for action in actions)
        self._carry_out(actions)
        for done in entry.waiting:
            if admitted:
                answer(done, None)
            else:
                refuse(done, error or TransferGivenUp("the request was ended while its KV was being checked"))

    def _carry_out(self, actions: list[Action]) -> None:
        is_failing = any(isinstance(action, FailRequest) for action in actions)  # blocks may be released, and forgotten, before it
        sequences = {entry.sequence.internal_id: entry.sequence for entry in self._open.values()} if is_failing else {}
        for action in actions:
            match action:
                case FenceWriter(transfer_id, _):
                    if self._scheduler.place(transfer_id) is Place.RESERVED:
                        self._metrics.reservation("fenced")
                        self._scheduler.hold(transfer_id)
                        self._plan.revokes.append(transfer_id)
                    self._fence(transfer_id, self._open[transfer_id].writer)
                case ReleaseBlocks(transfer_id):
                    self._metrics.reservation("released")
                    self._plan.revokes.append(transfer_id)
                    self._plan.releases.append(transfer_id)
                    self._scheduler.release(transfer_id)
                    del self._open[transfer_id]
                case AdmitSequence(transfer_id, _):
                    self._metrics.reservation("committed")
                    self._admit(self._open.pop(transfer_id))
                case FailRequest(internal_id, error):
                    self._metrics.reservation("failed")
                    self._outcome.failed.append((sequences[internal_id], error))

    def _admit(self, entry: _Open) -> None:
        request, sequence = entry.committing, entry.sequence
        self._scheduler.start(sequence.transfer_id)
        sequence.begin(request.first_token, request.first_logprobs if request.HasField("first_logprobs") else None)
        self._outcome.admitted.append(sequence)

    def _handover_blocks(self, allotment: Allotment, num_tokens: int) -> list[worker_pb2.BlockList]:
        g = self._geometry
        _, num_full = g.handover_blocks(num_tokens, sliding=False)
        first, count = g.handover_blocks(num_tokens, sliding=True)
        full, ring = allotment.full, allotment.sliding
        return [
            worker_pb2.BlockList(sliding=False, first_logical=0, block_ids=full.block_ids[:num_full], epochs=full.epochs[:num_full]),
            worker_pb2.BlockList(
                sliding=True,
                first_logical=first,
                block_ids=BlockTables((), ring.block_ids).sliding_range(first, count),
                epochs=BlockTables((), ring.epochs).sliding_range(first, count),
            ),
        ]


def _difference(request: worker_pb2.CommitRequest, results: list[plan_pb2.VerifyResult]) -> ServingError | None:
    """Compares what was promised with what lies in the pools, rank by rank."""
    if not len(request.bytes_per_rank) == len(request.digest_per_rank) == len(results):
        return LayoutMismatch(f"commit for {len(request.bytes_per_rank)} decode ranks, there are {len(results)}")
    for rank, result in enumerate(results):
        if result.bytes != request.bytes_per_rank[rank]:
            return Corrupted(f"{request.bytes_per_rank[rank]} bytes of KV were promised, {result.bytes} arrived", rank=rank)
        if result.digest != request.digest_per_rank[rank]:
            return Corrupted("the KV that arrived is not what was sent (digests differ)", rank=rank)
    return None
