"""The state of one transfer on the prefill rank that writes it: where it goes, how far it is, how it ended.

Shared by the thread that pushes and the peers' threads, hence the lock. Opens nothing, sends nothing. Used by the sender and its peers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.errors import KVTransferError, ServingError
from common.keyring import Key, digest_secret
from common.kv_layout import DTYPE_BYTES, KVGeometry, PushPair, check_join, plan_pairs
from common.proto import types_pb2, worker_pb2
from kernels.digest import MASK, DigestKey
from kv_transfer.deadline import Deadline
from kv_transfer.device import Device, upload_together
from kv_transfer.grants import BlockMap
from kv_transfer.pool_view import PoolView
from kv_transfer.transports.base import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransportUse:
    """What went over one transport, and the time that threads spent writing it and waiting for its acknowledgement."""

    transport: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PushResult:
    """How a transfer ended on one prefill rank, which by then has stopped writing for good.

    Units: by decode rank; digests modulo 2^64, the sums over all prefill ranks are what the decode ranks must find
    """

    transfer_id: int
    bytes_per_rank: tuple[int, ...]
    digest_per_rank: tuple[int, ...]
    error: ServingError | None
    uses: tuple[TransportUse, ...] = ()


class ChunkBlocks:
    """Both sides' blocks of tokens [start, end), the same for all layers of one kind, so made once per chunk.

    Shapes: source_ids, target_ids, target_epochs int64 [n], from logical block `first` on; on_device: both ids int32 on the device
    Raises: KVTransferError if `block_ids`, of logical blocks from `first_logical` on, don't cover the tokens or are not in the pool
    """

    def __init__(
        self, target: BlockMap, tokens: tuple[int, int], block_size: int, block_ids: list[int], first_logical: int, pool_blocks: int
    ):
        self.first, last = tokens[0] // block_size, (tokens[1] - 1) // block_size
        ids = self.source_ids = np.array(block_ids[max(0, self.first - first_logical) : last + 1 - first_logical], np.int64)
        if self.first < first_logical or len(ids) != last + 1 - self.first or ids.min() < 0 or ids.max() >= pool_blocks:
            raise KVTransferError(f"blocks of tokens {tokens[0]} to {tokens[1]} are not all there, or not in a pool of {pool_blocks}")
        self.target_ids, self.target_epochs = target.part(self.first, len(ids))
        self.on_device: tuple[Tensor, Tensor] | None = None
        self._of = (block_ids, first_logical, tokens)

    def are_of(self, block_ids: list[int], first_logical: int, tokens: tuple[int, int]) -> bool:
        """Whether they were made from these very arguments."""
        return self._of[0] is block_ids and self._of[1:] == (first_logical, tokens)

    def upload(self, device: Device) -> tuple[Tensor, Tensor]:
        """Returns: (source ids, target ids) int32 on the device; the copy is enqueued at the first call"""
        if self.on_device is None:
            both = np.concatenate((self.source_ids, self.target_ids)).astype(np.int32)
            source, target = device.upload(both).split(len(self.source_ids))
            self.on_device = (source, target)
        return self.on_device


class Outgoing:
    """One transfer.

    Raises: LayoutMismatch if the two groups' KV can't be joined; KVTransferError if the reservation does not hold the prompt
    """

    def __init__(self, view: PoolView, key: Key, reservation: worker_pb2.Reservation, num_tokens: int, deadline_s: float):
        geometry, tp_size = _geometry(reservation.kv), reservation.layout.tp
        check_join(view.geometry, view.tp_size, geometry, tp_size)
        if num_tokens < 1:
            raise KVTransferError(f"a prompt of {num_tokens} tokens has no KV to hand over")
        g = geometry
        self.transfer_id = reservation.transfer_id
        self.incarnation = reservation.incarnation
        self.num_tokens = num_tokens
        self.deadline = Deadline(deadline_s)
        self.pairs: tuple[PushPair, ...] = tuple(p for p in plan_pairs(g.num_kv_heads, view.tp_size, tp_size) if p.src_rank == view.tp_rank)
        self.targets = {p.dst_rank: Target(self.incarnation, p.dst_rank, tp_size, g) for p in self.pairs}
        self.endpoints = {ranks.rank: ranks.endpoints for ranks in reservation.ranks}
        self.maps = {}
        for slides, layers in ((False, g.full_layers), (True, g.sliding_layers)):
            first, count = g.handover_blocks(num_tokens, sliding=slides) if layers else (0, 0)
            self.maps[slides] = BlockMap(reservation.blocks, first, count, sliding=slides)
        row_bytes = g.head_dim * DTYPE_BYTES[g.dtype]
        shape = {"row_bytes": row_bytes, "num_layers": g.num_layers, "num_kv_heads": g.num_kv_heads}
        self.digest_key = DigestKey.derive(digest_secret(key, reservation.key_id), self.transfer_id, num_tokens=num_tokens, **shape)
        self.device_key: DigestKey | None = None  # the same on the pools' device, if that is none of the CPU
        self._blocks: dict[bool, ChunkBlocks] = {}
        self.geometry = g
        self._next_token = [g.handover_blocks(num_tokens, sliding=slides)[0] * g.block_size_tokens for slides in g.sliding]
        self._bytes = [0] * tp_size
        self._digests = [0] * tp_size
        self._uses: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._error: ServingError | None = None
        self._open_peers = len(self.pairs)
        self._is_ended = False
        self._on_end: list[Callable[[], None]] = []

    @property
    def error(self) -> ServingError | None:
        return self._error

    def clip(self, layer: int, start_token: int, end_token: int) -> tuple[int, int]:
        """Takes note that tokens [start, end) of a layer are pushed.

        Returns: the part of them that is handed over; empty (start == end) before a sliding layer's window
        Raises: KVTransferError if they don't follow what was pushed before
        """
        due = self._next_token[layer]
        end = min(end_token, self.num_tokens)
        if end <= due and end_token <= self.num_tokens:
            return due, due
        if start_token > due or end_token > self.num_tokens:
            raise KVTransferError(f"layer {layer}: tokens {start_token} to {end_token} pushed, {due} to {self.num_tokens} were due")
        self._next_token[layer] = end
        return due, end

    def upload(self, device: Device) -> None:
        """Enqueues the copy of the digest's key to the device."""
        key = self.digest_key
        self.device_key = DigestKey(*upload_together(device, [part.numpy() for part in (key.words, key.positions, key.heads)]))

    def blocks(self, slides: bool, tokens: tuple[int, int], block_ids: list[int], first_logical: int, pool_blocks: int) -> ChunkBlocks:
        """Raises: as `ChunkBlocks`"""
        blocks = self._blocks.get(slides)
        if blocks is None or not blocks.are_of(block_ids, first_logical, tokens):
            block_size = self.geometry.block_size_tokens
            blocks = ChunkBlocks(self.maps[slides], tokens, block_size, block_ids, first_logical, pool_blocks)
            self._blocks[slides] = blocks
        return blocks

    def fail(self, error: ServingError) -> None:
        """The first error counts; queued work of this transfer is dropped from now on."""
        with self._lock:
            if self._error is None:
                self._error = error

    def add(self, dst_rank: int, nbytes: int, digest: int) -> None:
        with self._lock:
            self._bytes[dst_rank] += nbytes
            self._digests[dst_rank] = (self._digests[dst_rank] + digest) & MASK

    def used(self, transport: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            had_bytes, had_seconds = self._uses.get(transport, (0, 0.0))
            self._uses[transport] = (had_bytes + nbytes, had_seconds + seconds)

    def check_complete(self) -> None:
        """Fails the transfer if a layer was not pushed to its end."""
        missing = [layer for layer, token in enumerate(self._next_token) if token != self.num_tokens]
        if missing:
            self.fail(KVTransferError(f"layer {missing[0]} was pushed up to token {self._next_token[missing[0]]} of {self.num_tokens}"))

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Calls back once every peer has done its last write for this transfer; at once if that is so."""
        with self._lock:
            is_over = self._is_ended or self._open_peers == 0
            if not is_over:
                self._on_end.append(callback)
        if is_over:
            _call(callback)

    def peer_ended(self) -> None:
        with self._lock:
            self._open_peers -= 1
            if self._open_peers:
                return
            self._is_ended = True
            callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            _call(callback)

    def result(self) -> PushResult:
        with self._lock:
            uses = tuple(TransportUse(transport, *use) for transport, use in self._uses.items())
            return PushResult(self.transfer_id, tuple(self._bytes), tuple(self._digests), self._error, uses)


def _geometry(kv: types_pb2.KVGeometry) -> KVGeometry:
    shape = (kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.block_size_tokens, kv.dtype, kv.window_tokens)
    return KVGeometry(*shape, tuple(kv.sliding))


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:  # the callback is the worker's; a transport thread must outlive its faults
        logger.exception("kv transfer: a callback failed")
