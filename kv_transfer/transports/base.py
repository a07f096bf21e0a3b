"""What every transport offers: a `Link` from one prefill rank into one decode rank's pools, by which deadline.

A link is used by one thread. Implementations: shm.py, tcp.py, nixl.py; transports for GPUs take the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from common.kv_layout import KVGeometry
from kv_transfer.deadline import Deadline
from kv_transfer.push import Push


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

    def probe(self, deadline: Deadline) -> int:
        """Moves some bytes to where nothing is lost by them. Returns: how many are there by now

        Raises: as `write`
        """


@runtime_checkable
class DeviceLink(Link, Protocol):
    """A link for pushes of memory on a device. It digests what it writes, since only the device reads those bytes."""

    def submit(self) -> None:
        """Enqueues what `write` has gathered; called when no other push is waiting. Never blocks for long.

        Raises: as `write`
        """

    def take_digest(self) -> int:
        """Returns: the digest of everything written since the last call, modulo 2^64; to be called after `flush`"""
