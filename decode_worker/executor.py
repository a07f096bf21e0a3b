"""One rank's part of a decode group: carries out plans on this rank's KV pools, receiver and model.

Every rank of the group runs the same plans in the same order; only the leader knows why. Owns the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import ServingError
from common.kv_layout import KVGeometry
from common.proto import plan_pb2, worker_pb2
from decode_worker.block_ring import BlockTables
from kv_transfer.receiver import Receiver, VerifyResult
from model.batch import SequenceView
from model.decode_step import DecodeStep, StepRows
from model.sampling import SamplingState, TokenChoice


def wants_reply(plan: plan_pb2.DecodePlan) -> bool:
    return bool(plan.revokes or plan.grants or plan.verifies)


class DecodeExecutor:
    """Called from the rank's engine thread alone."""

    def __init__(self, step: DecodeStep, geometry: KVGeometry, receiver: Receiver):
        self.geometry = geometry
        self._step = step
        self._receiver = receiver
        self._tables: dict[int, BlockTables] = {}
        self._checked: dict[int, VerifyResult] = {}  # until the sequence is released
        self._under_way = 0

    def endpoints(self) -> list[worker_pb2.Endpoint]:
        """How prefill ranks reach this rank's pools."""
        return self._receiver.endpoints()

    def operate(self, plan: plan_pb2.DecodePlan) -> plan_pb2.DecodeReply:
        """Carries out all of a plan but its forward pass. A failed grant or verify concerns its own transfer only."""
        reply = plan_pb2.DecodeReply()
        for transfer_id in plan.revokes:
            self._receiver.revoke(transfer_id)
            if self._receiver.is_fenced(transfer_id):
                reply.fenced.append(transfer_id)
        for transfer_id in plan.releases:
            self._tables.pop(transfer_id, None)
            self._checked.pop(transfer_id, None)
        for grant in plan.grants:
            self._tables[grant.transfer_id] = BlockTables(tuple(grant.full_blocks), tuple(grant.sliding_ring))
            try:
                self._receiver.grant(grant.transfer_id, grant.blocks, grant.num_tokens, grant.key_id)
            except ServingError as exc:
                reply.failures.add(transfer_id=grant.transfer_id, status=exc.grpc_status, message=exc.message)
        for transfer_id in plan.verifies:
            try:
                self._check(transfer_id, reply)
            except ServingError as exc:
                self._receiver.revoke(transfer_id)
                reply.failures.add(transfer_id=transfer_id, status=exc.grpc_status, message=exc.message)
        return reply

    def _check(self, transfer_id: int, reply: plan_pb2.DecodeReply) -> None:
        """What lies in the pools is told again for as long as another rank is not ready."""
        if transfer_id not in self._checked:
            result = self._receiver.check(transfer_id)
            if result is None:
                reply.unverified.append(transfer_id)
                return
            self._checked[transfer_id] = result
            self._receiver.revoke(transfer_id)
        result = self._checked[transfer_id]
        reply.verified.add(transfer_id=transfer_id, bytes=result.bytes, digest=result.digest)

    @property
    def lookahead(self) -> int:
        """As `DecodeStep.lookahead`."""
        return self._step.lookahead

    def launch(self, plan: plan_pb2.DecodePlan, states: Sequence[SamplingState] | None) -> None:
        """Begins a step of the plan's rows, of which there is at least one; `finish` ends it.

        Units: states: what row r is sampled by, on rank 0; None on the others
        """
        keys, follows = [row.transfer_id for row in plan.rows], [row.follows for row in plan.rows]
        self._step.launch(StepRows([self._view(row) for row in plan.rows], keys, follows, not plan.sampled), states)
        self._under_way += 1

    def finish(self) -> list[TokenChoice | ServingError]:
        """Waits for the oldest step. Returns: row by row what was picked; nothing on ranks above 0

        Raises: WorkerLost if another rank did not take part
        """
        self._under_way -= 1
        return self._step.finish() or []

    def catch_up(self) -> None:
        """Finishes steps until no more are under way than may be while the next one is launched."""
        while self._under_way > self.lookahead:
            self.finish()

    def received(self) -> dict[str, int]:
        """Transfer messages of this rank by verdict; from any thread."""
        return self._receiver.counts()

    def close(self) -> None:
        self._receiver.close()

    def _view(self, row: plan_pb2.DecodeRow) -> SequenceView:
        tables = self._tables[row.transfer_id]
        first, sliding = tables.sliding_at(self.geometry, row.position)
        return SequenceView((row.token_id,), row.position, tables.full, first, sliding)
