"""Copies KV between paged pools of different head layouts, digested on the way, for any number of layers per launch.

The target may be memory of another GPU or process, so it is an address; the source is one too, because heads are cut out of the middle of a
pool. Twin in plain torch: `kv_copy_ref`. Owns no memory and waits for nothing. Called by the transports and the receiver.
Legend: N blocks, K heads of a pool, S block_size, D head_dim, n blocks of a segment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import KernelError, ShapeError
from kernels import cuda_library
from kernels.digest import DigestKey, kv_digest

MAX_SEGMENTS = 32
COPY_BLOCKS = 32  # thread blocks of a copy that runs beside a prefill


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

    @property
    def head_bytes(self) -> int:
        return self.block_size * self.row_bytes


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of one layer.

    Shapes: source_ids, target_ids [n or more] int32 on the device: block of logical index first_logical + i; source_ids None: 0, 1, 2, ...
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


class _Segment(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("source_ids", ctypes.c_uint64),
        ("target_ids", ctypes.c_uint64),
        ("heads", ctypes.c_uint64),
        ("start", ctypes.c_int32),
        ("end", ctypes.c_int32),
        ("first_logical", ctypes.c_int32),
        ("first_tile", ctypes.c_int32),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("segments", _Segment * MAX_SEGMENTS),
        ("words", ctypes.c_uint64),
        ("positions", ctypes.c_uint64),
        ("digest", ctypes.c_uint64),
        ("source_kv_bytes", ctypes.c_int64),
        ("target_kv_bytes", ctypes.c_int64),
        ("num_segments", ctypes.c_int32),
        ("num_tiles", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("row_bytes", ctypes.c_int32),
        ("model_heads", ctypes.c_int32),
    )


def kv_copy(
    segments: Sequence[Segment], shape: TileShape, key: DigestKey, digest: Tensor, *, stream: int = 0, blocks: int = COPY_BLOCKS
) -> None:
    """Copies every segment to its target, whole launches at a time, and adds their part of the digest.

    Shapes: key: on the device; digest [1] int64 on the device, added to modulo 2^64
    Units: stream: a CUDA stream's handle, 0 the default one; blocks: thread blocks, at most one multiprocessor each. Either all segments
        have a target or none
    Effects: enqueues on the stream, no host sync; reads exactly the tokens of the segments, writes nothing beside them
    Raises: KernelError if a launch is refused
    """
    for begin in range(0, len(segments), MAX_SEGMENTS):
        plan = _plan(segments[begin : begin + MAX_SEGMENTS], shape, key, digest)
        status = cuda_library.load("kv_copy").kv_copy(ctypes.byref(plan), ctypes.c_int(blocks), ctypes.c_void_p(stream))
        if status != 0:
            raise KernelError(f"kv_copy of {len(segments)} segments: CUDA error {status}")


def _plan(segments: Sequence[Segment], shape: TileShape, key: DigestKey, digest: Tensor) -> _Plan:
    plan = _Plan()
    tiles, heads = 0, key.heads.data_ptr()
    for entry, segment in zip(plan.segments, segments, strict=False):
        start, end = segment.tokens
        entry.source = segment.source + segment.source_head * shape.head_bytes
        entry.target = segment.target + segment.target_head * shape.head_bytes if segment.target else 0
        entry.source_ids = 0 if segment.source_ids is None else segment.source_ids.data_ptr()
        entry.target_ids = 0 if segment.target_ids is None else segment.target_ids.data_ptr()
        entry.heads = heads + 8 * (2 * segment.layer * shape.model_heads + segment.first_head)
        entry.start, entry.end, entry.first_logical, entry.first_tile = start, end, segment.first_logical, tiles
        tiles += 2 * shape.num_heads * (-(-end // shape.block_size) - segment.first_logical)
    plan.words, plan.positions, plan.digest = key.words.data_ptr(), key.positions.data_ptr(), digest.data_ptr()
    plan.source_kv_bytes = shape.source_heads * shape.head_bytes
    plan.target_kv_bytes = shape.target_heads * shape.head_bytes
    plan.num_segments, plan.num_tiles, plan.num_heads = len(segments), tiles, shape.num_heads
    plan.block_size, plan.row_bytes, plan.model_heads = shape.block_size, shape.row_bytes, shape.model_heads
    return plan


def kv_copy_ref(source: Tensor, target: Tensor | None, segment: Segment, shape: TileShape, key: DigestKey) -> int:
    """Plain twin for one segment on the CPU: the pools as tensors [N, 2, K, S, D] in place of the addresses. Returns: the digest's part"""
    start, end = segment.tokens
    count = -(-end // shape.block_size) - segment.first_logical
    source_ids = torch.arange(count) if segment.source_ids is None else segment.source_ids[:count].long()
    kv = source[:, :, segment.source_head : segment.source_head + shape.num_heads]
    if target is not None and segment.target_ids is not None:
        heads = slice(segment.target_head, segment.target_head + shape.num_heads)
        position = torch.arange(start, end)
        i, offset = position // shape.block_size - segment.first_logical, position % shape.block_size
        target[segment.target_ids.long()[i], :, heads, offset] = kv[source_ids[i], :, :, offset]
    first, layer, head = segment.first_logical, segment.layer, segment.first_head
    return kv_digest(kv, source_ids, first_logical=first, tokens=segment.tokens, layer=layer, first_head=head, key=key)
