"""Admission and block accounting of a decode group: who may come in, who runs, who still holds blocks.

Pure: no tensors, no clock, no I/O. Owned by the leader's engine thread. A request is admitted only if its worst case fits, so nothing is
ever preempted.

    (free) --admit--> RESERVED --start--> RUNNING --release--> (free)
                         |                                        ^
                         +--hold--> HELD -------release-----------+
                         +----------------------release-----------+

RESERVED and RUNNING occupy a place in the batch; HELD keeps only its blocks, because their writer has not been proved to have stopped.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.block_pool import BlockGrant, KVPools
from common.errors import CapacityError
from common.kv_layout import KVGeometry


class Place(enum.Enum):
    RESERVED = "reserved"
    RUNNING = "running"
    HELD = "held"


@dataclass(frozen=True)
class Allotment:
    """All blocks of one request. `full`: logical blocks 0, 1, ...; `sliding`: a ring, logical block i lies in entry i % len."""

    full: BlockGrant
    sliding: BlockGrant


@dataclass
class _Entry:
    allotment: Allotment
    place: Place


class DecodeScheduler:
    """`max_batch`: places in a step. Entries are named by their transfer id."""

    def __init__(self, geometry: KVGeometry, full_blocks: int, sliding_blocks: int, max_batch: int):
        self._geometry = geometry
        self.pools = KVPools.of(full_blocks, sliding_blocks)
        self._max_batch = max_batch
        self._entries: dict[int, _Entry] = {}
        self._counts = dict.fromkeys(Place, 0)

    def admit(self, transfer_id: int, max_total_tokens: int) -> Allotment:
        """Takes a place and all the blocks that prompt and output may ever need.

        Raises: CapacityError if anything is short; then nothing was taken
        """
        taken = self.count(Place.RESERVED) + self.count(Place.RUNNING)
        if taken >= self._max_batch:
            raise CapacityError(f"all {self._max_batch} places of the batch are taken")
        full, sliding = blocks_of(self._geometry, max_total_tokens)
        if sliding > self.pools.sliding.num_free:
            raise CapacityError(
                f"{sliding} sliding KV blocks wanted, {self.pools.sliding.num_free} of {self.pools.sliding.num_blocks} free"
            )
        owner = _owner(transfer_id)
        allotment = Allotment(self.pools.full.allocate(full, owner), self.pools.sliding.allocate(sliding, owner))
        self._entries[transfer_id] = _Entry(allotment, Place.RESERVED)
        self._counts[Place.RESERVED] += 1
        return allotment

    def start(self, transfer_id: int) -> None:
        """RESERVED -> RUNNING"""
        self._move(transfer_id, Place.RESERVED, Place.RUNNING)

    def hold(self, transfer_id: int) -> None:
        """RESERVED -> HELD"""
        self._move(transfer_id, Place.RESERVED, Place.HELD)

    def release(self, transfer_id: int) -> None:
        """Gives everything back; allowed once nobody writes to or reads from the blocks any more."""
        entry = self._entries.pop(transfer_id)
        self._counts[entry.place] -= 1
        self.pools.full.free(entry.allotment.full.block_ids, _owner(transfer_id))
        self.pools.sliding.free(entry.allotment.sliding.block_ids, _owner(transfer_id))

    def place(self, transfer_id: int) -> Place | None:
        entry = self._entries.get(transfer_id)
        return entry.place if entry else None

    def count(self, place: Place) -> int:
        return self._counts[place]

    def _move(self, transfer_id: int, before: Place, after: Place) -> None:
        entry = self._entries[transfer_id]
        assert entry.place is before, f"{transfer_id:x} is {entry.place.value}, not {before.value}"
        entry.place = after
        self._counts[before] -= 1
        self._counts[after] += 1


def blocks_of(geometry: KVGeometry, tokens: int) -> tuple[int, int]:
    """Full and sliding blocks that a sequence takes which may grow to `tokens` tokens, its prompt included."""
    full = geometry.blocks_for(tokens)
    return full, min(full, geometry.sliding_blocks_worst(1))


def sliding_pool_of(geometry: KVGeometry, max_batch: int) -> int:
    """Sliding blocks of a group: enough for its whole batch, so that they never decide."""
    return max_batch * geometry.sliding_blocks_worst(1)


def largest_batch(geometry: KVGeometry, full_blocks: int, max_batch: int, tokens: int) -> int:
    """Sequences of up to `tokens` tokens that a group holds at once."""
    return min(max_batch, full_blocks // blocks_of(geometry, tokens)[0])


def _owner(transfer_id: int) -> str:
    return f"transfer {transfer_id:016x}"
