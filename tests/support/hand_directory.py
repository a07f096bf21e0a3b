"""A directory whose sets a test sends by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from common.proto import control_pb2
from tests.support.fake_groups import FakeGroup


class HandDirectory:
    def __init__(self) -> None:
        self._sets: asyncio.Queue[control_pb2.GroupSet] = asyncio.Queue()

    def show(self, *groups: FakeGroup, **fields) -> None:
        """From now on these are the groups there are."""
        self._sets.put_nowait(control_pb2.GroupSet(groups=[group.description for group in groups], **fields))

    async def watch(self) -> AsyncGenerator[control_pb2.GroupSet, None]:
        while True:
            yield await self._sets.get()
