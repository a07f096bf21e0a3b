"""Serves the application with uvicorn until SIGTERM or SIGINT, then lets running replies finish.

Owns the process's end: new requests are refused at once, running ones go on for `drain_s`, the rest end with an error
that their client gets. Called by whoever starts a frontend (`python -m frontend`, a CLI).
"""

from __future__ import annotations

import asyncio
import logging
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from frontend.chat_format import ChatFormat
from frontend.http.app import build_app
from frontend.http.service import Service
from frontend.settings import FrontendSettings

logger = logging.getLogger(__name__)
_CLOSE_S = 5.0  # for connections, after their replies were ended


class FrontendServer(uvicorn.Server):
    """A uvicorn server that drains: see the module. `app.state.service` is there once it has started."""

    def __init__(self, settings: FrontendSettings, app: Starlette):
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(settings.drain_s + _CLOSE_S),
                backlog=4096,
            )
        )
        self._settings = settings
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: starts the drain; a second SIGINT ends at once, as uvicorn does."""
        super().handle_exit(sig, frame)
        service: Service | None = getattr(self._app.state, "service", None)
        if service is not None and not service.is_draining:
            logger.info("draining: running replies may go on for %.0f s", self._settings.drain_s)
            service.drain()
            asyncio.get_running_loop().call_later(self._settings.drain_s, service.end_running)


def serve(settings: FrontendSettings, chat_format: ChatFormat) -> None:
    """Blocks until the server has ended. Raises: ConfigError if a file named in the settings can't be read."""
    FrontendServer(settings, build_app(settings, chat_format)).run()
