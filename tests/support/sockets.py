"""Which TCP ports the processes of a cluster listen on, read from /proc."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True, order=True)
class Listening:
    pid: int
    name: str
    host: str
    port: int


def listening(pids: Iterable[int]) -> list[Listening]:
    table = _listening_inodes()
    found = set()
    for pid in pids:
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            links = [os.readlink(link.path) for link in os.scandir(f"/proc/{pid}/fd")]
        except OSError:
            continue  # it has ended meanwhile
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        found |= {Listening(pid, name, *table[inode]) for inode in inodes & set(table)}
    return sorted(found)


def family_of(pid: int) -> list[int]:
    """The process and all of its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                parent = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        todo += children.get(one, [])
    return found


def _listening_inodes() -> dict[str, tuple[str, int]]:
    table = {}
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                table[fields[9]] = (_host(address), int(port, 16))
    return table


def _host(text: str) -> str:
    """The kernel prints each 32-bit word in the machine's (little-endian) order."""
    raw = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
