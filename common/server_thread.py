"""A grpc.aio server on an event loop in a thread of its own, so that a rank's engine thread never waits for the network.

Owns thread, loop and server. Used by the leaders of groups; what is served is theirs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc

from common.access import Role
from common.errors import ConfigError, ServingError
from common.requests import MAX_MESSAGE_BYTES
from common.wire import PLAIN, Wire

T = TypeVar("T")
GRPC_OPTIONS = (
    ("grpc.keepalive_time_ms", 1000),  # a peer whose host is gone says nothing: its streams end when it does not answer either
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.max_receive_message_length", 4 * MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", 4 * MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)


class ServerThread:
    """Bound by its constructor, serving from `serve` until `stop`. `address`: host:port that it listens at."""

    def __init__(self, host: str, wire: Wire = PLAIN):
        """Raises: ConfigError if nothing can listen on `host`"""
        self.loop = asyncio.new_event_loop()
        self._wire = wire
        self._thread = threading.Thread(target=self._run, name="grpc", daemon=True)
        self._thread.start()
        try:
            self._server, port = self.call(self._bind(host))
        except RuntimeError as exc:
            self._end_thread()
            raise ConfigError(f"can't listen on {host}: {exc}") from exc
        self.address = f"{host}:{port}"

    def serve(self, register: Callable[[grpc.aio.Server], None]) -> None:
        """`register` adds the services; it runs on the loop, so it may make asyncio objects."""
        self.call(self._serve(register))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop, from any other thread, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=30)

    def stop(self, grace_s: float) -> None:
        """Ends running calls after `grace_s`; returns when the thread is gone. Idempotent; not to be called from the loop."""
        if self._thread.is_alive():
            self.call(self._server.stop(grace_s))
            self._end_thread()

    async def _bind(self, host: str) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=GRPC_OPTIONS, interceptors=self._wire.guards({}, Role.INTERNAL))
        return server, self._wire.bind(server, f"{host}:0", internal=True)

    async def _serve(self, register: Callable[[grpc.aio.Server], None]) -> None:
        register(self._server)
        await self._server.start()

    def _end_thread(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


async def abort_with(context: grpc.aio.ServicerContext, error: ServingError) -> None:
    """Ends a call with the error's gRPC status. Raises: always (grpc's own AbortError)"""
    await context.abort(grpc.StatusCode[error.grpc_status], str(error))
