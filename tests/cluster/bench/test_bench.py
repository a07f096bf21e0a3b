"""`tandem bench`: sums on samples made by hand, the flags, and real runs against a router and an HTTP server."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from cluster.bench.drive import drive
from cluster.bench.measure import Sample, parse_goodput, summarize
from cluster.bench.targets import OpenAITarget, RouterTarget
from cluster.load.arrivals import Lengths, Load, random_load
from common.errors import ConfigError
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup
from tests.support.router_bed import bed


def test_figures_on_numbers_worked_out_by_hand():
    first = Sample(0.0, 10, [(0.1, 1), (0.2, 2), (0.4, 1)], 0.4, usd=1e-6)
    second = Sample(1.0, 20, [(1.5, 1)], 1.5, usd=3e-6)
    failed = Sample(1.0, 5, [], 1.1, error="UNAVAILABLE")
    figures = summarize([first, second, failed], 2.0, {"ttft": 200.0})
    assert (figures["completed"], figures["failed"], figures["errors"]) == (2, 1, ["UNAVAILABLE"])
    assert figures["ttft_ms"]["mean"] == pytest.approx(300.0)
    assert figures["tpot_ms"]["median"] == pytest.approx(100.0)
    assert figures["itl_ms"]["mean"] == pytest.approx(150.0)
    assert figures["e2el_ms"]["p99"] == pytest.approx(499.0)
    assert figures["output_throughput"] == pytest.approx(2.5)
    assert figures["goodput"] == pytest.approx(0.5)
    assert figures["usd_per_1m_output_tokens"] == pytest.approx(0.8)
    assert summarize([first], 3600.0, {}, usd_per_hour=4.0)["usd_per_1m_output_tokens"] == pytest.approx(1e6)


def test_nothing_answered_is_no_division_by_zero():
    figures = summarize([Sample(0.0, 5, error="X")], 1.0, {"itl": 5.0})
    assert figures["completed"] == 0
    assert figures["usd_per_1m_output_tokens"] is None


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:5", "itl:-1"])
def test_bounds_that_mean_nothing_are_refused(text):
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput([text])
    assert parse_goodput(["ttft:500", "itl:20"]) == {"ttft": 500.0, "itl": 20.0}


class CountingTarget:
    def __init__(self) -> None:
        self.now = self.most = 0

    async def send(self, prompt_tokens: int, output_tokens: int) -> Sample:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.002)
        self.now -= 1
        return Sample(0.0, prompt_tokens, [(0.1, output_tokens)], 0.2)

    async def close(self) -> None: ...


async def test_never_more_at_once_than_allowed():
    target = CountingTarget()
    load = Load(np.zeros(40), np.arange(1, 41), np.ones(40, int))
    samples, _ = await drive(target, load, 5)
    assert target.most == 5
    assert [sample.prompt_tokens for sample in samples] == list(range(1, 41))


async def test_against_a_router():
    async with bed(FakePrefillGroup(), FakeDecodeGroup()) as router:
        target = RouterTarget(router.channel, 201088, 20.0, seed=1)
        samples, duration_s = await drive(target, random_load(20, 1e6, Lengths(64), Lengths(12), seed=0), None)
        await target.close()
    figures = summarize(samples, duration_s, {"ttft": 1e6})
    assert figures["completed"] == 20
    assert figures["output_tokens"] == 240
    assert figures["usd_per_1m_output_tokens"] > 0


class _Completions(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "m":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        for i in range(body["max_tokens"]):
            self.wfile.write(f"data: {json.dumps({'choices': [{'text': f't{i}'}]})}\n\n".encode())
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 7}})}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *args) -> None: ...


@pytest.mark.parametrize(("model", "completed"), [("m", 5), ("other", 0)])
async def test_against_an_http_server(model, completed):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        target = OpenAITarget(f"http://127.0.0.1:{server.server_address[1]}", model, "key", 10.0, seed=1)
        samples, duration_s = await drive(target, random_load(5, 1e6, Lengths(9), Lengths(4), seed=0), 2)
        await target.close()
        server.shutdown()
        thread.join()
    figures = summarize(samples, duration_s, {})
    assert (figures["completed"], figures["output_tokens"]) == (completed, 4 * completed)
    assert figures["input_tokens"] == 7 * completed
    assert figures["errors"] == ([] if completed else ["HTTP 404"])
