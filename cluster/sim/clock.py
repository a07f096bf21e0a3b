"""Events in order of time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """`now_s` only moves when an event is taken. Events at the same moment run in the order they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable, tuple]] = []
        self._serials = itertools.count()

    def at(self, time_s: float, action: Callable, *args) -> None:
        heapq.heappush(self._events, (time_s, next(self._serials), action, args))

    def after(self, delay_s: float, action: Callable, *args) -> None:
        self.at(self.now_s + delay_s, action, *args)

    def next_s(self) -> float:
        """When the next event is due; infinite if there is none."""
        return self._events[0][0] if self._events else float("inf")

    def step(self) -> None:
        """Runs the next event."""
        self.now_s, _, action, args = heapq.heappop(self._events)
        action(*args)
