"""Shared memory: the prefill rank maps the decode rank's pools and copies straight into them. Same host and user only.

One-sided: the receiver can't refuse a write, so its blocks may be reused only after the writer has confirmed that it stopped or is dead.
"""

from __future__ import annotations

import json
import time

import numpy as np
import torch
from torch import Tensor

from common import process
from common.errors import KVTransferError, PeerLost
from common.kv_layout import DTYPE_BYTES, head_range
from kv_transfer.deadline import Deadline
from kv_transfer.memory import SharedBuffer
from kv_transfer.pool_view import TORCH_DTYPE, PoolView, row_index, rows
from kv_transfer.push import Push
from kv_transfer.transports.base import Target

SCRATCH_BYTES = 1 << 20  # behind the pools, for probes
_WATCH_S = 0.1
_CHUNK_BYTES = 512 * 1024  # what is gathered first must stay in a core's cache until it is scattered


def describe(view: PoolView, buffer: SharedBuffer) -> bytes:
    """Returns: the endpoint's detail, for `ShmLink`

    Raises: KVTransferError if a pool does not lie in the buffer
    """
    facts: dict[str, object] = {"buffer": json.loads(buffer.describe())}
    base = buffer.tensor().data_ptr()
    for name, pool in (("full", view.full), ("sliding", view.sliding)):
        offset = pool.data_ptr() - base
        if pool.numel() and not 0 <= offset <= buffer.nbytes - pool.numel() * pool.element_size():
            raise KVTransferError(f"the {name} pool does not lie in the shared buffer")
        facts[name] = {"offset": offset if pool.numel() else 0, "num_blocks": pool.shape[1]}
    return json.dumps(facts).encode()


class ShmLink:
    """A mapped pool of one decode rank.

    Raises: KVTransferError if it can't be mapped; PeerLost if its owner is gone
    """

    transport = "shm"

    def __init__(self, detail: bytes, target: Target):
        try:
            facts = json.loads(detail)
            self._buffer = SharedBuffer.attach(json.dumps(facts["buffer"]).encode())
            full, sliding = (_pool(self._buffer, facts[name], target, sliding=name == "sliding") for name in ("full", "sliding"))
        except (ValueError, KeyError, TypeError) as exc:
            raise KVTransferError(f"shm endpoint of decode rank {target.rank} makes no sense: {exc}") from exc
        pools_end = max(
            int(facts[name]["offset"]) + pool.numel() * pool.element_size() for name, pool in (("full", full), ("sliding", sliding))
        )
        self._scratch = self._buffer.tensor()[pools_end:]
        self._look_at = 0.0
        self._view = PoolView(full, sliding, target.geometry, target.tp_size, target.rank)

    def write(self, push: Push, deadline: Deadline) -> None:
        deadline.check("writing over shared memory")
        if time.monotonic() > self._look_at:  # not each time: it reads a file
            self._check_owner()
        target = self._view.layer(push.layer)
        if int(push.target_ids.min()) < 0 or int(push.target_ids.max()) >= target.shape[0]:
            raise KVTransferError(f"reserved block {int(push.target_ids.max())} is not in a pool of {target.shape[0]} blocks")
        for span in push.spans:
            part = slice(span.first_logical - push.first_logical, span.first_logical - push.first_logical + span.count)
            copy_rows(
                rows(target, push.target_head, push.num_heads, span.begin, span.end),
                push.target_ids[part],
                rows(push.source, push.source_head, push.num_heads, span.begin, span.end),
                push.source_ids[part],
            )

    def flush(self, deadline: Deadline) -> None:
        self._check_owner()

    def is_lost(self) -> bool:
        return process.is_known_dead(self._buffer.owner)

    def _check_owner(self) -> None:
        """The mapping outlives its owner: nothing fails by itself when nobody will ever read what is written."""
        self._look_at = time.monotonic() + _WATCH_S
        if self.is_lost():
            raise PeerLost(f"the owner of the mapped pool, process {self._buffer.owner.pid}, is gone")

    def settle(self) -> bool:
        return True

    def close(self) -> None:
        del self._view, self._buffer, self._scratch

    def probe(self, deadline: Deadline) -> int:
        half = len(self._scratch) // 2
        self._scratch[:half].copy_(self._scratch[half : 2 * half])
        return half


def copy_rows(target: np.ndarray, target_ids: np.ndarray, source: np.ndarray, source_ids: np.ndarray) -> None:
    """`target[target_ids[i]] = source[source_ids[i]]` for row arrays of `pool_view.rows`.

    Effects: one copy where the source ids follow each other, else two with the middle one in the cache; the GIL is free meanwhile
    """
    index = row_index(source_ids)
    if isinstance(index, slice):
        target[row_index(target_ids)] = source[index]
        return
    per_chunk = max(1, _CHUNK_BYTES // (source.dtype.itemsize * int(np.prod(source.shape[1:]))))
    for i in range(0, len(source_ids), per_chunk):
        target[target_ids[i : i + per_chunk]] = source[source_ids[i : i + per_chunk]]


def _pool(buffer: SharedBuffer, facts: dict, target: Target, *, sliding: bool) -> Tensor:
    g = target.geometry
    layers = g.sliding_layers if sliding else g.full_layers
    heads = head_range(g.num_kv_heads, target.tp_size, target.rank).count
    shape = (len(layers), int(facts["num_blocks"]), 2, heads, g.block_size_tokens, g.head_dim)
    offset, nbytes = int(facts["offset"]), int(np.prod(shape)) * DTYPE_BYTES[g.dtype]
    if offset < 0 or offset % DTYPE_BYTES[g.dtype] or shape[1] < 0 or offset + nbytes > buffer.nbytes:
        raise KVTransferError(f"shm endpoint: a pool of {nbytes} bytes at {offset} is not within {buffer.nbytes} bytes")
    if nbytes == 0:
        return torch.empty(shape, dtype=TORCH_DTYPE[g.dtype])
    return buffer.tensor()[offset : offset + nbytes].view(TORCH_DTYPE[g.dtype]).view(shape)
