"""`python -m frontend` as a process of its own in front of a router."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.local_ray import free_port


@dataclass(frozen=True)
class FrontendProcess:
    address: str
    metrics: str


@contextlib.contextmanager
def running_frontend(router: str, *options: str) -> Iterator[FrontendProcess]:
    found = FrontendProcess(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")
    command = [sys.executable, "-m", "frontend", "--router", router, "--listen", found.address, "--metrics-listen", found.metrics, *options]
    process = subprocess.Popen([*command, "--drain-s", "1"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{found.metrics}/metrics", timeout=2):
                break
            assert process.poll() is None, "the frontend ended"
            assert time.monotonic() < deadline, "the frontend did not start"
            time.sleep(0.1)
        yield found
    finally:
        process.terminate()
        process.wait(30)
