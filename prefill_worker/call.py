"""One Prefill call: turns what the engine and the hand-over tell of a job into the events of its stream, and ends it exactly once.

Lives on the leader's event loop; the methods of `Listener` are called from the engine thread and hop over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from common.errors import ServingError, TransferTimeout
from common.proto import worker_pb2
from prefill_worker.engine import Cancel, Command
from prefill_worker.handover import Handovers
from prefill_worker.job import FirstToken

_STARTED = worker_pb2.PrefillEvent(started=worker_pb2.PrefillEvent.Started())


class PrefillCall:
    """`settle_s`: how long the hand-over may take after the first token; `command`: takes what the engine is to do.

    Events queue: producers engine and hand-over, consumer the RPC's generator; an error or None is its last item.
    """

    def __init__(
        self,
        key: str,
        reservation: worker_pb2.Reservation | None,
        handovers: Handovers,
        command: Callable[[Command], None],
        settle_s: float,
    ):
        self.key = key
        self._reservation = reservation
        self._handovers = handovers
        self._command = command
        self._settle_s = settle_s
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[worker_pb2.PrefillEvent | ServingError | None] = asyncio.Queue()
        self._computed: asyncio.Future[FirstToken | None] = self._loop.create_future()
        self._first_at_s = 0.0
        self._is_over = False
        self._settle_timer: asyncio.TimerHandle | None = None

    async def events(self) -> AsyncIterator[worker_pb2.PrefillEvent]:
        """Raises: ServingError if the request failed"""
        while (event := await self._events.get()) is not None:
            if isinstance(event, ServingError):
                raise event
            yield event

    # -- from the engine thread --------------------------------------------------------------------------------------------------------

    def on_started(self) -> None:
        self._hop(self._put, _STARTED)

    def may_begin(self) -> bool:
        return self._reservation is not None and self._handovers.try_begin(self._reservation.transfer_id)

    def on_first_token(self, first: FirstToken) -> None:
        self._hop(self._first_token, first)

    def on_failed(self, error: ServingError) -> None:
        self._hop(self.fail, error)

    # -- from the hand-over ------------------------------------------------------------------------------------------------------------

    async def first_to_commit(self) -> FirstToken | None:
        return await asyncio.shield(self._computed)

    def commit_until_s(self) -> float:
        return self._first_at_s + self._settle_s

    def handed_over(self, num_bytes: int) -> None:
        transfer_ms = (self._loop.time() - self._first_at_s) * 1000
        self._handovers.metrics.handed_over(transfer_ms / 1000)
        self._put(worker_pb2.PrefillEvent(handed_over=worker_pb2.PrefillEvent.HandedOver(transfer_ms=transfer_ms, bytes=num_bytes)))
        self._end(None)

    def fail(self, error: ServingError) -> None:
        """Ends the stream with `error`, unless it has ended; compute and hand-over end with it."""
        self._end(error)
        if not self._computed.done():
            self._computed.set_result(None)
        self._command(Cancel(self.key, error))
        if self._reservation is not None:
            self._handovers.stop(self._reservation.transfer_id, error.message)

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _first_token(self, first: FirstToken) -> None:
        self._first_at_s = self._loop.time()
        self._handovers.metrics.computed(first.seconds, first.num_tokens)
        event = worker_pb2.PrefillEvent.FirstToken(output=first.output, prefill_ms=first.seconds * 1000)
        self._put(worker_pb2.PrefillEvent(first_token=event))
        is_finished = first.output.HasField("finish")
        if not self._computed.done():
            self._computed.set_result(None if is_finished else first)
        if self._reservation is None or is_finished:
            self._end(None)
            if self._reservation is not None:
                self._handovers.stop(self._reservation.transfer_id, "the output ended with its first token")
        elif not self._is_over:
            self._settle_timer = self._loop.call_later(self._settle_s, self._settle_late)

    def _settle_late(self) -> None:
        self.fail(TransferTimeout(f"the KV was not handed over within {self._settle_s:.1f} s after the first token"))

    def _end(self, last: ServingError | None) -> None:
        if not self._is_over:
            self._put(last)
            self._is_over = True
            if self._settle_timer is not None:
                self._settle_timer.cancel()

    def _put(self, event: worker_pb2.PrefillEvent | ServingError | None) -> None:
        if not self._is_over:
            self._events.put_nowait(event)

    def _hop(self, method, argument) -> None:
        self._loop.call_soon_threadsafe(method, argument)
