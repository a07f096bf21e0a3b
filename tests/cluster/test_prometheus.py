"""A real Prometheus scrapes a real cluster and has an answer to every query of the dashboard and every expression of an alert."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request

import pytest

from common.proto import router_pb2_grpc
from tests.support.frontend_process import FrontendProcess, running_frontend
from tests.support.local_cluster import LocalCluster, ask, channel_of, request
from tests.support.pace import within
from tests.support.prometheus import BINARY, Prometheus, running_prometheus
from tools.observability.dashboard import RATE, ROWS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(BINARY is None, reason="prometheus (Debian package) is not installed"),
]


def complete(frontend: FrontendProcess) -> None:
    body = {"model": "tiny", "prompt": list(range(1, 30)), "max_tokens": 3}
    url, headers = f"http://{frontend.address}/v1/completions", {"content-type": "application/json"}
    with contextlib.suppress(urllib.error.HTTPError):  # an answer like any other, for metrics
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60).read()


def unanswered(prometheus: Prometheus) -> dict[str, str]:
    queries = {f"{row.title}: {panel.title}: {q.legend}": q.expr for row in ROWS for panel in row.panels for q in panel.queries}
    return {name: expr for name, expr in queries.items() if not prometheus.query(expr.replace(RATE, "30s"))}


async def test_every_query_of_the_dashboard_is_answered(local_cluster: LocalCluster, tmp_path):
    with (
        running_frontend(local_cluster.router) as frontend,
        running_prometheus(tmp_path, local_cluster.metrics, [frontend.metrics], every_s=3) as prometheus,
    ):
        async with channel_of(local_cluster) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            deadline = time.monotonic() + within(30)
            while missing := await asyncio.to_thread(unanswered, prometheus):
                assert time.monotonic() < deadline, missing
                await asyncio.gather(*(ask(stub, request(list(range(1, 20 + 30 * i)), max_tokens=8)) for i in range(3)))
                await asyncio.to_thread(complete, frontend)
        while not (len(up := prometheus.up()) == 6 and all(up.values())):
            assert time.monotonic() < deadline, f"controller, router, two prefill leaders, a decode leader, a frontend: {up}"
            await asyncio.sleep(0.5)
        ready = prometheus.query('sum by (pool) (tandem_groups{state="ready"})')
        assert set(ready.values()) == {1.0}
