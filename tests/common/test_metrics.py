"""Instruments count right, weigh batches, and read as Prometheus text; the server answers scrapers and nothing else."""

import asyncio
import contextlib
import ssl

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import ConfigError
from common.metric_catalog import BY_PROCESS
from common.metrics import Definition, Metrics
from common.metrics_server import MetricsServer, Page, own_host

TOKENS = Definition("t_tokens_total", "counter", "tokens", ("pool",))
FREE = Definition("t_free", "gauge", "free", ("pool",))
GAP = Definition("t_gap_seconds", "histogram", "gap", (), (0.1, 0.2, 0.5))


def samples(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


def test_one_observation_of_a_batch_counts_each_of_its_sequences():
    metrics = Metrics([GAP])
    metrics.histogram(GAP).observe(0.15, times=128)
    metrics.histogram(GAP).observe(0.2)
    metrics.histogram(GAP).observe(7.0)
    found = samples(metrics.render())
    assert found["t_gap_seconds_bucket", ("0.1",)] == 0
    assert found["t_gap_seconds_bucket", ("0.2",)] == 129, "a bound belongs to its bucket"
    assert found["t_gap_seconds_bucket", ("+Inf",)] == found["t_gap_seconds_count", ()] == 130
    assert found["t_gap_seconds_sum", ()] == pytest.approx(128 * 0.15 + 7.2)


def test_labels_tell_children_apart_and_replace_forgets_those_that_are_gone():
    metrics = Metrics([TOKENS, FREE])
    metrics.counter(TOKENS).labels("a").inc(3)
    metrics.counter(TOKENS).labels("b").inc()
    metrics.counter(TOKENS).labels("a").inc()
    metrics.counter(FREE).replace({("a",): 1.0, ("b",): 2.0})
    metrics.counter(FREE).replace({("b",): 5.0})
    found = samples(metrics.render())
    assert (found["t_tokens_total", ("a",)], found["t_tokens_total", ("b",)]) == (4, 1)
    assert ("t_free", ("a",)) not in found
    assert found["t_free", ("b",)] == 5


def test_a_metric_without_observations_is_announced():
    assert b"# TYPE t_tokens_total counter" in Metrics([TOKENS]).render()


@pytest.mark.parametrize("process", BY_PROCESS)
def test_the_catalog_follows_the_conventions(process: str):
    for d in BY_PROCESS[process]:
        assert d.name.startswith("tandem_")
        assert d.name.endswith("_total") == (d.kind == "counter"), d.name
        assert bool(d.buckets) == (d.kind == "histogram"), d.name
        assert list(d.buckets) == sorted(set(d.buckets))
        assert not {"request", "request_id", "client", "group", "le"} & set(d.labels), f"{d.name}: labels without bound"


async def ask(address: str, request: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


async def test_the_server_refreshes_before_each_scrape_and_serves_pages():
    metrics = Metrics([FREE])
    asked = []
    server = MetricsServer(
        metrics,
        lambda: asked.append(metrics.counter(FREE).replace({("a",): len(asked) + 1.0})),
        {"/targets": Page("application/json", lambda: b"[]")},
    )
    address = await server.start("127.0.0.1", 0)
    try:
        assert b't_free{pool="a"} 1.0' in await ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b't_free{pool="a"} 2.0' in await ask(address, b"GET /metrics?x=1 HTTP/1.1\r\n\r\n")
        assert (await ask(address, b"GET /targets HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n[]")
        assert (await ask(address, b"GET /other HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404")
        assert (await ask(address, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405")
        with contextlib.suppress(ConnectionResetError):
            assert await ask(address, b"x" * (1 << 17) + b"\r\n\r\n") == b"", "an endless header is hung up on"
        assert b" 200 " in await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")
    finally:
        await server.close()


async def test_a_gauge_that_fails_is_an_answer_of_500():
    def broken() -> None:
        raise KeyError("pool")

    server = MetricsServer(Metrics([]), broken)
    address = await server.start("127.0.0.1", 0)
    try:
        assert (await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 500")
    finally:
        await server.close()


async def test_a_taken_port_gives_the_next_one_and_a_foreign_address_is_refused():
    first, second = MetricsServer(Metrics([])), MetricsServer(Metrics([]))
    try:
        port = int((await first.start("127.0.0.1", 0)).rpartition(":")[2])
        assert port < int((await second.start("127.0.0.1", port)).rpartition(":")[2]) < port + 64
        with pytest.raises(ConfigError, match=r"192\.0\.2\.7"):
            await MetricsServer(Metrics([])).start("192.0.2.7", 0)
    finally:
        await first.close()
        await second.close()


async def test_a_wildcard_is_told_to_scrapers_as_an_address_of_the_host():
    server = MetricsServer(Metrics([]))
    try:
        assert (await server.start("0.0.0.0", 0, own_host("127.0.0.1"))).startswith("127.0.0.1:")
        assert own_host("0.0.0.0") not in ("", "0.0.0.0")
    finally:
        await server.close()
