"""One thing that several wait for: that something about the groups has changed. Lives on the controller's event loop."""

from __future__ import annotations

import asyncio
import contextlib


class Changes:
    """`version` grows with each change."""

    def __init__(self) -> None:
        self.version = 0
        self._event = asyncio.Event()

    def note(self) -> None:
        """Wakes everybody who waits."""
        self.version += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Until the version is another than `seen`, at most for so long."""
        if self.version == seen:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), timeout_s)
