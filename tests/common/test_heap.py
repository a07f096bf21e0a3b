"""Freed memory goes back to the system, whichever thread freed it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

THREADS, BLOCKS, BLOCK_BYTES = 8, 4, 900_000  # blocks that come out of a heap either way
CHILD = f"""
import sys, threading
from pathlib import Path
from common.heap import return_freed_memory

def anonymous_bytes():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10

def work():
    large = bytearray(8 << 20)
    del large
    together.wait()  # each thread has a heap of its own
    blocks = [bytearray({BLOCK_BYTES}) for _ in range({BLOCKS})]
    del blocks
    together.wait()

if sys.argv[1] == "bounded":
    return_freed_memory()
before = anonymous_bytes()
together = threading.Barrier({THREADS} + 1)
threads = [threading.Thread(target=work) for _ in range({THREADS})]
for thread in threads:
    thread.start()
together.wait()
together.wait()
print(anonymous_bytes() - before)
for thread in threads:
    thread.join()
"""


def _kept_bytes(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", CHILD, how], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have bounds of their own")
def test_what_threads_free_is_not_kept_for_each_of_them() -> None:
    kept = _kept_bytes("bounded")
    assert kept < THREADS * BLOCK_BYTES / 2
    assert kept < _kept_bytes("as it comes") / 4
