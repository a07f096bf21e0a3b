"""Runs a small cluster with a frontend under load, a real Prometheus beside it, and writes what every panel of the dashboard would show.

    python -m tools.observability.live --seconds 60 --out FOLDER        # needs `prometheus` on the PATH

`FOLDER/panels.json`: per row and panel the series of each query, one value per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from common.proto import router_pb2_grpc
from model.fixture import write_random_fixture
from tests.support.frontend_process import running_frontend
from tests.support.local_cluster import LocalCluster, ask, channel_of, cluster_config, request, running_cluster
from tests.support.prometheus import Prometheus, running_prometheus
from tools.observability.dashboard import RATE, ROWS

WINDOW = "30s"
SCRAPE_S = 5


async def load(cluster: LocalCluster, seconds: float) -> int:
    """Clients that come and go in waves. Returns: answers"""
    done, answers = time.monotonic() + seconds, 0
    async with channel_of(cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)

        async def client(seed: int) -> None:
            nonlocal answers
            rng = random.Random(seed)
            while time.monotonic() < done:
                prompt = [rng.randrange(1, 900) for _ in range(rng.choice((16, 64, 256)))]
                await ask(stub, request(prompt, max_tokens=rng.choice((4, 16, 32))), timeout_s=120)
                answers += 1
                await asyncio.sleep(rng.random() * 0.2)

        await asyncio.gather(*(client(seed) for seed in range(6)))
    return answers


def series(prometheus: Prometheus, expr: str, start: float, end: float) -> dict[str, list]:
    result = prometheus.get("query_range", query=expr.replace(RATE, WINDOW), start=start, end=end, step=1)["result"]
    return {json.dumps(r["metric"], sort_keys=True): r["values"] for r in result}


def main() -> None:
    options = argparse.ArgumentParser(description="What every panel of the dashboard shows of a small cluster under load.")
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--out", type=Path, required=True)
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_fixture(folder / "tiny", vocab_size=1024)
        with (
            running_cluster("live", folder / "state", cluster_config(folder / "tiny")) as cluster,
            running_frontend(cluster.router) as frontend,
            running_prometheus(folder / "prometheus", cluster.metrics, [frontend.metrics], SCRAPE_S) as prometheus,
        ):
            start = time.time()
            answers = asyncio.run(load(cluster, chosen.seconds))
            time.sleep(SCRAPE_S)
            panels = {
                row.title: {p.title: {q.legend: series(prometheus, q.expr, start, time.time()) for q in p.queries} for p in row.panels}
                for row in ROWS
            }
    (chosen.out / "panels.json").write_text(json.dumps(panels))
    empty = [f"{row}: {panel}" for row, of_row in panels.items() for panel, queries in of_row.items() if not any(queries.values())]
    print(f"{answers} answers; {sum(map(len, panels.values()))} panels, without a value: {empty or 'none'}")


if __name__ == "__main__":
    main()
