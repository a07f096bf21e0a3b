"""Which sequence lies in which row of a decode step. Pure: every rank of a group does the same from the same plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """`before`: its row in the step before, None if it was not in it."""

    row: int
    before: int | None


class RowPlaces:
    """Rows without gaps; a sequence moves only where one that left made a gap, since its tables on the device have to move with it."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}

    def place(self, keys: Sequence[int]) -> list[Place]:
        """Rows of one step: 0 .. len(keys) - 1, each once. Returns: in the order of `keys`"""
        before, count = self._rows, len(keys)
        kept = {key: before[key] for key in keys if before.get(key, count) < count}
        free = iter(sorted(set(range(count)) - set(kept.values())))
        self._rows = {key: kept[key] if key in kept else next(free) for key in keys}
        return [Place(self._rows[key], before.get(key)) for key in keys]
