"""Settings of memory for processes that run for weeks, each made once: what the C library keeps, and what Python's collector looks at."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_GC_THRESHOLDS = (10_000, 20, 50)  # thousands of open streams are many live objects: the defaults would traverse them all the time
TRIM_BYTES = 256 << 10
OWN_MAPPING_BYTES = 1 << 20


def return_freed_memory() -> None:
    """Bounds what each of glibc's heaps keeps at its end to `TRIM_BYTES`; blocks from `OWN_MAPPING_BYTES` on go back when they are freed.

    Left alone, both bounds follow the largest block ever freed, up to 64 MiB for each heap, and a process has eight heaps per core: one of
    many threads grows for hours while it holds no more than before. Without effect on other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)


def settle_memory() -> None:
    """What lives as long as the process (modules, protocols, a vocabulary) is never traversed by the collector again: no pauses for it.
    To be called when the process is about to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
