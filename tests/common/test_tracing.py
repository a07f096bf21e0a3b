"""Spans keep the client's trace, find their parents across processes, and reach a file or a collector; off is None and costs one test."""

from __future__ import annotations

import http.server
import json
import threading
import time
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.tracing import Tracing, TracingSpec, make_tracing, parent_in
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup
from tests.support.router_bed import bed, request_of
from tests.support.spans import read_spans

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = f"00-{TRACE}-{PARENT}-01"


def test_a_span_goes_on_with_the_clients_trace_and_others_go_on_with_it(tmp_path: Path):
    router, group = (Tracing(TracingSpec("file", str(tmp_path)), name) for name in ("router", "group"))
    span = router.start("generate", CLIENT, {"a": 1})
    now_s = time.monotonic()
    group.record("prefill", span.traceparent, now_s - 2.0, now_s - 0.5)
    span.end(ValueError("went wrong"))
    router.close()
    group.close()
    spans = read_spans(tmp_path)
    assert {s.trace for s in spans.values()} == {TRACE}
    assert spans["generate"].parent == PARENT
    assert spans["prefill"].parent == spans["generate"].id
    assert spans["generate"].raw["status"]["status_code"] == "ERROR"
    assert spans["prefill"].seconds == pytest.approx(1.5, abs=0.01)
    assert spans["prefill"].raw["resource"]["attributes"]["service.name"] == "tandem-group"


def test_a_request_without_context_starts_a_trace_as_often_as_it_is_sampled(tmp_path: Path):
    never = Tracing(TracingSpec("file", str(tmp_path), sample_ratio=0.0), "never")
    span = never.start("generate", "")
    assert int(span.traceparent[-2:], 16) & 1 == 0, "downstream hears that nobody records"
    never.record("prefill", span.traceparent, 0.0, 1.0)
    never.start("generate", CLIENT).end()
    span.end()
    never.close()
    assert [s.trace for s in read_spans(tmp_path).values()] == [TRACE], "a client that samples decides for itself"


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", "x" * 5000, f"00-{TRACE}-{PARENT}", f"{CLIENT}; drop"])
def test_headers_that_are_no_context_count_as_none(header: str):
    assert parent_in((("traceparent", header),)) == ""
    assert parent_in((("Traceparent", CLIENT),)) == CLIENT
    assert parent_in(None) == ""


def test_what_can_not_be_exported_to_is_refused_at_the_start(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="tracing"):
        Tracing(TracingSpec("file", str(tmp_path / "file" / "below")), "router")
    assert make_tracing(None, "router") is None


async def test_the_router_passes_the_trace_on_to_both_groups_also_when_it_does_not_trace_itself():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        async for _ in router.stub.Generate(request_of(max_tokens=4), timeout=10, metadata=(("traceparent", CLIENT),)):
            pass
        assert prefill.traceparents == decode.traceparents == [CLIENT]


def test_a_collector_gets_the_spans():
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        tracing = Tracing(TracingSpec("otlp", f"http://127.0.0.1:{server.server_port}"), "router")
        tracing.start("generate", CLIENT).end()
        tracing.close()
    finally:
        server.shutdown()
        server.server_close()
    assert [path for path, _ in received] == ["/v1/traces"]
    assert bytes.fromhex(TRACE) in received[0][1]
    assert json.dumps("generate")[1:-1].encode() in received[0][1]
