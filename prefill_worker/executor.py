"""One rank's part of a prefill group: carries out plans on this rank's KV pools, sender and model.

Every rank of the group runs the same plans in the same order; only the leader knows why. Owns the KV tensors and reports, exactly once per
transfer, how this rank's push ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from common.errors import KVTransferError, ServingError, WorkerLost
from common.proto import plan_pb2, worker_pb2
from kv_transfer.outgoing import PushResult
from kv_transfer.sender import Sender
from model.batch import SequenceView, build_prefill_batch
from model.build import Forward
from model.kv_cache import KVCache

logger = logging.getLogger(__name__)


def wants_reply(plan: plan_pb2.PrefillPlan) -> bool:
    return plan.HasField("begin") or plan.HasField("chunk")


class PrefillExecutor:
    """Called from the rank's engine thread alone.

    `report` takes one PushReport per transfer of a begin; it is called from transport threads and must not block. `check` raises WorkerLost
    if the passes so far are void.
    """

    def __init__(
        self,
        model: Forward,
        kv: KVCache,
        sender: Sender,
        rank: int,
        report: Callable[[worker_pb2.PushReport], None],
        check: Callable[[], None] | None = None,
    ):
        self._model = model
        self._check = check
        self._kv = kv
        self._sender = sender
        self._rank = rank
        self._report = report
        self._open: set[int] = set()  # a begin was tried, neither finish nor stop so far

    def run(self, plan: plan_pb2.PrefillPlan) -> tuple[plan_pb2.PrefillReply, Tensor | None]:
        """Carries out one plan. What goes wrong with its request ends up in the reply.

        Returns: the reply, and on rank 0 after a last chunk its logits [1, V] fp32
        Raises: what is not a ServingError, and WorkerLost: then the group can't go on
        """
        for transfer_id in plan.stops:
            self._stop(transfer_id)
        logits = None
        try:
            if plan.HasField("begin"):
                self._begin(plan.begin)
            if plan.HasField("chunk"):
                logits = self._compute(plan.chunk)
        except WorkerLost:
            raise
        except ServingError as exc:
            return plan_pb2.PrefillReply(error_status=exc.grpc_status, error_message=exc.message), None
        return plan_pb2.PrefillReply(), logits

    def close(self) -> None:
        self._sender.close()

    def _begin(self, begin: plan_pb2.BeginPush) -> None:
        self._open.add(begin.reservation.transfer_id)
        self._sender.begin(begin.reservation, list(begin.full_blocks), begin.num_tokens, deadline_s=begin.deadline_ms / 1000)

    def _compute(self, chunk: plan_pb2.PrefillChunk) -> Tensor | None:
        v = chunk.view
        view = SequenceView(v.token_ids, v.start, v.full_blocks, v.sliding_first, v.sliding_blocks)
        batch = build_prefill_batch(view, self._kv.geometry.block_size_tokens, "cpu", logits="last" if chunk.is_last else "none")
        on_layer = self._pusher(chunk) if chunk.transfer_id in self._open else None
        logits = self._model.forward(batch, self._kv, on_layer)
        if chunk.is_last and on_layer is not None:
            self._sender.finish(chunk.transfer_id, self._report_end)
            self._open.remove(chunk.transfer_id)
        if not chunk.is_last:
            return None
        result = None if logits is None else logits.cpu()
        if self._check is not None:
            self._check()
        return result

    def _pusher(self, chunk: plan_pb2.PrefillChunk) -> Callable[[int], None]:
        """What the forward pass calls once a layer's K and V exist."""
        view, sliding = chunk.view, self._kv.geometry.sliding
        full_blocks, sliding_blocks = list(view.full_blocks), list(view.sliding_blocks)
        start, end = view.start, view.start + len(view.token_ids)

        def push(layer: int) -> None:
            blocks, first = (sliding_blocks, view.sliding_first) if sliding[layer] else (full_blocks, 0)
            try:
                self._sender.push_layer(chunk.transfer_id, layer, start, end, blocks, first)
            except ServingError:  # the other ranks are in the same forward pass: it goes on, and `finish` will tell
                logger.exception("push of layer %d failed", layer)
                self._sender.abort(chunk.transfer_id, lambda: None)

        return push

    def _stop(self, transfer_id: int) -> None:
        """After `finish` the end is reported anyway; before it, or if it never began here, from the abort."""
        if transfer_id in self._open:
            self._open.remove(transfer_id)
            self._sender.abort(transfer_id, lambda: self._report_stopped(transfer_id))
        else:
            self._sender.abort(transfer_id, lambda: None)

    def _report_end(self, result: PushResult) -> None:
        report = worker_pb2.PushReport(
            transfer_id=result.transfer_id,
            rank=self._rank,
            bytes_per_rank=result.bytes_per_rank,
            digest_per_rank=result.digest_per_rank,
            uses=[worker_pb2.TransportUse(transport=use.transport, bytes=use.bytes, seconds=use.seconds) for use in result.uses],
        )
        if result.error is not None:
            report.error, report.error_status = result.error.message, result.error.grpc_status
        self._report(report)

    def _report_stopped(self, transfer_id: int) -> None:
        error = KVTransferError("the transfer was stopped")
        self._report(worker_pb2.PushReport(transfer_id=transfer_id, rank=self._rank, error=error.message, error_status=error.grpc_status))
