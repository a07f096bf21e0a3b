"""Where the bytes of one rank's KV pools are: (layer, block, K or V, head, tokens) -> rows that can be copied whole.

Owns no memory; takes the two pool tensors of a rank. Used by senders (source) and by receivers and the shm transport (target).
Legend: N blocks, K KV heads of this rank, S block_size, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from common.errors import LayoutMismatch
from common.kv_layout import HeadRange, KVGeometry, head_range

TORCH_DTYPE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class PoolView:
    """The KV pools of one rank of a group with `tp_size` attention shards.

    Shapes: full [full layers, N, 2, K, S, D]; sliding [sliding layers, N', 2, K, S, D]; both contiguous, of the geometry's dtype
    Raises: LayoutMismatch if a shape or dtype is not what the geometry says
    """

    full: Tensor
    sliding: Tensor
    geometry: KVGeometry
    tp_size: int
    tp_rank: int

    def __post_init__(self) -> None:
        g = self.geometry
        for name, pool, layers in (("full", self.full, g.full_layers), ("sliding", self.sliding, g.sliding_layers)):
            wanted = (len(layers), 2, self.heads.count, g.block_size_tokens, g.head_dim)
            is_shaped = pool.ndim == 6 and (pool.shape[0], *pool.shape[2:]) == wanted
            if not is_shaped or pool.dtype != TORCH_DTYPE[g.dtype] or not pool.is_contiguous():
                raise LayoutMismatch(
                    f"{name} pool: expected contiguous [{wanted[0]}, blocks, {', '.join(map(str, wanted[1:]))}] {g.dtype}, "
                    f"got {list(pool.shape)} {pool.dtype}"
                )

    @cached_property
    def heads(self) -> HeadRange:
        return head_range(self.geometry.num_kv_heads, self.tp_size, self.tp_rank)

    @cached_property
    def _place(self) -> tuple[int, ...]:
        """Per model layer its index within the pool of its kind."""
        seen = {False: 0, True: 0}
        places = []
        for slides in self.geometry.sliding:
            places.append(seen[slides])
            seen[slides] += 1
        return tuple(places)

    def pool(self, *, sliding: bool) -> Tensor:
        return self.sliding if sliding else self.full

    def layer(self, layer: int) -> Tensor:
        """Returns: [N, 2, K, S, D], the pool of one model layer"""
        return self.pool(sliding=self.geometry.sliding[layer])[self._place[layer]]


def rows(layer_pool: Tensor, head: int, num_heads: int, begin: int, end: int) -> np.ndarray:
    """Tokens [begin, end) of heads [head, head + num_heads) of each block, as opaque rows, each one contiguous in memory.

    Shapes: layer_pool [N, 2, K, S, D] on the CPU, contiguous
    Returns: numpy void array over the same memory: [N, 2] if whole blocks are meant (adjacent heads are one row), else [N, 2, num_heads]
    """
    num_blocks, _, num_heads_local, block_size, head_dim = layer_pool.shape
    token_bytes = head_dim * layer_pool.element_size()
    head_bytes = block_size * token_bytes
    kv_bytes = num_heads_local * head_bytes
    flat = layer_pool.view(torch.uint8).numpy().reshape(-1)
    offset = head * head_bytes + begin * token_bytes
    if (begin, end) == (0, block_size):
        row = np.dtype((np.void, num_heads * head_bytes))
        return np.ndarray((num_blocks, 2), row, flat.data, offset, (2 * kv_bytes, kv_bytes))
    row = np.dtype((np.void, (end - begin) * token_bytes))
    return np.ndarray((num_blocks, 2, num_heads), row, flat.data, offset, (2 * kv_bytes, kv_bytes, head_bytes))


def row_index(ids: np.ndarray) -> slice | np.ndarray:
    """Indexes rows of blocks `ids`: a slice (no gather) if the ids follow each other."""
    first, count = int(ids[0]), len(ids)
    if int(ids[-1]) == first + count - 1 and bool((np.diff(ids) == 1).all()):
        return slice(first, first + count)
    return ids


def row_buffers(layer_pool: Tensor, source: np.ndarray, ids: np.ndarray) -> list[memoryview]:
    """The bytes of blocks `ids` in order, as few buffers over the pool's own memory. `source`: whole-block rows [N, 2] of layer_pool."""
    origin = source.__array_interface__["data"][0] - layer_pool.data_ptr()
    block_bytes, kv_bytes = source.strides
    row_bytes = source.dtype.itemsize
    if row_bytes == kv_bytes:  # all heads: K and V of a block are one piece
        offsets, row_bytes = origin + ids * block_bytes, 2 * row_bytes
    else:
        offsets = (origin + ids[:, None] * block_bytes + np.arange(2) * kv_bytes).reshape(-1)
    flat = layer_pool.view(torch.uint8).numpy().reshape(-1).data
    return [flat[offset : offset + row_bytes] for offset in offsets.tolist()]
