"""Which memory of other processes this process has mapped. Owns opening and closing: every link of the process shares one mapping.

Two ranks of a process that mapped the same handle were refused by CUDA (error 208, already mapped), and a link beside the one that it
replaces wants the same pools too. Called by transports/cuda_ipc.py.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from common.errors import TransferTimeout
from kv_transfer.deadline import Deadline
from kv_transfer.device import Device, Mapping


@dataclass
class _Entry:
    mapping: Mapping
    users: int = 0


class SharedMapping:
    """One user's share of a mapping."""

    def __init__(self, table: MappingTable, key: tuple[int, bytes], address: int):
        self.address = address
        self._table = table
        self._key = key

    def close(self) -> None:
        """Nothing that this user has enqueued may still use it. A second call does nothing. Effects: the last user unmaps"""
        if self.address:
            self.address = 0
            self._table.leave(self._key)


class MappingTable:
    """Mappings by GPU and handle, counted by users. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while memory is mapped and unmapped: the same handle may come back meanwhile
        self._entries: dict[tuple[int, bytes], _Entry] = {}
        self._kept: list[object] = []

    def open(self, device: Device, handle: bytes, deadline: Deadline) -> SharedMapping:
        """Raises: NotSupportedError where this host does not allow it; TransferTimeout if others map and unmap until the deadline"""
        if not self._lock.acquire(timeout=max(0.0, deadline.left_s())):
            raise TransferTimeout("the transfer's deadline passed while other memory was mapped or unmapped")
        try:
            key = (device.index, handle)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(device.map(handle))
            entry.users += 1
            return SharedMapping(self, key, entry.mapping.address)
        finally:
            self._lock.release()

    def keep(self, user: object) -> None:
        """Holds for good what the device may still use together with a mapping that was not closed."""
        self._kept.append(user)

    def leave(self, key: tuple[int, bytes]) -> None:
        """One user less. Effects: waits for the device where it was the last one. Raises: KernelError if unmapping fails"""
        with self._lock:
            entry = self._entries[key]
            entry.users -= 1
            if not entry.users:
                del self._entries[key]
                entry.mapping.close()


OF_THIS_PROCESS = MappingTable()
