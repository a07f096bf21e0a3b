"""The geometry of KV memory: who holds which heads, which blocks a prompt needs, which pairs of groups can be joined.

Pure arithmetic on integers; owns no memory. Used by both workers, the transfer layer, the router's admission and the cost model.

A layer's pool on one rank is `[num_blocks, 2, num_kv_heads_local, block_size, head_dim]` (0 = K, 1 = V), so that one head of one block is
contiguous and changing the tensor-parallel size moves whole pieces. Full layers share one block table per sequence, sliding layers another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from common.errors import LayoutMismatch

DType = Literal["bfloat16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class KVGeometry:
    """KV of the whole model. `window_tokens`: keys a sliding layer's query sees, itself included. `sliding[l]`: layer l slides."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size_tokens: int
    dtype: str
    window_tokens: int
    sliding: tuple[bool, ...]

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, s in enumerate(self.sliding) if not s)

    @cached_property
    def sliding_layers(self) -> tuple[int, ...]:
        return tuple(i for i, s in enumerate(self.sliding) if s)

    @property
    def head_block_bytes(self) -> int:
        """Bytes of K (or V) of one head in one block of one layer: the unit that transfers move."""
        return self.block_size_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` from position 0."""
        return -(-num_tokens // self.block_size_tokens)

    def first_live_block(self, next_position: int) -> int:
        """First logical block that a sliding layer still needs when the next query stands at `next_position`."""
        return max(0, next_position - self.window_tokens + 1) // self.block_size_tokens

    def handover_blocks(self, num_tokens: int, *, sliding: bool) -> tuple[int, int]:
        """(first logical block, count) that a prompt of `num_tokens` hands over; sliding layers keep the last window only."""
        first = max(0, num_tokens - self.window_tokens) // self.block_size_tokens if sliding else 0
        return first, self.blocks_for(num_tokens) - first

    def sliding_blocks_worst(self, num_scheduled_tokens: int) -> int:
        """Most sliding blocks alive while one step writes `num_scheduled_tokens` tokens of a sequence."""
        return -(-(self.window_tokens - 1 + num_scheduled_tokens - 1) // self.block_size_tokens) + 1

    def handover_bytes(self, num_tokens: int) -> int:
        """Bytes of valid KV (all heads, K and V) that a prompt hands over, sliding layers clipped to whole blocks of the window."""
        first, _ = self.handover_blocks(num_tokens, sliding=True)
        clipped = num_tokens - first * self.block_size_tokens
        row = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return row * (len(self.full_layers) * num_tokens + len(self.sliding_layers) * clipped)


@dataclass(frozen=True)
class HeadRange:
    """KV heads [start, start + count) of the model on one rank."""

    start: int
    count: int


@dataclass(frozen=True)
class PushPair:
    """One prefill rank writes `num_heads` heads for one decode rank; offsets count local heads on each side."""

    src_rank: int
    dst_rank: int
    src_head: int
    dst_head: int
    num_heads: int


def head_range(num_kv_heads: int, tp_size: int, tp_rank: int) -> HeadRange:
    """KV heads of a rank. With more ranks than heads each head is held by `tp_size / num_kv_heads` neighbouring ranks.

    Raises: LayoutMismatch if neither number divides the other
    """
    if num_kv_heads % tp_size == 0:
        per_rank = num_kv_heads // tp_size
        return HeadRange(tp_rank * per_rank, per_rank)
    if tp_size % num_kv_heads == 0:
        return HeadRange(tp_rank * num_kv_heads // tp_size, 1)
    raise LayoutMismatch(f"tp {tp_size} and {num_kv_heads} KV heads: one must divide the other")


def check_join(src: KVGeometry, src_tp: int, dst: KVGeometry, dst_tp: int) -> None:
    """Refuses a pair of groups whose KV can't be joined, with every reason.

    Raises: LayoutMismatch
    """
    reasons = [
        f"{name} {getattr(src, name)} != {getattr(dst, name)}"
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size_tokens", "dtype", "window_tokens", "sliding")
        if getattr(src, name) != getattr(dst, name)
    ]
    for side, geometry, tp in (("prefill", src, src_tp), ("decode", dst, dst_tp)):
        try:
            head_range(geometry.num_kv_heads, tp, 0)
        except LayoutMismatch as exc:
            reasons.append(f"{side}: {exc.message}")
    if reasons:
        raise LayoutMismatch("these groups can't be joined: " + "; ".join(reasons))


def plan_pairs(num_kv_heads: int, src_tp: int, dst_tp: int) -> tuple[PushPair, ...]:
    """Who writes what for whom. Replicated source heads are sent once, by the first rank that holds them; every replica at the
    destination gets its own copy.

    Returns: pairs ordered by (src_rank, dst_rank)
    Raises: LayoutMismatch
    """
    pairs = []
    for src_rank in range(src_tp):
        src = head_range(num_kv_heads, src_tp, src_rank)
        if src_rank > 0 and head_range(num_kv_heads, src_tp, src_rank - 1) == src:
            continue  # a replica
        for dst_rank in range(dst_tp):
            dst = head_range(num_kv_heads, dst_tp, dst_rank)
            begin, end = max(src.start, dst.start), min(src.start + src.count, dst.start + dst.count)
            if begin < end:
                pairs.append(PushPair(src_rank, dst_rank, begin - src.start, begin - dst.start, end - begin))
    return tuple(pairs)
