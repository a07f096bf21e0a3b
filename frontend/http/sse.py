"""A response of server-sent events that ends cleanly: with its last event, with an error event, or when nobody listens.

Sends bytes as they come, without middleware between; a client that leaves ends the work at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import ServingError
from frontend.http.disconnect import ClientGone, run_until_disconnect
from frontend.http.errors import error_event

logger = logging.getLogger(__name__)
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Sends `first` and then `events`, and runs `cleanup`, whatever happens.

    `on_disconnect` is called if the client left, or took nothing for `stalled_s`.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        cleanup: contextlib.AsyncExitStack,
        on_disconnect: Callable[[], None],
        stalled_s: float,
    ):
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(_HEADERS | headers)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._first = first
        self._events = events
        self._cleanup = cleanup
        self._on_disconnect = on_disconnect
        self._stalled_s = stalled_s
        self._sending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the stream as an ASGI response."""
        async with self._cleanup:
            self._cleanup.push_async_callback(self._events.aclose)
            try:
                await run_until_disconnect(
                    receive, self._send_all(send), has_stalled=self._has_stalled, poll_s=min(self._stalled_s / 4, 5.0)
                )
            except ClientGone:
                self._on_disconnect()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send(send, self._first)
            async for event in self._events:
                self._sending_since_s = time.monotonic()
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._sending_since_s = None
        except ServingError as exc:
            await self._send(send, error_event(exc))
        except Exception:  # the outermost loop of a stream: the client is told, the log has the trace
            logger.exception("a stream failed unexpectedly")
            await self._send(send, error_event(ServingError("internal error")))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: bytes) -> None:
        self._sending_since_s = time.monotonic()
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._sending_since_s = None

    def _has_stalled(self) -> bool:
        since_s = self._sending_since_s
        return since_s is not None and time.monotonic() - since_s > self._stalled_s
