"""An sshd of this test's own on a free port of loopback, and an end for what its logins left behind. Skips where sshd is absent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.local_ray import free_port

# ssh has no option for the port that Ray's command runner would pass on; a proxy command takes its place.
RELAY = """
import os, socket, sys, threading
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def up():
    while data := os.read(0, 65536):
        s.sendall(data)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := s.recv(65536):
    os.write(1, data)
"""


@dataclass(frozen=True)
class Loopback:
    """`home`: of whoever logs in; `mark`: stands in the environment of everything that a login starts."""

    key: Path
    home: Path
    proxy_command: str
    mark: str


@contextmanager
def loopback_ssh(folder: Path) -> Iterator[Loopback]:
    sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    missing = [name for name, path in {"sshd": sshd, "ssh": shutil.which("ssh"), "rsync": shutil.which("rsync")}.items() if path is None]
    if missing or sshd is None:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: openssh-server, rsync)")
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    home, port, mark = folder / "home", free_port(), f"{folder.name}-{os.getpid()}"
    home.mkdir()
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        f"SetEnv HOME={home} LOOPBACK_MARK={mark}\n"
    )
    with (folder / "sshd.log").open("w") as log:
        process = subprocess.Popen([sshd, "-D", "-e", "-f", str(config)], stderr=log)
    relay = folder / "relay.py"
    relay.write_text(RELAY)
    try:
        yield Loopback(folder / "user_key", home, f"{sys.executable} {relay} {port}", mark)
    finally:
        process.terminate()
        process.wait(10)
        end_marked(mark)


def end_marked(mark: str) -> None:
    """Ends every process with this mark in its environment: Ray's daemons leave their process group and session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 20
        left = _marked(mark)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while _marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if f"LOOPBACK_MARK={mark}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
