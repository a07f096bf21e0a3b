"""Runs work for a client until it is done or the client has left, whichever is first."""

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
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        done: set[asyncio.Future[Any]] = set()
        while not done:
            done, _ = await asyncio.wait((task, watch), timeout=poll_s if has_stalled else None, return_when=asyncio.FIRST_COMPLETED)
            if has_stalled is not None and not done and has_stalled():
                break
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
