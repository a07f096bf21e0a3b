"""A Ray cluster of one node on this machine, for laptops, demos and tests: started with a token of its own, stopped by its process.

Never uses `ray stop`, which kills every Ray of the machine. On clusters that exist already nothing here is called.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from cluster.state import Process, spawn_held, write_secret
from common.errors import ConfigError, WorkerLost

REACH_S = 5.0


def namespace_of(name: str) -> str:
    """Ray's namespace of a cluster's actors; several clusters may share one Ray."""
    return f"tandem-{name}"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Another process may take it before it is used; callers retry."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class LocalRay:
    """`folder`: Ray's own files; its path stands in the command lines of Ray's processes. `address`: host:port of the GCS."""

    process: Process
    address: str
    token_file: Path
    folder: Path


def start_local_ray(folder: Path, *, num_cpus: int, record: Callable[[LocalRay], None], timeout_s: float = 180.0) -> LocalRay:
    """Starts a head node in a session of its own and waits until it answers. `record` is called before it begins.

    Raises: WorkerLost with the end of its log
    """
    token_file = folder / f"ray-token-{secrets.token_hex(4)}"
    write_secret(token_file, secrets.token_hex(32).encode())
    address = f"127.0.0.1:{free_port()}"
    own_folder = Path(tempfile.mkdtemp(prefix="tandem-ray-"))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={address.rpartition(':')[2]}"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--num-cpus={num_cpus}", "--disable-usage-stats"]
    command += [f"--temp-dir={own_folder}", f"--object-store-memory={100 << 20}"]
    log = folder / "ray.log"
    # Ray takes the host's own address for 127.0.0.1; groups of a local cluster are to stay on loopback all the same.
    held = spawn_held(command, log, _environment(token_file) | {"TANDEM_NODE_ADDRESS": "127.0.0.1"})
    ray_node = LocalRay(held.process, address, token_file, own_folder)
    record(ray_node)
    held.release()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not ray_node.process.is_dead():
        if b"will now block forever" in log.read_bytes():
            return ray_node
        time.sleep(0.1)
    what = "ended while it started" if ray_node.process.is_dead() else f"did not start within {timeout_s:.0f} s"
    raise WorkerLost(f"Ray {what}: {' '.join(log.read_text().split())[-400:]}")


def stop_local_ray(process: Process, folder: Path | None, timeout_s: float = 30.0) -> None:
    """Ends Ray and everything that it has started, also what was stopped or lost its parent; removes its files."""
    family = family_of_ray(process, folder)
    process.stop(timeout_s)
    for relative in {*family, *family_of_ray(process, folder)}:
        relative.stop(0)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def family_of_ray(process: Process, folder: Path | None) -> set[Process]:
    """The process, those with the folder in their command line, and all of their descendants."""
    parents: dict[int, int] = {}
    found = {process.pid}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if folder is not None and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    family = set()
    for pid in found - {process.pid}:
        with contextlib.suppress(ProcessLookupError):
            family.add(Process.of(pid))
    return family


def connect(address: str, token_file: Path | None, namespace: str) -> None:
    """Connects this process as a driver.

    Raises: ConfigError if no cluster answers there with this token
    """
    _reach(address)
    os.environ.update(_environment(token_file))
    # Ray reads these once, when it is imported, and has no public way to read them again.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as exc:
        raise ConfigError(f"no Ray cluster answers at {address}: {' '.join(str(exc).split())[:200]}") from exc


def _reach(address: str) -> None:
    """Ray itself tries for minutes. Raises: ConfigError if nothing listens at a host:port"""
    host, _, port = address.rpartition(":")
    if not host:  # a word that Ray resolves, such as "auto"
        return
    bare = host.rpartition("//")[2].strip("[]")  # without a scheme, and without the brackets of an IPv6 address
    try:
        socket.create_connection((bare, int(port)), REACH_S).close()
    except (OSError, ValueError) as exc:
        raise ConfigError(f"no Ray cluster answers at {address}: {exc}") from exc


def _environment(token_file: Path | None) -> dict[str, str]:
    """Ray's own switches. Explicit, since Ray's default for authentication depends on files in the home directory."""
    env = dict(os.environ)
    env["RAY_DISABLE_DOCKER_CPU_WARNING"] = "1"
    env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    if token_file is not None:
        env["RAY_AUTH_MODE"] = "token"
        env["RAY_AUTH_TOKEN"] = token_file.read_text()
    return env
