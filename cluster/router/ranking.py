"""Items in the order of keys that change: the groups of one pool, best first. Pure; used by `pool.py`."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Ranking(Generic[Item]):
    """Sorted by key, equals by when they came in. All keys are tuples of one length. A move costs O(log n) comparisons."""

    def __init__(self) -> None:
        self._sorted: list[tuple] = []  # (key, serial, item)
        self._entries: dict[Item, tuple] = {}
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Item]:
        return (entry[2] for entry in self._sorted)

    def items(self) -> list[Item]:
        """As they are now; stays so while items move."""
        return [entry[2] for entry in self._sorted]

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def put(self, item: Item, key: tuple) -> None:
        """Adds the item, or moves it to where its new key belongs."""
        before = self._entries.get(item)
        if before is not None:
            if before[0] == key:
                return
            self._remove(before)
        entry = (key, before[1] if before is not None else next(self._serials), item)
        self._entries[item] = entry
        bisect.insort(self._sorted, entry)

    def discard(self, item: Item) -> None:
        entry = self._entries.pop(item, None)
        if entry is not None:
            self._remove(entry)

    def first(self) -> Item:
        return self._sorted[0][2]

    def at(self, index: int) -> Item:
        return self._sorted[index][2]

    def num_equal(self) -> int:
        """How many share the best key."""
        key = self._sorted[0][0]
        if len(self._sorted) == 1 or self._sorted[1][0] != key:
            return 1
        return bisect.bisect_right(self._sorted, key, key=lambda entry: entry[0])

    def _remove(self, entry: tuple) -> None:
        del self._sorted[bisect.bisect_left(self._sorted, entry)]
