"""A moment that waits must not outlast. Used by every transport."""

from __future__ import annotations

import time

from common.errors import TransferTimeout


class Deadline:
    """A moment on the monotonic clock that can be moved closer from another thread, e.g. when the transfer is aborted."""

    def __init__(self, seconds: float):
        self._at = time.monotonic() + seconds

    def cut(self, seconds: float) -> None:
        """At most `seconds` from now are left."""
        self._at = min(self._at, time.monotonic() + seconds)

    def left_s(self) -> float:
        return self._at - time.monotonic()

    def check(self, what: str) -> None:
        """Raises: TransferTimeout if the moment has passed"""
        if self.left_s() <= 0:
            raise TransferTimeout(f"the transfer's deadline passed while {what}")
