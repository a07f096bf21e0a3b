"""Requests that a decode group has not tried to reserve anything for yet, oldest first. Owned by the leader's engine thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from common.errors import TransferGivenUp
from decode_worker.commands import Reserve, refuse


class Arrivals:
    def __init__(self) -> None:
        self._waiting: deque[tuple[Reserve, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, command: Reserve, now_s: float) -> None:
        self._waiting.append((command, now_s))

    def pop(self) -> tuple[Reserve, float]:
        """Returns: the oldest, and when it arrived"""
        return self._waiting.popleft()

    def forget(self, is_meant: Callable[[Reserve], bool]) -> bool:
        """Refuses those that are meant. Returns: whether there was one"""
        meant = [command for command, _ in self._waiting if is_meant(command)]
        if meant:
            self._waiting = deque(one for one in self._waiting if not is_meant(one[0]))
        for command in meant:
            refuse(command.done, TransferGivenUp("the reservation was given up"))
        return bool(meant)
