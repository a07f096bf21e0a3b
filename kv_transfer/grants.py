"""Which blocks of one decode rank may be written by which transfer right now, and the one place where received bytes enter the pools.

Knows block ids, epochs and byte counts; no sockets, no leases (the decode leader's ledger has those). Used by the receiver.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.errors import KVTransferError
from common.proto import worker_pb2
from kv_transfer.pool_view import PoolView, rows
from kv_transfer.transports.tcp_wire import PROBE_ID, PushHeader, Status


class Received(NamedTuple):
    """One message.

    Shapes: payload [n, 2, heads, tokens, head_dim] as bytes: on the host, or a uint8 tensor of any strides on the pool's device, which only
        the stream of `GrantTable` may touch: it knows nothing of other streams' work
    """

    header: PushHeader
    ids: np.ndarray
    epochs: np.ndarray
    payload: memoryview | Tensor

    @property
    def num_bytes(self) -> int:
        return self.payload.numel() if isinstance(self.payload, Tensor) else len(self.payload)


def _copy_to_host(pool: Tensor, heads: slice, tokens: slice, ids: np.ndarray, payload: memoryview) -> None:
    """payload [n, 2, heads, tokens, D] -> blocks `ids` of pool [N, 2, K, S, D]"""
    target = rows(pool, heads.start, heads.stop - heads.start, tokens.start, tokens.stop)
    target[ids] = np.frombuffer(payload, target.dtype).reshape(-1, *target.shape[1:])


def _copy_to_device(pool: Tensor, heads: slice, tokens: slice, ids: Tensor, payload: memoryview | Tensor) -> None:
    """As `_copy_to_host`, for a pool on a GPU; enqueues on the current stream."""
    part = pool.view(torch.int16)[:, :, heads, tokens]
    data = payload if isinstance(payload, Tensor) else torch.frombuffer(payload, dtype=torch.uint8).to(pool.device)
    values = data.reshape(-1).view(torch.int16).view(len(ids), *part.shape[1:])
    if values.shape[-1] % 4 == 0:  # wider elements are copied faster
        part, values = part.view(torch.int64), values.view(torch.int64)
    part.index_copy_(0, ids, values)


class BlockMap:
    """Logical -> physical blocks of one layer kind in one reservation, checked against what the prompt hands over.

    Raises: KVTransferError if blocks are missing or repeated
    """

    def __init__(self, lists: Sequence[worker_pb2.BlockList], first_logical: int, count: int, *, sliding: bool):
        name = "sliding" if sliding else "full"
        chosen = [blocks for blocks in lists if blocks.sliding == sliding]
        if len(chosen) > 1:
            raise KVTransferError(f"{len(chosen)} lists of {name} blocks in one grant, expected one")
        listed = chosen[0] if chosen else worker_pb2.BlockList(sliding=sliding, first_logical=first_logical)
        self.first_logical = listed.first_logical
        ids = list(listed.block_ids)
        self.ids, self.epochs = np.array(ids, np.int64), np.array(list(listed.epochs), np.int64)
        num_different = len(set(ids))
        if not len(self.ids) == len(self.epochs) == num_different:
            raise KVTransferError(f"{name} blocks of a grant: {len(self.ids)} ids ({num_different} different), {len(self.epochs)} epochs")
        if count and not self.first_logical <= first_logical <= first_logical + count <= self.first_logical + len(self.ids):
            raise KVTransferError(
                f"{name} blocks of a grant are {self.first_logical} to {self.first_logical + len(self.ids)}, "
                f"the prompt hands over {first_logical} to {first_logical + count}"
            )

    def part(self, first_logical: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns: (ids, epochs) of `count` blocks from `first_logical` on; fewer where the map ends"""
        begin = first_logical - self.first_logical
        return (self.ids[begin : begin + count], self.epochs[begin : begin + count]) if begin >= 0 else (self.ids[:0], self.epochs[:0])


class Grant:
    """What one transfer may write on this rank."""

    def __init__(self, view: PoolView, blocks: Sequence[worker_pb2.BlockList], num_tokens: int, key_id: int):
        self.num_tokens = num_tokens
        self.key_id = key_id
        self.maps = {}
        for sliding in (False, True):
            wanted = view.geometry.handover_blocks(num_tokens, sliding=sliding) if view.pool(sliding=sliding).shape[0] else (0, 0)
            self.maps[sliding] = BlockMap(blocks, *wanted, sliding=sliding)
            num_blocks = view.pool(sliding=sliding).shape[1]
            if (self.maps[sliding].ids >= num_blocks).any():
                raise KVTransferError(f"a granted block is not in a pool of {num_blocks} blocks")
        self.head_bytes = [0] * view.heads.count  # received, per local head
        self.lock = threading.Lock()
        self.is_revoked = False


class GrantTable:
    """All grants of one rank. Thread-safe: a write and the revocation of its grant exclude each other."""

    def __init__(self, view: PoolView, incarnation: int):
        self._view = view
        self._incarnation = incarnation
        self._grants: dict[int, Grant] = {}
        self._stream = torch.cuda.Stream(view.full.device) if view.full.is_cuda else None

    @property
    def head_block_bytes(self) -> int:
        """K or V of one head of one block."""
        return self._view.geometry.head_block_bytes

    @property
    def block_size_tokens(self) -> int:
        return self._view.geometry.block_size_tokens

    def add(self, transfer_id: int, blocks: Sequence[worker_pb2.BlockList], num_tokens: int, key_id: int = 0) -> None:
        if transfer_id in self._grants:
            raise KVTransferError(f"transfer {transfer_id:x} has a grant already")
        self._grants[transfer_id] = Grant(self._view, blocks, num_tokens, key_id)

    def get(self, transfer_id: int) -> Grant:
        """Raises: KVTransferError if there is none"""
        grant = self._grants.get(transfer_id)
        if grant is None:
            raise KVTransferError(f"transfer {transfer_id:x} has no grant on this rank")
        return grant

    def revoke(self, transfer_id: int) -> None:
        """Effects: waits for the one copy that may be under way; later writes of this transfer are refused"""
        grant = self._grants.pop(transfer_id, None)
        if grant is not None:
            with grant.lock:
                grant.is_revoked = True

    def write(self, messages: Sequence[Received]) -> Status:
        """Checks received messages of one transfer against its grant and, only if all fit, copies their payloads into the pools.

        Returns: OK, or why nothing was written
        """
        first = messages[0].header
        if first.transfer_id == PROBE_ID:
            return Status.OK if first.incarnation == self._incarnation else Status.WRONG_INCARNATION
        grant = self._grants.get(first.transfer_id)
        if grant is None or any(message.header.transfer_id != first.transfer_id for message in messages):
            return Status.UNKNOWN_TRANSFER
        for message in messages:
            status = self._check(grant, message.header, message.ids, message.epochs, message.num_bytes)
            if status is not Status.OK:
                return status
        with grant.lock:
            if grant.is_revoked:
                return Status.UNKNOWN_TRANSFER
            if self._stream is None:
                self._copy(messages)
            else:
                with torch.cuda.stream(self._stream):
                    self._copy(messages)
                self._stream.synchronize()
            for message in messages:
                head = message.header.first_head - self._view.heads.start
                for i in range(head, head + message.header.num_heads):
                    grant.head_bytes[i] += message.num_bytes // message.header.num_heads
        return Status.OK

    def _copy(self, messages: Sequence[Received]) -> None:
        tables: dict[bytes, Tensor] = {}  # layers of one kind share their blocks
        for header, ids, _, payload in messages:
            head, pool = header.first_head - self._view.heads.start, self._view.layer(header.layer)
            heads, tokens = slice(head, head + header.num_heads), slice(header.begin, header.end)
            if pool.is_cuda:
                name = ids.tobytes()
                if name not in tables:
                    tables[name] = torch.from_numpy(ids).to(pool.device)
                _copy_to_device(pool, heads, tokens, tables[name], payload)
            else:
                _copy_to_host(pool, heads, tokens, ids, payload if isinstance(payload, memoryview) else payload.reshape(-1).numpy().data)

    def _check(self, grant: Grant, h: PushHeader, ids: np.ndarray, epochs: np.ndarray, payload_bytes: int) -> Status:
        g, heads = self._view.geometry, self._view.heads
        if h.incarnation != self._incarnation:
            return Status.WRONG_INCARNATION
        if h.layer >= g.num_layers:
            return Status.BAD_LAYER
        if h.num_heads < 1 or h.first_head < heads.start or h.first_head + h.num_heads > heads.start + heads.count:
            return Status.BAD_HEADS
        last_token = (h.first_logical + h.num_blocks - 1) * g.block_size_tokens + h.end
        if not 0 <= h.begin < h.end <= g.block_size_tokens or last_token > grant.num_tokens:
            return Status.BAD_RANGE
        granted_ids, granted_epochs = grant.maps[g.sliding[h.layer]].part(h.first_logical, h.num_blocks)
        if len(ids) != h.num_blocks or not np.array_equal(ids, granted_ids):
            return Status.BLOCK_NOT_GRANTED
        if not np.array_equal(epochs, granted_epochs):
            return Status.WRONG_EPOCH
        token_bytes = g.head_block_bytes // g.block_size_tokens
        if not payload_bytes == h.payload_bytes == h.num_blocks * 2 * h.num_heads * (h.end - h.begin) * token_bytes:
            return Status.BAD_LENGTH
        return Status.OK
