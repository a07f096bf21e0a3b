"""Settings of memory for processes that run for weeks, each made once: what the C library keeps, and what Python's collector looks at."""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
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


def keep_what_is_there() -> None:
    """What has been made so far (modules, classes, protocols) stays: the collector looks at it no more. A full collection, which stops
    everything, takes tens of ms otherwise. To be called when the process is ready to serve."""
    gc.collect()
    gc.freeze()
