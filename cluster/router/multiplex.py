"""`GenerateMany`: many `Generate` calls of one frontend in one stream. Owns what is in flight on each stream.

Each call runs `generate.py`'s handler with a context of its own, as if it were an RPC of its own. One gRPC message per token costs more
than all else that the router and a frontend do for a token; here a frame carries the tokens of all calls that came since the last one was
written, so a stream that lags gets fewer, fuller frames. A call waits for its frame to be written before it hands over more: what a
lagging frontend has not taken stays in the bounded `ClientStream` of each call. Called by `server.py`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NoReturn

import grpc

from cluster.router.status import ROUTE_KEY
from common.errors import InvalidRequestError
from common.proto import router_pb2

logger = logging.getLogger(__name__)
FRAME_BYTES = 1 << 20  # a frame that is larger takes no more; far below any client's message limit

Metadata = Sequence[tuple[str, str | bytes]]


class _CallAborted(Exception):
    """The handler has ended its call with a status."""


class _Frame:
    """Events that are written together. `written`: they are with the transport."""

    def __init__(self) -> None:
        self.message = router_pb2.GenerateManyResponse()
        self.num_bytes = 0
        self.written = asyncio.Event()


class CallContext:
    """What a handler sees of its call: the part of `grpc.aio.ServicerContext` that handlers use."""

    def __init__(self, link: _Link, call_id: int, start: router_pb2.CallStart):
        self._link = link
        self._call_id = call_id
        self._metadata = tuple(start.metadata.items())
        self._deadline_s = asyncio.get_running_loop().time() + start.timeout_ms / 1e3 if start.timeout_ms else None

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - asyncio.get_running_loop().time()

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Of all keys only the route travels."""
        for key, value in metadata:
            if key == ROUTE_KEY and isinstance(value, bytes):
                self._link.put(router_pb2.CallEvent(call_id=self._call_id, route=value), len(value))

    async def write(self, response: bytes) -> None:
        frame = self._link.put(router_pb2.CallEvent(call_id=self._call_id, response=response), len(response))
        await frame.written.wait()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        self.end(code, details, trailing_metadata)
        raise _CallAborted

    def end(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        texts = {key: value for key, value in trailing_metadata if isinstance(value, str)}
        end = router_pb2.CallEnd(code=code.value[0], details=details, trailing_metadata=texts)
        self._link.put(router_pb2.CallEvent(call_id=self._call_id, end=end), len(details))


Handler = Callable[[bytes, CallContext], Awaitable[None]]


class _Link:
    """One stream: its running calls and the frames that wait to be written. Producers: the calls; consumer: `Multiplexer.serve`."""

    def __init__(self, handle: Handler):
        self._handle = handle
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._frames: deque[_Frame] = deque()
        self._wake = asyncio.Event()
        self._is_closing = False

    def put(self, event: router_pb2.CallEvent, num_bytes: int) -> _Frame:
        if not self._frames or self._frames[-1].num_bytes > FRAME_BYTES:
            self._frames.append(_Frame())
            self._wake.set()
        frame = self._frames[-1]
        frame.message.events.append(event)
        frame.num_bytes += num_bytes
        return frame

    async def take(self) -> _Frame | None:
        """The next frame; None when no call runs and none can come."""
        while not self._frames:
            if self._is_closing and not self._calls:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._frames.popleft()

    async def read(self, requests: AsyncIterator[router_pb2.GenerateManyRequest]) -> None:
        """Until the client sends no more. Raises: InvalidRequestError for an id that runs already; all calls end then"""
        try:
            async for request in requests:
                for item in request.items:
                    self._on_item(item)
        except InvalidRequestError:
            await self.cancel_calls()
            raise
        finally:
            self.close()

    def close(self) -> None:
        """The stream ends once its calls have ended."""
        self._is_closing = True
        self._wake.set()

    async def cancel_calls(self) -> None:
        tasks = list(self._calls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_item(self, item: router_pb2.CallItem) -> None:
        if item.HasField("start"):
            if item.call_id in self._calls:
                raise InvalidRequestError("items.call_id", f"{item.call_id} is running already")
            task = asyncio.create_task(self._run(item.call_id, item.start))
            self._calls[item.call_id] = task
            task.add_done_callback(functools.partial(self._forget, item.call_id))
        elif item.call_id in self._calls:
            self._calls[item.call_id].cancel()

    def _forget(self, call_id: int, _task: asyncio.Task[None]) -> None:
        del self._calls[call_id]
        if self._is_closing:
            self._wake.set()

    async def _run(self, call_id: int, start: router_pb2.CallStart) -> None:
        context = CallContext(self, call_id, start)
        try:
            await self._handle(start.request, context)
            context.end(grpc.StatusCode.OK)
        except _CallAborted:
            return
        except Exception as exc:  # the outermost loop of a call: its client is told, the log has the trace
            logger.exception("call %d failed inside the router", call_id)
            context.end(grpc.StatusCode.INTERNAL, f"internal error: {exc!r}")


class Multiplexer:
    """All streams of one router."""

    def __init__(self, handle: Handler):
        self._handle = handle
        self._links: set[_Link] = set()

    async def serve(self, requests: AsyncIterator[router_pb2.GenerateManyRequest], context: grpc.aio.ServicerContext) -> None:
        """The body of the RPC; when it ends, for whatever reason, its calls end too.

        Raises: InvalidRequestError for an id that runs already
        """
        link = _Link(self._handle)
        self._links.add(link)
        reader = asyncio.create_task(link.read(requests))
        try:
            while (frame := await link.take()) is not None:
                await context.write(frame.message)
                frame.written.set()
            if reader.done():
                reader.result()
        finally:
            self._links.discard(link)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await link.cancel_calls()

    def close(self) -> None:
        """Every stream ends as soon as its calls have ended."""
        for link in self._links:
            link.close()
