"""HTTPS whose certificate is replaced while it serves, clients that must show one, and the trace of a request on its way to the router."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import time
from pathlib import Path

import pytest

from common.tracing import TracingSpec
from frontend.settings import FrontendSettings
from tests.support.certificates import Authority, Files
from tests.support.pace import within
from tests.support.spans import read_spans

pytestmark = pytest.mark.asyncio(loop_scope="module")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": "gpt-oss-20b", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def context_of(files: Files, *, shows_cert: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.folder / "ca.pem")
    if shows_cert:
        context.load_cert_chain(files.folder / "cert.pem", files.folder / "key.pem")
    return context


async def get(url: str, context: ssl.SSLContext) -> int:
    """Status of GET /health. Raises: OSError if the handshake fails"""

    def ask() -> int:
        connection = http.client.HTTPSConnection(url.removeprefix("http://"), context=context, timeout=20)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def test_https_asks_for_a_certificate_and_takes_new_ones_while_it_serves(start, ids_of, tmp_path: Path):
    old, new = Authority("old"), Authority("new")
    files = Files(tmp_path / "server").write(old)
    client = Files(tmp_path / "client").write(old, "client")
    paths = [str(files.folder / name) for name in ("cert.pem", "key.pem", "ca.pem")]
    stack = await start(lambda *_: None, settings=FrontendSettings(certificate=(paths[0], paths[1]), client_ca_file=paths[2]))
    assert await get(stack.url, context_of(client, shows_cert=True)) == 200
    with pytest.raises(OSError):
        await get(stack.url, context_of(client, shows_cert=False))
    files.write(new, trust=old.pem + new.pem)
    client.write(old, "client", trust=new.pem)
    async with asyncio.timeout(30):
        while True:
            try:
                assert await get(stack.url, context_of(client, shows_cert=True)) == 200
                break
            except OSError:  # the old certificate is still shown
                await asyncio.sleep(0.2)


async def test_a_request_is_one_trace_from_the_client_to_the_router(start, ids_of, tmp_path: Path):
    stack = await start("<|channel|>final<|message|>hello<|return|>", settings=FrontendSettings(tracing=TracingSpec("file", str(tmp_path))))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    response = await stack.http.post("/v1/chat/completions", json=BODY, headers=headers)
    assert "hello" in response.text
    deadline = time.monotonic() + within(5)
    while "http" not in (spans := read_spans(tmp_path)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    span = spans["http"]
    assert (span.trace, span.parent) == (TRACE, PARENT)
    assert stack.router.traceparents == [f"00-{TRACE}-{span.id}-01"]


async def test_without_tracing_the_clients_context_still_reaches_the_router(start, ids_of):
    stack = await start("<|channel|>final<|message|>hello<|return|>", settings=FrontendSettings())
    for given, passed in ((f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"), ("nonsense", "")):
        await stack.http.post("/v1/chat/completions", json=BODY, headers={"traceparent": given})
        assert stack.router.traceparents[-1] == passed
