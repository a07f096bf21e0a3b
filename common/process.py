"""Tells one process from any other, also from a later one with the same pid; and whether it is gone.

Used to decide when a writer that no longer answers is dead, so that its blocks may be reused.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from common.proto import types_pb2


@cache
def host_id() -> str:
    """Equal for processes that see each other's pids: the kernel's boot id and the pid namespace.

    Two containers of one machine are two hosts here: a pid of the one means nothing in the other, so neither may call the other's
    process dead.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def identity(pid: int | None = None) -> types_pb2.ProcessIdentity:
    """Raises: ProcessLookupError if no such process exists"""
    pid = pid or os.getpid()
    ticks = _start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(f"no process {pid}")
    return types_pb2.ProcessIdentity(host=host_id(), pid=pid, start_ticks=ticks)


def is_known_dead(process: types_pb2.ProcessIdentity) -> bool:
    """True only with proof: same host, and the pid is free, a zombie, or someone else's by now. Other hosts: never known here."""
    return process.host == host_id() and _start_ticks(process.pid) != process.start_ticks


def _start_ticks(pid: int) -> int | None:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if after_name[0] in "ZX" and not _has_live_threads(pid):
        return None
    return int(after_name[19])  # field 22 of the line


def _has_live_threads(pid: int) -> bool:
    """The first thread of a process can be a zombie while others still run, and hold its files and devices open."""
    try:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    return any(state not in "ZX" for state in states)
