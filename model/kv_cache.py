"""The KV tensors of one rank: one pool for full layers, one for sliding layers, over own or given memory.

Owns bytes and their shape; which block belongs to whom is the leader's `BlockPool`. Given memory (shared, or registered with a
transport) stays its maker's. Called by both workers; read and written by the forward pass and the transports.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from common.kv_layout import KVGeometry, head_range

TORCH_DTYPE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class KVCache:
    """Two pools in one stretch of memory: full layers first, sliding layers after them.

    Shapes: full, sliding [layers of the kind, blocks, 2 (K, V), local KV heads, block_size, head_dim] in the geometry's dtype
    Effects: memory of its own is written once (zeros), because the first touch of fresh memory is slow; given memory is left as it is
    Raises: ShapeError if the buffer is not uint8, contiguous and of exactly `nbytes`
    """

    def __init__(
        self,
        geometry: KVGeometry,
        tp_size: int,
        tp_rank: int,
        full_blocks: int,
        sliding_blocks: int,
        device: torch.device | str,
        buffer: Tensor | None = None,
    ):
        self.geometry = geometry
        self.head_range = head_range(geometry.num_kv_heads, tp_size, tp_rank)
        wanted = self.nbytes(geometry, tp_size, tp_rank, full_blocks, sliding_blocks)
        if buffer is None:
            buffer = torch.empty(wanted, dtype=torch.uint8, device=device).fill_(0)
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.numel() != wanted:
            raise ShapeError(f"KV buffer: expected {wanted} contiguous uint8, got {buffer.numel()} {buffer.dtype}")
        self.buffer = buffer
        values = buffer.view(TORCH_DTYPE[geometry.dtype])
        tail = (2, self.head_range.count, geometry.block_size_tokens, geometry.head_dim)
        full_shape = (len(geometry.full_layers), full_blocks, *tail)
        sliding_shape = (len(geometry.sliding_layers), sliding_blocks, *tail)
        split = torch.Size(full_shape).numel()
        self.full = values[:split].view(full_shape)
        self.sliding = values[split:].view(sliding_shape)
        self._layers = self._by_layer()

    @staticmethod
    def nbytes(geometry: KVGeometry, tp_size: int, tp_rank: int, full_blocks: int, sliding_blocks: int) -> int:
        """Bytes of both pools of one rank."""
        heads = head_range(geometry.num_kv_heads, tp_size, tp_rank).count
        blocks = len(geometry.full_layers) * full_blocks + len(geometry.sliding_layers) * sliding_blocks
        return blocks * 2 * heads * geometry.head_block_bytes

    def layer(self, layer: int) -> Tensor:
        """Returns: [blocks, 2, local KV heads, block_size, head_dim], a view of the layer's kind of pool"""
        return self._layers[layer]

    def _by_layer(self) -> tuple[Tensor, ...]:
        full, sliding = iter(self.full), iter(self.sliding)
        return tuple(next(sliding if slides else full) for slides in self.geometry.sliding)
