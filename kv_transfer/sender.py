"""A prefill rank's end of transfers: pushes each layer's new KV to the decode ranks that need those heads, while compute goes on.

Knows nothing of requests or other ranks; the prefill leader's `WriterLedger` collects what the ranks report. Called from the rank's step
loop (`begin`, `push_layer`, `finish`, `abort`: none of them blocks); callbacks come from transport threads and must be short.

    begin -> push_layer ... -> finish -> on_done(result)            exactly once; with result.error if it failed on the way
      `--------- abort ------------------> on_stopped()             exactly once; on_done too if finish was called before

Both callbacks mean the same: this rank will never again write for the transfer, and its source blocks may be reused. Until then the blocks
of full layers must stay as they are. Blocks of sliding layers may be reused as soon as `push_layer` returns: the little that is handed over
of them (one window) is copied.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
import torch

from common import auth
from common.errors import KVTransferError, ServingError
from common.keyring import Key
from common.kv_layout import PushPair
from common.proto import worker_pb2
from kv_transfer.cuda_device import device_of
from kv_transfer.deadline import Deadline
from kv_transfer.device import Device
from kv_transfer.outgoing import Outgoing, PushResult
from kv_transfer.peer import Job, Peer
from kv_transfer.pool_view import PoolView
from kv_transfer.push import DevicePart, Push
from kv_transfer.transports.base import Link
from kv_transfer.transports.choose import LinkOpener, LinkRate

logger = logging.getLogger(__name__)

_ABORT_GRACE_S = 0.5  # for the write under way, before its connection is cut


class Sender:
    """All outgoing transfers of one prefill rank.

    Units: key: the cluster's secret; rank: this rank's tensor-parallel rank; io_timeout_s: longest wait for a peer without progress;
        idle_s: after which an unused link is closed; device: what the pools lie on, None: found by the pools
    """

    def __init__(
        self,
        view: PoolView,
        *,
        key: Key,
        rank: int,
        preference: str = "auto",
        io_timeout_s: float = 10.0,
        idle_s: float = 60.0,
        device: Device | None = None,
    ):
        if rank != view.tp_rank:
            raise KVTransferError(f"rank {rank} was given the pools of rank {view.tp_rank}")
        self._view = view
        self._key = key
        self._device = device or device_of(view.full)
        self._opener = LinkOpener(view, key=key, preference=preference, io_timeout_s=io_timeout_s, device=self._device)
        self._idle_s = idle_s
        self._lock = threading.Lock()  # guards the two dictionaries
        self._outgoing: dict[int, Outgoing] = {}
        self._peers: dict[tuple[int, int], Peer] = {}
        self._finishing: set[int] = set()

    def begin(self, reservation: worker_pb2.Reservation, full_blocks: list[int], num_tokens: int, *, deadline_s: float = 600.0) -> None:
        """Opens a transfer.

        Units: full_blocks: this rank's blocks of the prompt's full layers, in logical order; num_tokens: of the prompt;
            deadline_s: from now, for the whole transfer
        Raises: LayoutMismatch if the two groups' KV can't be joined; KVTransferError if the reservation is not signed with our key, does
            not hold the prompt, or offers no transport that this rank can use. Then nothing was opened.
        """
        auth.verify(reservation, self._key)
        needed = self._view.geometry.blocks_for(num_tokens)
        if len(full_blocks) < needed or not all(0 <= block < self._view.full.shape[1] for block in full_blocks):
            raise KVTransferError(f"{len(full_blocks)} source blocks for {needed}, or one is not in a pool of {self._view.full.shape[1]}")
        outgoing = Outgoing(self._view, self._key, reservation, num_tokens, deadline_s)
        for pair in outgoing.pairs:
            self._opener.candidates(outgoing.endpoints.get(pair.dst_rank, ()), pair.dst_rank)
        with self._lock:
            if outgoing.transfer_id in self._outgoing:
                raise KVTransferError(f"transfer {outgoing.transfer_id:x} is open already")
            self._outgoing[outgoing.transfer_id] = outgoing
        if self._device is not None:
            outgoing.upload(self._device)

    def push_layer(self, transfer_id: int, layer: int, start_token: int, end_token: int, block_ids: list[int], first_logical: int) -> None:
        """Queues tokens [start, end) of one layer, which this rank's pool holds by now. Chunks of a layer come in order, without gaps.

        Units: block_ids: local blocks of the layer's kind; block_ids[i] has logical index first_logical + i; those outside of the tokens,
            and of sliding layers before the window that is handed over, are not looked at
        Effects: nothing if the transfer has failed or was aborted (see `error`)
        Raises: KVTransferError if tokens are left out or the blocks don't cover them
        """
        outgoing = self._get(transfer_id)
        if outgoing is None or outgoing.error is not None:
            return
        start, end = outgoing.clip(layer, start_token, end_token)
        if start == end or not outgoing.pairs:
            return
        slides, pool = self._view.geometry.sliding[layer], self._view.layer(layer)
        blocks = outgoing.blocks(slides, (start, end), block_ids, first_logical, pool.shape[0])
        ids, on_device = blocks.source_ids, None
        if self._device is not None:
            source_table, target_table = blocks.upload(self._device)
            if slides:
                pool, ids = pool.index_select(0, source_table), np.arange(len(ids))
            assert outgoing.device_key is not None
            on_device = DevicePart(self._device.mark(), None if slides else source_table, target_table, outgoing.device_key)
        elif slides:
            pool, ids = pool.index_select(0, torch.from_numpy(ids)), np.arange(len(ids))
        for pair in outgoing.pairs:
            push = Push(
                transfer_id=transfer_id,
                incarnation=outgoing.incarnation,
                layer=layer,
                tokens=(start, end),
                first_logical=blocks.first,
                source=pool,
                source_ids=ids,
                source_head=pair.src_head,
                target_ids=blocks.target_ids,
                target_epochs=blocks.target_epochs,
                target_head=pair.dst_head,
                first_head=self._view.heads.start + pair.src_head,
                num_heads=pair.num_heads,
                device=on_device,
            )
            self._enqueue(outgoing, pair, push)

    def finish(self, transfer_id: int, on_done: Callable[[PushResult], None]) -> None:
        """Every layer was pushed. `on_done` follows when every byte is acknowledged or the transfer has failed and this rank has stopped.

        Effects: on_done comes from a transport thread, or from this call if there is nothing to wait for
        Raises: KVTransferError if the transfer is not open
        """
        outgoing = self._get(transfer_id)
        if outgoing is None:
            raise KVTransferError(f"transfer {transfer_id:x} is not open on this rank")
        if outgoing.error is None:
            outgoing.check_complete()
        self._end(outgoing, lambda: on_done(outgoing.result()))

    def abort(self, transfer_id: int, on_stopped: Callable[[], None]) -> None:
        """Drops what is queued and gives the write under way half a second. Idempotent; unknown ids have stopped.

        That is not remembered: an id that was aborted must not begin later (`WriterLedger.start` and the order of plans see to it).

        Effects: on_stopped comes from a transport thread, or from this call if there is nothing to wait for
        """
        outgoing = self._get(transfer_id)
        if outgoing is None:
            on_stopped()
            return
        outgoing.fail(KVTransferError("the transfer was aborted"))
        outgoing.deadline.cut(_ABORT_GRACE_S)
        self._end(outgoing, on_stopped)

    def error(self, transfer_id: int) -> ServingError | None:
        """Returns: why an open transfer has failed, so that a prefill need not go on to its end for nothing; None while all is well"""
        outgoing = self._get(transfer_id)
        return outgoing.error if outgoing else None

    def rates(self) -> list[LinkRate]:
        """Returns: what was measured of each decode rank that was reached so far"""
        return self._opener.rates()

    def close(self) -> None:
        """Aborts every transfer and ends the threads.

        Effects: waits for the writes under way, a few seconds at most
        """
        with self._lock:
            transfers, peers = list(self._outgoing), list(self._peers.values())
        for transfer_id in transfers:
            self.abort(transfer_id, lambda: None)
        for peer in peers:
            peer.queue.put(None)
        for peer in peers:
            peer.join(timeout_s=2 * _ABORT_GRACE_S)
        self._opener.close()

    def _get(self, transfer_id: int) -> Outgoing | None:
        with self._lock:
            return self._outgoing.get(transfer_id)

    def _end(self, outgoing: Outgoing, callback: Callable[[], None]) -> None:
        outgoing.when_ended(callback)
        with self._lock:
            is_first = outgoing.transfer_id not in self._finishing
            self._finishing.add(outgoing.transfer_id)
        if is_first:
            outgoing.when_ended(lambda: self._forget(outgoing.transfer_id))
            for pair in outgoing.pairs:
                self._enqueue(outgoing, pair, None)

    def _forget(self, transfer_id: int) -> None:
        with self._lock:
            self._outgoing.pop(transfer_id, None)
            self._finishing.discard(transfer_id)

    def _enqueue(self, outgoing: Outgoing, pair: PushPair, push: Push | None) -> None:
        key = (outgoing.incarnation, pair.dst_rank)
        with self._lock:
            peer = self._peers.get(key)
            if peer is None:
                peer = self._peers[key] = self._start_peer(key, outgoing, pair)
            peer.queue.put(Job(outgoing, push))

    def _start_peer(self, key: tuple[int, int], outgoing: Outgoing, pair: PushPair) -> Peer:
        endpoints, target = outgoing.endpoints[pair.dst_rank], outgoing.targets[pair.dst_rank]

        def connect(deadline: Deadline) -> Link:
            return self._opener.open(endpoints, target, deadline)

        def retire(peer: Peer) -> bool:
            with self._lock:
                if not peer.queue.empty():
                    return False
                del self._peers[key]
            if peer.is_lost:
                self._opener.forget(*key)
            return True

        return Peer(f"rank {pair.dst_rank} of {outgoing.incarnation:x}", pair.dst_rank, connect, retire, self._idle_s)
