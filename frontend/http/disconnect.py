"""Runs work for a client until it is done or the client has left, whichever is first.

The work runs in the caller's own task: one of its own would cost each request several turns of the event loop, and in each of them
everything else that is ready runs first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def run_until_disconnect(
    receive: Receive,
    work: Coroutine[Any, Any, _T],
    *,
    has_stalled: Callable[[], bool] | None = None,
    poll_s: float = 5.0,
) -> _T:
    """The result of `work`. Its request's body must have been read, so that `receive` only waits for the disconnect.

    `has_stalled` is asked every `poll_s`; a client that has stalled counts as gone.
    Raises: what `work` raises; ClientGone, with `work` cancelled and ended, if the client left first.
    """
    task = asyncio.current_task()
    assert task is not None
    watch = _Watch(task, receive, has_stalled, poll_s)
    try:
        return await work
    finally:
        if watch.end() and task.uncancel() == 0:  # else the task is cancelled by others too
            raise ClientGone


class _Watch:
    """Cancels `task` once the client has left or stalled, until `end`."""

    def __init__(self, task: asyncio.Task[Any], receive: Receive, has_stalled: Callable[[], bool] | None, poll_s: float):
        self._task = task
        self._has_stalled = has_stalled
        self._poll_s = poll_s
        self._is_over = self._has_left = False
        self._poll: asyncio.TimerHandle | None = None
        self._waiting = asyncio.ensure_future(_wait_for_disconnect(receive))
        self._waiting.add_done_callback(lambda _: self._leave())
        self._ask_again()

    def end(self) -> bool:
        """Whether it has cancelled the task; from now on it does not."""
        self._is_over = True
        self._waiting.cancel()
        if self._poll is not None:
            self._poll.cancel()
        return self._has_left

    def _leave(self) -> None:
        if not self._is_over and not self._task.cancelling():  # whoever is cancelled cleans up, and is not to be disturbed
            self._has_left = True
            self._task.cancel()

    def _ask_again(self) -> None:
        if self._has_stalled is not None:
            self._poll = self._task.get_loop().call_later(self._poll_s, self._ask, self._has_stalled)

    def _ask(self, has_stalled: Callable[[], bool]) -> None:
        if has_stalled():
            self._leave()
        else:
            self._ask_again()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
