"""Tells decode groups which groups are known dead, so that blocks held for a writer on another host are free again.

A decode group can look at the processes of its own host only. The controller learns of all deaths, and repeats each until every decode
group has heard it. Owned by `controller.py`, on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

import grpc

from common.auth import sign
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.wire import Wire

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 2.0
KEPT = 1024


class DeathNews:
    """The news frees memory, so it is signed with the cluster's key."""

    def __init__(self, wire: Wire, dead: Iterable[int] = ()):
        self._wire = wire
        self._dead: deque[int] = deque(dead, maxlen=KEPT)
        self._count = len(self._dead)  # of all that ever died
        self._heard: dict[int, int] = {}  # decode incarnation -> how many of them it knows
        self._calls: dict[int, asyncio.Task] = {}

    def died(self, incarnation: int) -> None:
        """Every process of that group is known to be gone."""
        self._dead.append(incarnation)
        self._count += 1

    def tell(self, groups: Iterable[types_pb2.GroupDescription]) -> None:
        """Starts a call to each decode group that has not heard everything; call again and again. `groups`: all that run."""
        running = {group.incarnation: group for group in groups if group.role == types_pb2.ROLE_DECODE}
        self._heard = {incarnation: count for incarnation, count in self._heard.items() if incarnation in running}
        for incarnation, group in running.items():
            if self._heard.get(incarnation, 0) < self._count and incarnation not in self._calls:
                self._calls[incarnation] = asyncio.get_running_loop().create_task(self._tell(group))

    async def close(self) -> None:
        for task in list(self._calls.values()):
            task.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    async def _tell(self, group: types_pb2.GroupDescription) -> None:
        count = self._count
        missing = min(count - self._heard.get(group.incarnation, 0), len(self._dead))
        request = worker_pb2.WritersDiedRequest(incarnations=list(self._dead)[len(self._dead) - missing :])
        sign(request, self._wire.keys)
        try:
            async with self._wire.channel(group.address) as channel:
                await self._wire.stub(worker_pb2_grpc.DecodeGroupStub(channel)).WritersDied(request, timeout=CALL_TIMEOUT_S)
            self._heard[group.incarnation] = count
        except grpc.aio.AioRpcError as exc:
            logger.info("decode group %s has not heard of %d deaths yet: %s", group.group, missing, exc.code().name)
        finally:
            del self._calls[group.incarnation]
