"""Which groups exist: from the controller's directory, or from a fixed list of addresses.

A directory is an endless stream of whole sets. It never judges health; `groups.py` does. Read by `pools.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import grpc

from common.proto import control_pb2, control_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from common.wire import PLAIN, Channels, Wire

logger = logging.getLogger(__name__)

RETRY_S = 0.3
DESCRIBE_EVERY_S = 0.5
DESCRIBE_TIMEOUT_S = 2.0
SILENCE_S = 5.0  # the controller sends at least one set a second; after this long without one the stream is opened anew
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a replaced group at the same address gets a connection of its own
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
)


class Directory(Protocol):
    def watch(self) -> AsyncGenerator[control_pb2.GroupSet, None]:
        """Whole sets, the first as soon as one is known, then after each change and at least every few seconds. Never ends by itself."""
        ...


class ControllerDirectory:
    """The controller's `Watch` stream. While the controller is away nothing new comes, and readers keep what they have."""

    def __init__(self, address: str, router_id: str = "", metrics_address: str = "", wire: Wire = PLAIN):
        """`router_id` and `metrics_address` are told to the controller, for scrapers to find this router."""
        self._address = address
        self._channels = Channels(wire, CHANNEL_OPTIONS)
        self._wire = wire
        self._request = control_pb2.WatchRequest(router_id=router_id, metrics_address=metrics_address)

    async def watch(self) -> AsyncGenerator[control_pb2.GroupSet, None]:
        away = False
        try:
            while True:
                stub = self._wire.stub(control_pb2_grpc.DirectoryStub(self._channels.get(self._address)))
                call = stub.Watch(self._request)
                try:
                    while True:
                        async with asyncio.timeout(SILENCE_S):
                            group_set = await call.read()
                        if group_set is grpc.aio.EOF:
                            break
                        away = False
                        yield group_set
                except (grpc.RpcError, TimeoutError) as exc:
                    if not away:
                        reason = exc.code().name if isinstance(exc, grpc.RpcError) else "silent"
                        logger.warning("controller %s is away, keeping the last set: %s", self._address, reason)
                    away = True
                finally:
                    call.cancel()
                await asyncio.sleep(RETRY_S)
        finally:
            await self._channels.close()


class StaticDirectory:
    """Leaders at fixed addresses, asked to describe themselves again and again. An address is asked for both roles until one answers."""

    def __init__(self, addresses: Sequence[str]):
        self._addresses = tuple(addresses)

    async def watch(self) -> AsyncGenerator[control_pb2.GroupSet, None]:
        channels = [grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for address in self._addresses]
        known: list[types_pb2.GroupDescription | None] = [None] * len(channels)
        version = 0
        try:
            while True:
                answers = await asyncio.gather(*(_describe(channel) for channel in channels))
                known = [new or old for new, old in zip(answers, known, strict=True)]
                version += 1
                yield control_pb2.GroupSet(version=version, groups=[group for group in known if group is not None])
                await asyncio.sleep(DESCRIBE_EVERY_S)
        finally:
            for channel in channels:
                await channel.close()


async def _describe(channel: grpc.aio.Channel) -> types_pb2.GroupDescription | None:
    for stub in (worker_pb2_grpc.PrefillGroupStub(channel), worker_pb2_grpc.DecodeGroupStub(channel)):
        try:
            return await stub.Describe(worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)
        except grpc.RpcError as exc:
            if exc.code() != grpc.StatusCode.UNIMPLEMENTED:
                return None
    return None
