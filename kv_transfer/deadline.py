"""A moment that waits must not outlast, used by every transport; and how long a hand-over may take in all, which both leaders go by."""

from __future__ import annotations

import time

from common.errors import TransferTimeout

_SLOWEST_PUSH_BYTES_PER_S = 50e6


def settle_s(lease_s: float, num_bytes: int) -> float:
    """How long a hand-over may take once the first token is out: a lease, and the bytes at the slowest pace worth waiting for."""
    return lease_s + num_bytes / _SLOWEST_PUSH_BYTES_PER_S


class Deadline:
    """A moment on the monotonic clock that can be moved closer from another thread, e.g. when the transfer is aborted."""

    def __init__(self, seconds: float, whole: Deadline | None = None):
        self._at = time.monotonic() + seconds
        self._whole = whole

    def part(self, seconds: float) -> Deadline:
        """That of a part of the work: so many seconds from now, and never later than the whole's, should that be cut meanwhile."""
        return Deadline(seconds, self)

    def cut(self, seconds: float) -> None:
        """At most `seconds` from now are left."""
        self._at = min(self._at, time.monotonic() + seconds)

    def left_s(self) -> float:
        own_s = self._at - time.monotonic()
        return own_s if self._whole is None else min(own_s, self._whole.left_s())

    def check(self, what: str) -> None:
        """Raises: TransferTimeout if the moment has passed"""
        if self.left_s() <= 0:
            raise TransferTimeout(f"the transfer's deadline passed while {what}")
