"""A real Prometheus server beside a local cluster: scrapes through the controller's discovery, answers queries."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from cluster.local_ray import free_port

BINARY = shutil.which("prometheus")


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **params: str | float) -> dict:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(params)}", timeout=20) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> dict[tuple, float]:
        """Labels -> value of every series that has a number now."""
        found = {tuple(sorted(r["metric"].items())): float(r["value"][1]) for r in self.get("query", query=expr)["result"]}
        return {labels: value for labels, value in found.items() if not math.isnan(value)}

    def up(self) -> dict[str, bool]:
        """Scrape address -> whether the last scrape worked."""
        return {t["scrapeUrl"].split("/")[2]: t["health"] == "up" for t in self.get("targets", state="active")["activeTargets"]}


@contextlib.contextmanager
def running_prometheus(folder: Path, controller_metrics: str, static: Sequence[str] = (), every_s: int = 1) -> Iterator[Prometheus]:
    """`controller_metrics`: host:port whose /targets lists the cluster; `static`: further targets."""
    assert BINARY is not None
    config = {
        "global": {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"},
        "scrape_configs": [
            {"job_name": "tandem", "http_sd_configs": [{"url": f"http://{controller_metrics}/targets", "refresh_interval": f"{every_s}s"}]},
            {"job_name": "tandem-frontend", "static_configs": [{"targets": list(static)}]},
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    storage, listen = f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"
    command = [BINARY, f"--config.file={folder / 'prometheus.yml'}", storage, listen]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://{address}")
        deadline = time.monotonic() + 60
        while not _is_ready(server.url):
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
