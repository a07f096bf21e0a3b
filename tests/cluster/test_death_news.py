"""News of dead groups reaches every decode group that runs, whenever it can be reached, each death once."""

from __future__ import annotations

import asyncio

import grpc

from cluster.death_news import DeathNews
from common.auth import verify
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.wire import Wire
from tests.support.router_bed import until

KEY = b"key of a cluster under test"


class Listener(worker_pb2_grpc.DecodeGroupServicer):
    """A decode group that only listens to the news."""

    def __init__(self, incarnation: int):
        self.heard: list[int] = []
        self.description = types_pb2.GroupDescription(group=f"d{incarnation}", role=types_pb2.ROLE_DECODE, incarnation=incarnation)
        self.server: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_DecodeGroupServicer_to_server(self, self.server)
        self.description.address = f"127.0.0.1:{self.server.add_insecure_port(address)}"
        await self.server.start()

    async def WritersDied(self, request, context):
        verify(request, KEY)
        self.heard += request.incarnations
        return worker_pb2.WritersDiedReply()


async def test_every_decode_group_hears_of_each_death_also_if_it_was_away_or_starts_later():
    news, first, second, late = DeathNews(Wire(key=KEY)), Listener(1), Listener(2), Listener(3)
    prefill = types_pb2.GroupDescription(group="p", role=types_pb2.ROLE_PREFILL, incarnation=9, address="127.0.0.1:1")
    await first.start()
    await second.start()
    groups = [first.description, second.description, prefill]
    address = second.description.address
    await second.server.stop(0)

    def told(*listeners: Listener):
        def check() -> bool:
            news.tell(groups)
            return all(sorted(listener.heard) == [70, 71] for listener in listeners)

        return check

    news.died(70)
    await asyncio.sleep(0)
    news.tell(groups)
    news.died(71)
    await until(told(first), 10.0)
    assert second.heard == []
    await second.start(address)
    await until(told(first, second), 10.0)
    await late.start()
    groups.append(late.description)
    await until(told(first, second, late), 10.0)
    for _ in range(5):
        news.tell(groups)
        await asyncio.sleep(0.02)
    assert [len(listener.heard) for listener in (first, second, late)] == [2, 2, 2]
    await news.close()
    for listener in (first, second, late):
        await listener.server.stop(0)
