"""Serves the application with uvicorn until SIGTERM or SIGINT, then lets running replies finish.

Owns the process's end: new requests are refused at once, running ones go on for `drain_s`, the rest end with an error
that their client gets. Called by whoever starts a frontend (a CLI, a benchmark).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from common.errors import ConfigError
from common.heap import settle_memory
from common.tls import HttpTls
from frontend.chat_format import ChatFormat
from frontend.http.app import FrontendApp, build_app
from frontend.http.service import Service
from frontend.settings import FrontendSettings

logger = logging.getLogger(__name__)
_CLOSE_S = 5.0  # for connections, after their replies were ended


class FrontendServer(uvicorn.Server):
    """A uvicorn server that drains: see the module. `app.state.service` is there once it has started."""

    def __init__(self, settings: FrontendSettings, app: FrontendApp, on_ready: Callable[[int], None] = lambda port: None):
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                timeout_graceful_shutdown=int(settings.drain_s + _CLOSE_S),
                backlog=4096,
            )
        )
        self._settings = settings
        self._app = app
        self._on_ready = on_ready
        self._https = _https_of(settings)
        self._following: asyncio.Task | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, then tells `on_ready` the port."""
        if self._https is not None:
            self.config.ssl = self._https.context
            self._following = asyncio.create_task(_follow(self._https))
        await super().startup(sockets)
        if self.started:
            self._on_ready(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: starts the drain; a second SIGINT ends at once, as uvicorn does."""
        super().handle_exit(sig, frame)
        service: Service | None = getattr(self._app.state, "service", None)
        if service is not None and not service.is_draining:
            logger.info("draining: running replies may go on for %.0f s", self._settings.drain_s)
            service.drain()
            asyncio.get_running_loop().call_later(self._settings.drain_s, service.end_running)


async def _follow(https: HttpTls) -> None:
    while True:
        await asyncio.sleep(1.0)
        https.follow()


def _https_of(settings: FrontendSettings) -> HttpTls | None:
    if settings.certificate is None:
        return None
    cert, key = map(Path, settings.certificate)
    return HttpTls(cert, key, Path(settings.client_ca_file) if settings.client_ca_file else None)


def serve(settings: FrontendSettings, chat_format: ChatFormat, on_ready: Callable[[int], None] = lambda port: None) -> None:
    """Blocks until the server has ended. `on_ready` gets the port as soon as requests are taken.

    Raises: ConfigError if a file named in the settings can't be read or the address can't be had
    """
    server = FrontendServer(settings, build_app(settings, chat_format), on_ready)
    settle_memory()
    try:
        server.run()
    except SystemExit as exc:  # uvicorn's way to say that it could not listen; it has logged why
        raise ConfigError(f"can't listen on {settings.host}:{settings.port}") from exc
