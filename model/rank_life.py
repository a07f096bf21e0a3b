"""How a rank's loop runs and ends: its thread, the reason it ended for, and the end of the process when it failed.

A rank that failed can't be trusted again (its device may hang, its group has lost count), so its process goes within a second; whoever
started it starts another.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable

from common.errors import ServingError

logger = logging.getLogger(__name__)
EXIT_FAILED = 70
_LAST_WORDS_S = 0.5  # for streams to end with a status, and for `wait_ended` to be answered


class RankLife:
    """STARTING -> RUNNING -> ENDED. `exit_process` ends the process after a failure.

    `doing`: what a rank that starts is at, for people; empty once its loop runs.
    """

    def __init__(self, exit_process: Callable[[int], None] = os._exit):
        self.doing = ""
        self._exit_process = exit_process
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._is_leaving = False  # the loop has returned: what happens to the other ranks is no failure any more
        self._reason = ""

    def start(self, loop: Callable[[], None], clean_up: Callable[[], None]) -> None:
        """Runs `loop` in a thread of its own until it returns (a wanted end) or raises; `clean_up` follows in both cases.

        Effects: what the process holds by now is not traversed by the garbage collector any more: it would take some 90 ms, in the
            middle of a step
        """
        gc.collect()
        gc.freeze()
        self.doing = ""
        threading.Thread(target=self._run, args=(loop, clean_up), name="engine", daemon=True).start()

    def alive(self) -> bool:
        return not self._ended.is_set()

    def wait_ended(self, timeout_s: float | None = None) -> str:
        """Blocks until the loop has ended. Returns: why; empty after a wanted end, or if it still runs after `timeout_s`"""
        self._ended.wait(timeout_s)
        return self._reason

    def fail(self, reason: str) -> None:
        """From any thread: the rank is of no use any more, whatever its loop is stuck in. Ends the process."""
        with self._lock:
            if self._is_leaving:
                return
            self._is_leaving = True
            self._reason = reason
            self._ended.set()
        logger.error("rank ends: %s", reason)
        time.sleep(_LAST_WORDS_S)
        self._exit_process(EXIT_FAILED)

    def _run(self, loop: Callable[[], None], clean_up: Callable[[], None]) -> None:
        reason = self._reason_for_end(loop)
        if not reason:
            with self._lock:
                self._is_leaving = True
        self._reason_for_end(clean_up)
        if reason:
            self.fail(reason)
        self._ended.set()

    def _reason_for_end(self, work: Callable[[], None]) -> str:
        """Runs a part of the outermost loop. Returns: what it failed with, empty if it did not"""
        try:
            work()
        except ServingError as exc:
            return f"{type(exc).__name__}: {exc}"
        except Exception as exc:  # the outermost loop of the process
            logger.exception("the rank's loop failed")
            return f"{type(exc).__name__}: {exc}"
        return ""
