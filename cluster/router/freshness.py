"""How long entries of the board may stand though nothing has happened to their pools. Pure; used by the entries of either role."""

from __future__ import annotations

import math
from collections.abc import Sequence

AGE_S = 1.0  # corrections fade by less than 0.2% meanwhile


class Freshness:
    """Of `count` entries. All times are the caller's."""

    def __init__(self, count: int):
        self._until_s = [-math.inf] * count
        self._first_s = -math.inf  # not above the least of them
        self._learnt = [-1] * count
        self._fades_s = [-math.inf] * count

    def due(self, now_s: float) -> Sequence[int]:
        """Entries that are too old, for the caller to renew."""
        if self._first_s >= now_s:
            return ()
        self._first_s = min((until_s for until_s in self._until_s if until_s >= now_s), default=math.inf)
        return [i for i, until_s in enumerate(self._until_s) if until_s < now_s]

    def renewed(self, i: int, now_s: float, until_s: float = math.inf) -> None:
        """The entry is as its pool is at `now_s`, and may stand until `until_s`, but no longer than `AGE_S`."""
        oldest_s = now_s + AGE_S
        self._until_s[i] = until_s = until_s if until_s < oldest_s else oldest_s
        if until_s < self._first_s:
            self._first_s = until_s

    def wants_corrections(self, i: int, learnt: int, now_s: float) -> bool:
        """Whether corrections are to be read again: they have moved (`learnt` counts that) or faded."""
        if self._learnt[i] == learnt and self._fades_s[i] > now_s:
            return False
        self._learnt[i], self._fades_s[i] = learnt, now_s + AGE_S
        return True
