"""While pools are replaced, groups of two KV versions stand side by side: they never meet, and no stream changes its model."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from common.proto import types_pb2
from tests.support.fake_groups import FakeDecodeGroup, FakeGroup, FakePrefillGroup, tokens_of
from tests.support.hand_directory import HandDirectory
from tests.support.router_bed import bed, request_of, until

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


async def of_version(version: str, *groups: FakeGroup) -> list[FakeGroup]:
    for group in groups:
        group.description.kv_version = version
        await group.start()
    return list(groups)


async def two_pairs() -> tuple[list[FakeGroup], list[FakeGroup]]:
    old = await of_version("v1", FakePrefillGroup(group="p1"), FakeDecodeGroup(group="d1"))
    new = await of_version("v2", FakePrefillGroup(group="p2"), FakeDecodeGroup(group="d2"))
    return old, new


async def test_each_request_stays_within_one_version():
    (p1, d1), (p2, d2) = old, new = await two_pairs()
    directory = HandDirectory()
    directory.show(*old, *new)
    async with bed(*old, *new, directory=directory) as router:
        await router.until_ready(4)
        answers = await asyncio.gather(*(router.generate(request_of((i,), max_tokens=6)) for i in range(60)))
        assert all(answer.tokens[0] == tokens_of((i,), 6) for i, answer in enumerate(answers))
        assert p1.prefilled
        assert p2.prefilled
        assert {w.internal_id for w in p1.prefilled} == set(d1.calls)
        assert {w.internal_id for w in p2.prefilled} == set(d2.calls)


async def test_a_newer_prefill_group_gets_nothing_until_a_decode_group_of_its_version_is_there():
    (p1, d1), (p2, d2) = old, new = await two_pairs()
    directory = HandDirectory()
    directory.show(p1, d1, p2)
    async with bed(*old, *new, directory=directory) as router:
        await router.until_ready(3)
        await asyncio.gather(*(router.generate(request_of((i,))) for i in range(20)))
        assert len(p1.prefilled) == 20
        assert not p2.prefilled
        directory.show(p1, d1, p2, d2)
        await router.until_ready(4)
        directory.show(p2, d2)
        await until(lambda: len(router.router.pools.set.all()) == 2)
        await router.generate(request_of((99,)))
        assert len(p2.prefilled) == 1


async def test_once_the_older_groups_are_gone_the_pool_bears_its_name_alone():
    old, new = await two_pairs()
    directory = HandDirectory()
    directory.show(*old)
    async with bed(*old, *new, directory=directory) as router:
        await router.until_ready(2)
        pools = router.router.pools.set
        for shown, hidden in ((new, old), (old, new), (new, old)):
            directory.show(*shown, *hidden)
            await router.until_ready(4)
            assert len(pools.prefill) == len(pools.decode) == 2
            directory.show(*shown)
            await until(lambda: set(pools.prefill) == {"prefill"} and set(pools.decode) == {"decode"})
            await router.until_ready(2)
            assert pools.prefill["prefill"].spec.kv_version == shown[0].description.kv_version
            assert pools.prefill["prefill"].spec.name == "prefill"
            assert (await router.generate(request_of((7,)))).tokens[0] == tokens_of((7,), 8)


async def test_a_stream_whose_group_dies_is_not_continued_by_another_model():
    (p1, d1), (_, d2) = old, new = await two_pairs()
    d1.step_ms = 20.0
    directory = HandDirectory()
    directory.show(p1, d1)
    async with bed(*old, *new, directory=directory) as router:
        await router.until_ready(2)
        stream = asyncio.create_task(router.generate(request_of((5,), max_tokens=500)))
        await until(lambda: len(d1.running) == 1)
        directory.show(*old, *new)
        await router.until_ready(4)
        await d1.kill()
        with pytest.raises(grpc.RpcError) as caught:
            await stream
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "tokens_sent" in caught.value.details()
        assert not d2.calls
