"""A Ray cluster of one node on this machine, for laptops, demos and tests: started with a token of its own, stopped by its process.

Never uses `ray stop`, which kills every Ray of the machine. On clusters that exist already nothing here is called.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import tempfile
import time
from pathlib import Path

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from cluster.state import Process, spawn, write_secret
from common.errors import ConfigError, WorkerLost

NAMESPACE = "tandem"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Another process may take it before it is used; callers retry."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def start_local_ray(folder: Path, *, num_cpus: int, timeout_s: float = 60.0) -> tuple[Process, str, Path]:
    """Starts a head node in a session of its own and waits until it answers.

    Returns: (its process, host:port of the GCS, file with the auth token)
    Raises: WorkerLost with the end of its log
    """
    token_file = folder / f"ray-token-{secrets.token_hex(4)}"
    write_secret(token_file, secrets.token_hex(32).encode())
    address = f"127.0.0.1:{free_port()}"
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={address.rpartition(':')[2]}"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--num-cpus={num_cpus}", "--disable-usage-stats"]
    command += [f"--temp-dir={tempfile.mkdtemp(prefix='tandem-ray-')}", f"--object-store-memory={100 << 20}"]
    log = folder / "ray.log"
    process = spawn(command, log, _environment(token_file))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not process.is_dead():
        if b"will now block forever" in log.read_bytes():
            return process, address, token_file
        time.sleep(0.1)
    process.stop(5)
    raise WorkerLost(f"Ray did not start within {timeout_s:.0f} s: {' '.join(log.read_text().split())[-400:]}")


def connect(address: str, token_file: Path | None) -> None:
    """Connects this process as a driver.

    Raises: ConfigError if no cluster answers there with this token
    """
    os.environ.update(_environment(token_file))
    # Ray reads these once, when it is imported, and has no public way to read them again.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as exc:
        raise ConfigError(f"no Ray cluster answers at {address}: {' '.join(str(exc).split())[:200]}") from exc


def _environment(token_file: Path | None) -> dict[str, str]:
    """Ray's own switches. Explicit, since Ray's default for authentication depends on files in the home directory."""
    env = dict(os.environ)
    env["RAY_DISABLE_DOCKER_CPU_WARNING"] = "1"
    env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    if token_file is not None:
        env["RAY_AUTH_MODE"] = "token"
        env["RAY_AUTH_TOKEN"] = token_file.read_text()
    return env
