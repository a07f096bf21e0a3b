"""Ownership of KV block ids: which are free, who holds the others, and how often each was handed out (its epoch).

One pool per layer kind and group, held by the group's leader; the tensors belong to the ranks. Pure; not thread-safe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.errors import CapacityError, ServingError


@dataclass(frozen=True)
class BlockGrant:
    """Blocks handed to one owner. `epochs[i]` is the epoch of `block_ids[i]` in this grant."""

    block_ids: tuple[int, ...]
    epochs: tuple[int, ...]


class BlockPool:
    """Free list with epochs.

    A block is in exactly one of two places: the free list, or one owner's grant. `allocate` raises its epoch, so that a write carrying
    an older one can be told apart. First freed, first reused: a stale write has the longest time to show up as a fault in tests.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._owner: list[str | None] = [None] * num_blocks
        self._epoch = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int, owner: str) -> BlockGrant:
        """Raises: CapacityError if fewer than `count` are free; then nothing was taken."""
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks wanted, {len(self._free)} of {self.num_blocks} free")
        ids = tuple(self._free.popleft() for _ in range(count))
        for block in ids:
            self._owner[block] = owner
            self._epoch[block] += 1
        return BlockGrant(ids, tuple(self._epoch[block] for block in ids))

    def free(self, block_ids: tuple[int, ...] | list[int], owner: str) -> None:
        """Raises: ServingError if `owner` does not hold one of them, or one is named twice; then nothing was freed."""
        if len(set(block_ids)) != len(block_ids):
            raise ServingError(f"{owner!r} frees a block twice: {sorted(block_ids)[:8]}")
        wrong = [block for block in block_ids if self._owner[block] != owner]
        if wrong:
            raise ServingError(f"blocks {wrong[:8]} are held by {self._owner[wrong[0]]!r}, not by {owner!r}")
        for block in block_ids:
            self._owner[block] = None
            self._free.append(block)

    def check(self) -> None:
        """Raises: ServingError if the free list and the owners disagree."""
        held = sum(owner is not None for owner in self._owner)
        if held + len(self._free) != self.num_blocks or len(set(self._free)) != len(self._free):
            raise ServingError(f"block accounting is off: {held} held + {len(self._free)} free != {self.num_blocks}")


@dataclass(frozen=True)
class KVPools:
    """The two pools of a group: block ids of its full layers and of its sliding layers."""

    full: BlockPool
    sliding: BlockPool

    @classmethod
    def of(cls, full_blocks: int, sliding_blocks: int) -> KVPools:
        return cls(BlockPool(full_blocks), BlockPool(sliding_blocks))

    def counts(self) -> dict[str, int]:
        """The fields of a GroupLoad that speak of blocks."""
        return {
            "free_full_blocks": self.full.num_free,
            "total_full_blocks": self.full.num_blocks,
            "free_sliding_blocks": self.sliding.num_free,
            "total_sliding_blocks": self.sliding.num_blocks,
        }

    def check(self) -> None:
        """Raises: ServingError if a pool's free list and owners disagree"""
        self.full.check()
        self.sliding.check()
