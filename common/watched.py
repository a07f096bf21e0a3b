"""Something read from files, read again when they change: keys, tokens and certificates rotate without a restart.

Looks at the files when it is asked, at most once per `every_s`; no thread of its own. A change that can't be read (half written, wrong) is
logged and the last good value stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from common.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Watched(Generic[T]):
    """`load` reads the files. Any thread may ask.

    Raises: ConfigError if the first read fails
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T], *, every_s: float = 1.0, clock: Callable[[], float] = time.monotonic):
        self._paths = tuple(paths)
        self._load = load
        self._every_s = every_s
        self._clock = clock
        self._stamp = self._stamps()
        self._value = load()
        self._next_look_s = clock() + every_s

    def get(self) -> T:
        """The value of the files as they were at most `every_s` ago."""
        now_s = self._clock()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + self._every_s
            stamp = self._stamps()
            if stamp != self._stamp:
                self._reload(stamp)
        return self._value

    def _reload(self, stamp: tuple) -> None:
        try:
            self._value = self._load()
        except ConfigError as exc:
            logger.warning("%s; the last good content stays in use", exc.message)
        else:
            logger.info("read anew: %s", ", ".join(map(str, self._paths)))
        self._stamp = stamp

    def _stamps(self) -> tuple:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes with the file, also when a symbolic link to it is turned, as Kubernetes does with secrets."""
    try:
        stat = path.stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)


def read_file(path: Path, what: str) -> bytes:
    """Raises: ConfigError naming `what` and the path"""
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{what} {path} can't be read: {exc.strerror}") from exc
