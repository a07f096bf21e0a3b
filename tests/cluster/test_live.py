"""The arithmetic of `tandem top`: rates and quantiles between two scrapes, and a table of a real cluster."""

import asyncio

import pytest
from typer.testing import CliRunner

from cluster.cli import watch  # noqa: F401 - registers the command
from cluster.cli.app import app
from cluster.live import fetch, overview, quantile, scrape_of
from common.errors import WorkerLost
from common.metric_catalog import DECODE, ITL, KV_BLOCKS, OUTPUT_TOKENS, POOL_PRICE, REQUESTS, ROUTER, TTFT
from common.metrics import Metrics
from common.proto import router_pb2_grpc
from tests.support.local_cluster import LocalCluster, ask, channel_of, request

INF = float("inf")


@pytest.mark.parametrize(
    ("buckets", "q", "wanted"),
    [
        ({0.1: 0, 0.2: 0, INF: 0}, 0.5, None),
        ({0.1: 10, 0.2: 10, INF: 10}, 0.5, 0.05),
        ({0.1: 0, 0.2: 10, INF: 10}, 0.5, 0.15),
        ({0.1: 5, 0.2: 10, INF: 10}, 0.99, 0.198),
        ({0.1: 1, 0.2: 2, INF: 100}, 0.99, 0.2),
    ],
)
def test_quantiles_are_those_that_prometheus_computes(buckets, q: float, wanted: float | None):
    assert quantile(buckets, q) == (None if wanted is None else pytest.approx(wanted))


def test_an_overview_is_what_happened_between_two_scrapes():
    router, decode = Metrics(ROUTER), Metrics(DECODE)
    ok = router.counter(REQUESTS).labels("ok", "stop")
    ok.inc(100)
    before = scrape_of([router.render().decode(), decode.render().decode()], 10.0)
    ok.inc(8)
    router.counter(REQUESTS).labels("failed", "unavailable").inc(2)
    router.counter(OUTPUT_TOKENS).inc(400)
    router.histogram(TTFT).labels("p").observe(0.06, times=10)
    decode.histogram(ITL).labels("d").observe(0.011, times=100)
    for state, blocks in (("used", 3), ("free", 9)):
        decode.counter(KV_BLOCKS).labels("d", "decode", "full", state).set(blocks)
    after = scrape_of([router.render().decode(), decode.render().decode()], 12.0)
    seen = overview(before, after)
    assert (seen.requests_per_s, seen.failed_per_s, seen.output_tokens_per_s) == (5, 1, 200)
    assert seen.ttft_p50_s is not None
    assert 0.05 < seen.ttft_p50_s <= 0.07
    assert seen.itl_p99_s is not None
    assert 0.01 < seen.itl_p99_s <= 0.015
    assert seen.usd_per_million_output == 0, "no controller, no price"
    assert after.total(POOL_PRICE.name) == 0


def test_a_restarted_process_does_not_make_rates_negative():
    first, second = Metrics(ROUTER), Metrics(ROUTER)
    first.counter(OUTPUT_TOKENS).inc(1000)
    seen = overview(scrape_of([first.render().decode()], 0.0), scrape_of([second.render().decode()], 1.0))
    assert seen.output_tokens_per_s == 0


def test_a_controller_that_is_away_is_named():
    with pytest.raises(WorkerLost, match=r"127\.0\.0\.1:1"):
        fetch("127.0.0.1:1")


async def test_top_shows_the_pools_of_a_cluster_and_what_they_do(local_cluster: LocalCluster):
    command = ["top", "--once", "--interval-s", "2", "--metrics", local_cluster.metrics]
    shown = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, command))
    async with channel_of(local_cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        while not shown.done():
            await ask(stub, request([1, 2, 3], max_tokens=8))
    result = await shown
    assert result.exit_code == 0, result.output
    for pool in ("prefill-tp1", "prefill-tp2", "decode-ep4"):
        assert pool in result.output
    assert "1/1" in result.output
    assert "$21.00/h" in result.output, "seven ranks at the default price"
