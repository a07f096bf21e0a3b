"""One `GenerateMany` stream to a router: all running requests of this process share it.

Owns which request gets which event, and the end of all of them when the stream breaks. A frame is handed out without waiting; each
request takes what has come for it when its turn is there, so a busy event loop sees fewer, larger pieces. Called by
`frontend.router_client`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import grpc
import grpc.aio

from common.errors import DeadlineError, OverloadedError, ServingError, WorkerLost
from common.proto import router_pb2
from common.tracing import TRACEPARENT
from frontend.rpc_errors import from_rpc_error, from_status

_parse = router_pb2.GenerateResponse.FromString
_GRACE_S = 2.0  # past its deadline a request ends here, should the router not have ended it
_BEHIND_S = 0.01  # streams that took longer than this over their last tokens are behind
_GATHER_S = 0.04  # then so long at most more tokens are gathered before the streams go on
_MAX_WAITING = 16_384  # responses of one request that nobody has taken


class RouterStream:
    """One running request. `take` responses until there are none; `cancel` frees the request at once.

    `route`: the serialised decision that the router told ahead of the tokens, empty until then.
    """

    def __init__(self, forget: Callable[[RouterStream], None]):
        self.route = b""
        self._forget = forget
        self._waiting: list[bytes] = []
        self._error: ServingError | None = None
        self._is_ended = False
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None

    async def take(self) -> list[router_pb2.GenerateResponse]:
        """Every response that has come since the last call, at least one; none at the end.

        Raises: ServingError of the kind that fits the router's status, once all that came before it is taken
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._is_ended:
                return []
            self._wake = self._loop.create_future()
            await self._wake
        waiting, self._waiting = self._waiting, []
        return [_parse(data) for data in waiting]

    def put(self, response: bytes) -> None:
        """A response has come. Dropped once the request has ended."""
        if self._is_ended:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self.fail(OverloadedError(f"{len(self._waiting)} responses wait for a client that takes none"))
            return
        self._waiting.append(response)

    def wake(self) -> None:
        """Whoever takes goes on with what has come."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def end(self, error: ServingError | None = None) -> None:
        """Nothing follows what has come."""
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self.wake()

    def fail(self, error: ServingError) -> None:
        """Ends the request; whoever takes gets `error`."""
        self._waiting.clear()
        self.end(error)
        self._forget(self)

    def cancel(self) -> None:
        """Ends the request; nobody is told. Harmless after the end."""
        self.end()
        self._forget(self)


class RouterLink:
    """The stream. Made inside a running event loop by its first request; useless once `is_broken`."""

    def __init__(self, call: grpc.aio.StreamStreamCall):
        self.is_broken = False
        self._call = call
        self._ids = itertools.count(1)
        self._streams: dict[int, RouterStream] = {}
        self._outgoing = router_pb2.GenerateManyRequest()
        self._has_outgoing = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._woken: set[RouterStream] = set()  # streams that got something and wait for their turn
        self._gathering: asyncio.TimerHandle | None = None
        self._busy_s = 0.0
        self._tasks = [asyncio.create_task(self._write_all()), asyncio.create_task(self._read_all())]

    def start(self, request: router_pb2.GenerateRequest, *, timeout_s: float, traceparent: str = "") -> RouterStream:
        """Sends a request; whatever goes wrong is raised by the stream's `take`."""
        call_id = next(self._ids)
        expiry = asyncio.get_running_loop().call_later(timeout_s + _GRACE_S, self._expire, call_id)

        def forget(_: RouterStream) -> None:
            expiry.cancel()
            if self._streams.pop(call_id, None) is not None and not self.is_broken:
                self._outgoing.items.add(call_id=call_id, cancel=True)
                self._has_outgoing.set()

        stream = self._streams[call_id] = RouterStream(forget)
        start = router_pb2.CallStart(request=request.SerializeToString(), timeout_ms=max(1, round(timeout_s * 1e3)))
        if traceparent:
            start.metadata[TRACEPARENT] = traceparent
        self._outgoing.items.add(call_id=call_id, start=start)
        self._has_outgoing.set()
        return stream

    def running(self) -> list[RouterStream]:
        """The requests that have not ended."""
        return list(self._streams.values())

    async def close(self) -> None:
        """Ends the stream and every request on it."""
        self._break(WorkerLost("the connection to the router was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_all(self) -> None:
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                outgoing, self._outgoing = self._outgoing, router_pb2.GenerateManyRequest()
                await self._call.write(outgoing)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended; the reader says how

    async def _read_all(self) -> None:
        error: ServingError = WorkerLost("the router ended the connection")
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                self._hand_out(frame)
                if self._busy_s < _BEHIND_S:
                    self._wake_all()
                elif self._gathering is None:  # a busy loop reads on: fewer, larger pieces cost less
                    self._gathering = self._loop.call_later(min(self._busy_s, _GATHER_S), self._wake_all)
        except grpc.aio.AioRpcError as exc:
            error = from_rpc_error(exc)
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
        finally:
            self._break(error)

    def _hand_out(self, frame: router_pb2.GenerateManyResponse) -> None:
        for event in frame.events:
            stream = self._streams.get(event.call_id)
            if stream is None:  # cancelled; its last events were on their way
                continue
            if response := event.response:
                stream.put(response)
                self._woken.add(stream)
            elif event.HasField("end"):
                del self._streams[event.call_id]
                end = event.end
                stream.end(from_status(end.code, end.details, end.trailing_metadata) if end.code else None)
            else:
                stream.route = event.route

    def _wake_all(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        woken, self._woken = self._woken, set()
        for stream in woken:
            stream.wake()
        if woken:
            self._loop.call_soon(self._note_busy, self._loop.time())  # runs after the streams that were woken

    def _note_busy(self, since_s: float) -> None:
        self._busy_s = self._loop.time() - since_s

    def _expire(self, call_id: int) -> None:
        if call_id in self._streams:
            self._streams[call_id].fail(DeadlineError("the request's deadline passed and the router did not say so"))

    def _break(self, error: ServingError) -> None:
        if not self.is_broken:
            self.is_broken = True
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.end(error)
            self._wake_all()
            self._call.cancel()
