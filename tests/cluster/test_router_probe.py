"""The probe of a router's pod: the same answers as grpc.health, with what a router waits for in words."""

from __future__ import annotations

import asyncio

import pytest

from cluster.router_probe import probe_router
from common.config import parse_config
from common.errors import ServingError, WorkerLost
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup
from tests.support.router_bed import bed, until


def config_of(address: str):
    pools = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
    return parse_config({"model": {"path": "/m"}, "pools": pools, "router": {"listen": f"0.0.0.0:{address.rpartition(':')[2]}"}})


async def ask(address: str, *, wants_ready: bool) -> str:
    return await asyncio.to_thread(probe_router, config_of(address), wants_ready=wants_ready)


async def test_a_router_with_a_pair_is_alive_and_ready():
    async with bed(FakePrefillGroup(), FakeDecodeGroup()) as router:

        async def is_ready() -> bool:
            try:
                return await ask(router.address, wants_ready=True) == "serving"
            except WorkerLost:
                return False

        await until(is_ready)
        assert await ask(router.address, wants_ready=False) == "serving"


async def test_a_router_without_a_decode_group_is_alive_and_says_what_it_waits_for():
    decode = FakeDecodeGroup()
    async with bed(FakePrefillGroup(), decode) as router:
        await decode.kill()

        async def waits() -> bool:
            try:
                await ask(router.address, wants_ready=True)
            except WorkerLost as exc:
                return exc.message == "the router is not ready: waits for a group of decode"
            return False

        await until(waits)
        assert await ask(router.address, wants_ready=False) == "serving"


async def test_no_router_is_a_failure_in_one_line():
    with pytest.raises(ServingError):
        await ask("127.0.0.1:1", wants_ready=False)
