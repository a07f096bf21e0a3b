"""Serves one process's metrics over HTTP on its event loop: `GET /metrics`, and pages that the process adds.

Speaks as much HTTP as a scraper needs, so that workers carry no web framework. Has no authentication: bind it where only the scraper
reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.errors import ConfigError
from common.metrics import CONTENT_TYPE, Metrics

_REQUEST_TIMEOUT_S = 10.0
_PORTS_TRIED = 64
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    content_type: str
    body: Callable[[], bytes]


class MetricsServer:
    """`refresh` sets the gauges; it runs on the loop right before a scrape is rendered (in a thread, so that the loop goes on)."""

    def __init__(
        self,
        metrics: Metrics,
        refresh: Callable[[], None] = lambda: None,
        pages: Mapping[str, Page] | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self._metrics = metrics
        self._refresh = refresh
        self._pages = dict(pages or {})
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, own_host: str = "127.0.0.1") -> str:
        """Listens on `port`, or on one of the next if it is taken; 0 is any free one. `own_host`: how others reach this host, told
        to scrapers where `host` is a wildcard.

        Returns: host:port for scrapers
        Raises: ConfigError if nothing can listen there
        """
        for offset in range(_PORTS_TRIED if port else 1):
            try:
                self._server = await asyncio.start_server(self._serve, host, port + offset, ssl=self._tls)
                break
            except OSError as exc:
                error = exc
        else:
            raise ConfigError(f"metrics can't be served on {host}:{port}: {error}")
        return f"{own_host if host in ('0.0.0.0', '::') else host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        if method != b"GET":
            return _response("405 Method Not Allowed", "text/plain", b"only GET\n")
        try:
            if path == "/metrics":
                self._refresh()
                return _response("200 OK", CONTENT_TYPE, await asyncio.to_thread(self._metrics.render))
            page = self._pages.get(path)
            body = page.body() if page is not None else b""
        except Exception:  # the outermost loop: a scraper hears of it, and the log has the trace
            logger.exception("%s failed", path)
            return _response("500 Internal Server Error", "text/plain", b"see the log of the process\n")
        if page is None:
            return _response("404 Not Found", "text/plain", f"there are {', '.join(['/metrics', *self._pages])}\n".encode())
        return _response("200 OK", page.content_type, body)


def own_host(listens_on: str) -> str:
    """An address of this host that others may reach: `listens_on`, unless that is a wildcard."""
    if listens_on not in ("", "0.0.0.0", "::", "[::]"):
        return listens_on
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks the kernel for the address it would send from
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
