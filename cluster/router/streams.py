"""The bounded buffer between what groups produce and what one client reads.

Producers (`attempt.py`, `dispatch.py`) push without waiting; the consumer (`generate.py`) takes one serialised message at a time. While the
client lags, tokens of a choice gather in one chunk; past the bound the request fails, and nobody else notices.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from common.errors import OverloadedError, ServingError
from common.proto import router_pb2, types_pb2


class _Chunk:
    __slots__ = ("first", "index", "logprobs", "token_ids")

    def __init__(self, index: int, first: int):
        self.index = index
        self.first = first
        self.token_ids: list[int] = []
        self.logprobs: list[types_pb2.TokenLogprobs] = []


class ClientStream:
    """Messages of one `Generate` call. `limit_tokens`: tokens that may wait. `on_failure` is called once if the stream fails.
    `route`: the first decision that led to a place, for whoever sends the first message."""

    def __init__(self, request_id: str, limit_tokens: int):
        self.error: ServingError | None = None
        self.on_failure: Callable[[], None] | None = None
        self.route: router_pb2.RouteDecision | None = None
        self.finish_reason = types_pb2.FINISH_REASON_UNSPECIFIED  # of the choice that ended last
        self._request_id = request_id
        self._limit_tokens = limit_tokens
        self._waiting: deque[_Chunk | router_pb2.GenerateComplete] = deque()
        self._open: dict[int, _Chunk] = {}  # the chunk of each choice that still waits
        self._tokens = 0
        self._closed = False
        self._wake: asyncio.Future[None] | None = None

    def push_tokens(self, index: int, first: int, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] = ()) -> None:
        """`first`: index of `token_ids[0]` among the tokens of choice `index`; contiguous with what came before."""
        if self._closed:
            return
        chunk = self._open.get(index)
        if chunk is None:
            chunk = self._open[index] = _Chunk(index, first)
            self._waiting.append(chunk)
        chunk.token_ids.extend(token_ids)
        if logprobs:
            chunk.logprobs.extend(logprobs)
        self._tokens += len(token_ids)
        if self._tokens > self._limit_tokens:
            self.fail(OverloadedError(f"the client lags {self._tokens} tokens behind, at most {self._limit_tokens} are kept"))
        self._notify()

    def push_complete(self, complete: router_pb2.GenerateComplete) -> None:
        if not self._closed:
            self.finish_reason = complete.finish_reason.reason
            self._waiting.append(complete)
            self._notify()

    def close(self) -> None:
        """No more will come; what waits is still sent."""
        self._closed = True
        self._notify()

    def fail(self, error: ServingError) -> None:
        """What waits is dropped and the call ends with the error. Only the first one counts."""
        if self.error is None and not self._closed:
            self.error = error
            self._closed = True
            self._waiting.clear()
            self._open.clear()
            self._notify()
            if self.on_failure is not None:
                self.on_failure()

    async def take(self) -> bytes | None:
        """The next message, serialised; None at the end.

        Raises: ServingError given to `fail`
        """
        while not self._waiting:
            if self.error is not None:
                raise self.error
            if self._closed:
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        item = self._waiting.popleft()
        if isinstance(item, _Chunk):
            del self._open[item.index]
            self._tokens -= len(item.token_ids)
            return self._serialize(item)
        return router_pb2.GenerateResponse(request_id=self._request_id, complete=item).SerializeToString()

    def _serialize(self, chunk: _Chunk) -> bytes:
        message = router_pb2.GenerateResponse(request_id=self._request_id)
        body = message.chunk
        body.index = chunk.index
        body.first_token_index = chunk.first
        body.token_ids.extend(chunk.token_ids)
        if chunk.logprobs:
            body.logprobs.extend(chunk.logprobs)
        return message.SerializeToString()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
