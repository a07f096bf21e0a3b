"""When nothing of a dead process can land any more.

The kernel tells of a process's death a moment before the driver of its GPU has dropped all that the process had enqueued, so a GPU's
writes need some time after it; those of a CPU end with the process. Used by the decode leader before blocks of a dead writer are free.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common.process import is_known_dead
from common.proto import types_pb2

GPU_QUIET_S = 1.0
_REMEMBERED_S = 60.0  # beyond the quiet time: whoever asks later waits for that time once more


class Quiet:
    """Units: after_s: from the first time that the process was seen dead"""

    def __init__(
        self,
        after_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_dead: Callable[[types_pb2.ProcessIdentity], bool] = is_known_dead,
    ):
        self._after_s = after_s
        self._clock = clock
        self._is_dead = is_dead
        self._dead_since: dict[tuple[str, int, int], float] = {}

    def __call__(self, process: types_pb2.ProcessIdentity) -> bool:
        """Returns: whether it was seen dead `after_s` ago or earlier"""
        if not self._is_dead(process):
            return False
        key, now_s = (process.host, process.pid, process.start_ticks), self._clock()
        if key not in self._dead_since:
            oldest_s = now_s - self._after_s - _REMEMBERED_S
            self._dead_since = {other: since_s for other, since_s in self._dead_since.items() if since_s >= oldest_s}
            self._dead_since[key] = now_s
        return now_s - self._dead_since[key] >= self._after_s

    def __len__(self) -> int:
        """Processes that are remembered."""
        return len(self._dead_since)
