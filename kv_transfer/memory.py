"""Memory that other processes of this host and user can map: where KV pools live, so that a peer can write into them with one copy.

Owns the mapping, not what lies in it. Workers create one buffer per rank at start; the shm transport attaches to it.

A buffer is an anonymous memory file (memfd). Nothing of it has a name in a file system, so nothing can be left behind: the kernel
frees it when the last process that maps it is gone, however that process ended. A peer reaches it through the owner's entry in /proc,
which the kernel opens to processes of the same user only, and then checks that it is the very file that was described.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os

import torch
from torch import Tensor

from common import process
from common.errors import KVTransferError, PeerLost
from common.proto import types_pb2

# Linux fcntl constants that Python 3.11 knows only from 3.13 on.
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4


def private_memory(nbytes: int) -> memoryview:
    """Zeroed memory of this process alone, which goes back to the system once nothing refers to it. For large buffers of threads that come
    and go: of what they free, the C library's heap keeps a share for each of the heaps that such threads were given."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class SharedBuffer:
    """One mapped memory file. `create` it or `attach` to one; it lives until the object and every tensor made from it are gone."""

    def __init__(self, fd: int, nbytes: int, owner: types_pb2.ProcessIdentity):
        self.nbytes = nbytes
        self.owner = owner
        self._fd = fd
        self._map = mmap.mmap(fd, nbytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self._fd)

    @classmethod
    def create(cls, nbytes: int) -> SharedBuffer:
        """Takes zeroed memory and touches every page, since first touch is many times slower than a copy.

        Raises: OSError if the host has no room
        """
        fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        # A peer that maps a file which shrinks later would die of SIGBUS; the seal rules that out.
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        buffer = cls(fd, nbytes, process.identity())
        buffer.tensor()[:: mmap.PAGESIZE].zero_()
        return buffer

    @classmethod
    def attach(cls, description: bytes) -> SharedBuffer:
        """Maps a buffer of another process (or of this one) and fills this process's page tables.

        Raises: PeerLost if the owner is gone; KVTransferError if it is out of reach (other host, user or container) or if that is no
            description
        """
        try:
            facts = json.loads(description)
            owner = types_pb2.ProcessIdentity(host=facts["host"], pid=facts["pid"], start_ticks=facts["start_ticks"])
            fd_number, device, inode, nbytes = (int(facts[name]) for name in ("fd", "device", "inode", "nbytes"))
        except (ValueError, KeyError, TypeError) as exc:
            raise KVTransferError(f"not the description of a shared buffer: {description[:80]!r}") from exc
        if owner.host != process.host_id():
            raise KVTransferError("the shared buffer is on another host")
        if process.is_known_dead(owner):
            raise PeerLost(f"the owner of the shared buffer, process {owner.pid}, is gone")
        try:
            fd = os.open(f"/proc/{owner.pid}/fd/{fd_number}", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as exc:
            raise PeerLost(f"the shared buffer of process {owner.pid} is gone") from exc
        except OSError as exc:
            raise KVTransferError(f"can't open the shared buffer of process {owner.pid}: {exc.strerror}; same user and container?") from exc
        stat = os.fstat(fd)
        if (stat.st_dev, stat.st_ino, stat.st_size, stat.st_uid) != (device, inode, nbytes, os.geteuid()):
            os.close(fd)
            raise KVTransferError(f"what process {owner.pid} has open is not the shared buffer that was described")
        buffer = cls(fd, nbytes, owner)
        buffer.tensor()[:: mmap.PAGESIZE].sum()  # read faults, so that the first writes don't pay for them
        return buffer

    def describe(self) -> bytes:
        """Returns: what `attach` needs; carries no secret, is of use to processes of this host and user only"""
        stat = os.fstat(self._fd)
        facts = {"host": self.owner.host, "pid": self.owner.pid, "start_ticks": self.owner.start_ticks}
        facts |= {"fd": self._fd, "device": stat.st_dev, "inode": stat.st_ino, "nbytes": self.nbytes}
        return json.dumps(facts).encode()

    def tensor(self) -> Tensor:
        """Returns: [nbytes] uint8, a view of the mapping; keeps it alive"""
        return self._bytes
