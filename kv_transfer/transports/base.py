"""What every transport offers: a `Link` from one prefill rank into one decode rank's pools, and deadlines for its waits.

A link is used by one thread. Implementations: shm.py, tcp.py, nixl.py; transports for GPUs take the same shape.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from common.errors import TransferTimeout
from common.kv_layout import KVGeometry
from kv_transfer.push import Push


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


@dataclass(frozen=True)
class Target:
    """The decode rank that a link leads to."""

    incarnation: int
    rank: int
    tp_size: int
    geometry: KVGeometry


class Link(Protocol):
    """One way to write into one decode rank's pools.

    After any error the caller stops using the link, waits until `settle` is true and closes it.
    """

    transport: str

    def write(self, push: Push, deadline: Deadline) -> None:
        """Writes or queues one push; the bytes need not be there on return.

        Raises: KVTransferError (TransferTimeout, PeerLost, LayoutMismatch) also for earlier writes
        """

    def flush(self, deadline: Deadline) -> None:
        """Returns once every byte of every write is in the target's pools and acknowledged.

        Raises: as `write`
        """

    def is_lost(self) -> bool:
        """True if the peer is known to be gone; never blocks."""

    def settle(self) -> bool:
        """True once this side can't cause any further byte to land, except bytes that the receiver itself refuses after a revoke."""

    def close(self) -> None:
        """Frees what the link holds; never blocks for long."""
