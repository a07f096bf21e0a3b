"""Copies KV between paged pools of different head layouts, digested on the way, for any number of layers per launch.

The target may be memory of another GPU or process, so it is an address; the source is one too, because heads are cut out of the middle of a
pool. Twin in plain torch: `kv_copy_ref`. Owns no memory and waits for nothing. Called by the transports and the receiver.
Legend: N blocks, K heads of a pool, S block_size, D head_dim, n blocks of a segment.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import torch
from torch import Tensor

from common.errors import KernelError, ShapeError
from kernels import cuda_library
from kernels.digest import MASK, DigestKey, kv_digest

MAX_SEGMENTS = 64
COPY_BLOCKS = 16  # thread blocks of a copy that runs beside a prefill
WIDE_COPY_BLOCKS = 64  # of one that nothing is computed for any more: as much as the link takes
_STAGE_BYTES, _MAX_STAGE_TILES = 16384, 16  # as in kv_copy.cu
_SEGMENT, _COMMON = Struct("<5Q4i"), Struct("<4Q2q8i")


@dataclass(frozen=True)
class TileShape:
    """What all segments of a launch have in common.

    Units: row_bytes: K or V of one token and head; source_heads, target_heads: of the two pools; num_heads: that are copied;
        model_heads: K of the whole model
    """

    block_size: int
    row_bytes: int
    source_heads: int
    target_heads: int
    num_heads: int
    model_heads: int

    def __post_init__(self) -> None:
        lanes, rest = divmod(self.row_bytes, 16)
        if rest or lanes not in (1, 2, 4, 8, 16, 32):
            raise ShapeError(f"head rows of {self.row_bytes} bytes: copies on a GPU take 16, 32, 64, 128, 256 or 512")
        if self.head_bytes > _STAGE_BYTES:
            raise ShapeError(f"a head of a block of {self.head_bytes} bytes: copies on a GPU take {_STAGE_BYTES} at most")

    @property
    def head_bytes(self) -> int:
        return self.block_size * self.row_bytes

    @property
    def stage_tiles(self) -> int:
        """Heads of blocks that pass through shared memory together."""
        return min(_MAX_STAGE_TILES, _STAGE_BYTES // self.head_bytes)

    @property
    def run_tiles(self) -> int:
        """How many of them are one piece on both sides, wherever one begins."""
        return math.gcd(self.stage_tiles, self.num_heads)


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of one layer.

    Shapes: source_ids, target_ids [n or more] int32 on the device: block of logical index first_logical + i; None: 0, 1, 2, ...
    Units: source, target: addresses of layer pools [N, 2, K, S, D]; target 0: digest only; first heads count the pool's own heads;
        `layer`, `first_head` are the model's
    """

    source: int
    target: int
    source_head: int
    target_head: int
    source_ids: Tensor | None
    target_ids: Tensor | None
    tokens: tuple[int, int]
    first_logical: int
    layer: int
    first_head: int


class Tally:
    """Where launches add up their digests, one after the other: on the device, and what came of it so far on the host.

    Effects: none of its calls waits; for the launches of one stream at a time
    """

    def __init__(self, device: torch.device):
        self.on_device = torch.zeros(2, dtype=torch.int64, device=device)  # the sum, and the thread blocks of a launch that are done
        self.on_host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host = self.on_host.numpy()

    def value(self) -> int:
        """Returns: the digest of every launch that has ended, modulo 2^64; meaningless while one runs"""
        return int(self._host[0]) & MASK


def kv_copy(
    segments: Sequence[Segment], shape: TileShape, key: DigestKey, tally: Tally, *, stream: int = 0, blocks: int = COPY_BLOCKS
) -> None:
    """Copies every segment to its target, `MAX_SEGMENTS` a launch, and adds their part of the digest.

    Shapes: key: on the device, which is the tally's
    Units: stream: a CUDA stream's handle, 0 the default one; blocks: thread blocks, one a multiprocessor. Either all segments have a
        target or none
    Effects: enqueues on the stream, no host sync; reads exactly the tokens of the segments, writes nothing beside them
    Raises: KernelError if a launch is refused
    """
    for begin in range(0, len(segments), MAX_SEGMENTS):
        plan = _plan(segments[begin : begin + MAX_SEGMENTS], shape, key, tally)
        status = cuda_library.load("kv_copy").kv_copy(plan, ctypes.c_int(blocks), ctypes.c_void_p(stream))
        if status != 0:
            raise KernelError(f"kv_copy of {len(segments)} segments: CUDA error {status}")


def _plan(segments: Sequence[Segment], shape: TileShape, key: DigestKey, tally: Tally) -> ctypes.Array[ctypes.c_char]:
    """Returns: the struct Plan of kv_copy.cu"""
    plan = ctypes.create_string_buffer(MAX_SEGMENTS * _SEGMENT.size + _COMMON.size)
    tiles, place, heads, head_bytes, block_size = 0, 0, key.heads.data_ptr(), shape.head_bytes, shape.block_size
    for segment in segments:
        start, end = segment.tokens
        source = segment.source + segment.source_head * head_bytes
        target = segment.target + segment.target_head * head_bytes if segment.target else 0
        source_ids = 0 if segment.source_ids is None else segment.source_ids.data_ptr()
        target_ids = 0 if segment.target_ids is None else segment.target_ids.data_ptr()
        multipliers = heads + 8 * (2 * segment.layer * shape.model_heads + segment.first_head)
        first = segment.first_logical
        _SEGMENT.pack_into(plan, place, source, target, source_ids, target_ids, multipliers, start, end, first, tiles)
        tiles += 2 * shape.num_heads * (-(-end // block_size) - first)
        place += _SEGMENT.size
    _COMMON.pack_into(
        plan, MAX_SEGMENTS * _SEGMENT.size,
        key.words.data_ptr(), key.positions.data_ptr(), tally.on_device.data_ptr(), tally.on_host.data_ptr(),
        shape.source_heads * head_bytes, shape.target_heads * head_bytes,
        len(segments), tiles, shape.num_heads, block_size, shape.row_bytes, shape.model_heads, shape.stage_tiles, shape.run_tiles,
    )  # fmt: skip
    return plan


def kv_copy_ref(source: Tensor, target: Tensor | None, segment: Segment, shape: TileShape, key: DigestKey) -> int:
    """Plain twin for one segment on the CPU: the pools as tensors [N, 2, K, S, D] in place of the addresses. Returns: the digest's part"""
    start, end = segment.tokens
    count = -(-end // shape.block_size) - segment.first_logical
    source_ids = torch.arange(count) if segment.source_ids is None else segment.source_ids[:count].long()
    kv = source[:, :, segment.source_head : segment.source_head + shape.num_heads]
    if target is not None:
        heads = slice(segment.target_head, segment.target_head + shape.num_heads)
        position = torch.arange(start, end)
        i, offset = position // shape.block_size - segment.first_logical, position % shape.block_size
        target_ids = torch.arange(count) if segment.target_ids is None else segment.target_ids.long()
        target[target_ids[i], :, heads, offset] = kv[source_ids[i], :, :, offset]
    first, layer, head = segment.first_logical, segment.layer, segment.first_head
    return kv_digest(kv, source_ids, first_logical=first, tokens=segment.tokens, layer=layer, first_head=head, key=key)
