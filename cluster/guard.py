"""Takes a cluster down if the command that was at it ends before it was done: killed, or interrupted twice.

    python -m cluster.guard NAME    reads its standard input to the end; anything but `done` there means that nobody is at it any more

One short-lived process beside each `tandem up` and `tandem down`; imports nothing heavy unless it has to act.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DONE = b"done"


class Guard:
    """From its making until `done`, the end of this process is the end of the cluster."""

    def __init__(self, name: str, folder: Path):
        reader, self._writer = os.pipe()
        log = (os.POSIX_SPAWN_OPEN, 1, folder / "guard.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        actions = [(os.POSIX_SPAWN_DUP2, reader, 0), log, (os.POSIX_SPAWN_DUP2, 1, 2)]
        command = [sys.executable, "-m", "cluster.guard", name]
        self._pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions, setsid=True)
        os.close(reader)

    def done(self) -> None:
        """The cluster is up, or down: it no longer depends on this process."""
        os.write(self._writer, DONE)
        os.close(self._writer)
        os.waitpid(self._pid, 0)


def main() -> None:
    if sys.stdin.buffer.read() != DONE:
        from cluster.up import take_down

        take_down(sys.argv[1])


if __name__ == "__main__":
    main()
