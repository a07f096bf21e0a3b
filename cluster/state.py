"""What `tandem up` leaves on disk for `tandem down`, `status` and the clients of this machine: one small JSON file per cluster.

Holds addresses and process identities, and the paths of secrets, never the secrets. Written by the CLI alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from common.errors import ConfigError
from common.process import identity, is_known_dead
from common.proto import types_pb2


class Process(BaseModel):
    """A process of this host. `start_ticks` keeps a recycled pid from being taken for it."""

    model_config = ConfigDict(frozen=True)
    host: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        known = identity(pid)
        return cls(host=known.host, pid=known.pid, start_ticks=known.start_ticks)

    def is_dead(self) -> bool:
        return is_known_dead(types_pb2.ProcessIdentity(**self.model_dump()))

    def signal(self, number: int) -> None:
        """Does nothing if it is dead."""
        if not self.is_dead():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL after `timeout_s`. Returns: whether it ended by itself"""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while not self.is_dead() and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = self.is_dead()
        self.signal(signal.SIGKILL)
        with suppress(ChildProcessError):  # another process's child
            os.waitpid(self.pid, 0)
        return ended


@dataclass(frozen=True)
class Held:
    """A process that waits for `release` before it begins, and ends if its parent does so first: there is a moment to write down that it
    exists, and nothing is left behind without a record."""

    process: Process
    _go: int

    def release(self) -> None:
        os.write(self._go, b"go\n")
        os.close(self._go)


def spawn_held(command: list[str], log: Path, env: Mapping[str, str]) -> Held:
    """A process in a session of its own that may outlive this one, its output in `log`."""
    reader, writer = os.pipe()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [(os.POSIX_SPAWN_DUP2, reader, 0), (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600), (os.POSIX_SPAWN_DUP2, 1, 2)]
    waiting = ["/bin/sh", "-c", 'read -r go && exec "$@" </dev/null', "sh", *command]
    pid = os.posix_spawn(waiting[0], waiting, env, file_actions=actions, setsid=True)
    os.close(reader)
    return Held(Process.of(pid), writer)


class ClusterState(BaseModel):
    model_config = ConfigDict(frozen=True)
    name: str
    ray_address: str
    ray_process: Process | None = None  # None: a Ray cluster that was there before
    ray_token_file: Path | None = None
    ray_folder: Path | None = None  # Ray's own files, and the mark by which its processes are found
    controller_address: str | None = None
    metrics_address: str | None = None  # of the controller: /targets there lists all others
    router_process: Process | None = None
    router_address: str | None = None
    frontend_process: Process | None = None
    frontend_address: str | None = None


def state_dir(name: str) -> Path:
    """Folder of one cluster's state and logs. `TANDEM_STATE_DIR` moves it (node identity, not configuration)."""
    return Path(os.environ.get("TANDEM_STATE_DIR", Path.home() / ".tandem")) / name


def save_state(state: ClusterState) -> None:
    folder = state_dir(state.name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = folder / "state.json.new"
    temporary.write_text(state.model_dump_json(indent=1))
    temporary.replace(folder / "state.json")


def load_state(name: str) -> ClusterState | None:
    """Raises: ConfigError if the file is there and can't be read"""
    path = state_dir(name) / "state.json"
    if not path.exists():
        return None
    try:
        return ClusterState.model_validate_json(path.read_text())
    except ValueError as exc:
        raise ConfigError(f"{path}: not a state file of this version; stop its processes by hand and remove it") from exc


def clear_state(name: str) -> None:
    (state_dir(name) / "state.json").unlink(missing_ok=True)


def write_secret(path: Path, secret: bytes) -> None:
    """Creates the file readable by its owner alone; never overwrites."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
