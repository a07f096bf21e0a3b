"""Where a decoding sequence's KV lies: fixed blocks for its whole life, a ring of them for sliding layers.

Pure. Every rank keeps one `BlockTables` per sequence, so that a step only names the sequence. A sliding layer's query at position p sees
`window_tokens` keys; with r = KVGeometry.sliding_blocks_worst(1) blocks, logical block i in ring entry i % r is overwritten only when all
its keys have left the window.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv_layout import KVGeometry


@dataclass(frozen=True)
class BlockTables:
    """`full[i]`: block id of logical block i; `ring[i % len(ring)]`: the sliding one."""

    full: tuple[int, ...]
    ring: tuple[int, ...]

    def sliding_at(self, geometry: KVGeometry, position: int) -> tuple[int, tuple[int, ...]]:
        """What a step with one query at `position` needs. Returns: (first logical block, block ids from there to the query's own)"""
        first = geometry.first_live_block(position)
        return first, self.sliding_range(first, position // geometry.block_size_tokens + 1 - first)

    def sliding_range(self, first: int, count: int) -> tuple[int, ...]:
        """Block ids of logical blocks first .. first + count - 1; `count` is at most the ring's length."""
        return tuple(self.ring[logical % len(self.ring)] for logical in range(first, first + count))
