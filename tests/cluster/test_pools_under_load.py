"""Drain, rolling replacement, SIGTERM and scaling while requests run: a real router, a real controller and Ray, fake groups."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
from collections import Counter
from contextlib import asynccontextmanager

import grpc
import pytest

from common.proto import control_pb2
from tests.support.fake_groups import tokens_of
from tests.support.fake_rank import fake_rank_actor
from tests.support.pool_bed import pool_bed
from tests.support.pool_cluster import PoolCluster, connected_ray, kill, pool_cluster, pools_config
from tests.support.router_bed import Bed, request_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _ray(tmp_path_factory):
    with connected_ray(tmp_path_factory.mktemp("ray")) as node:
        yield node


class Load:
    """Requests that follow one another on `width` lanes; each answer is checked token by token."""

    def __init__(self, router: Bed, max_tokens: int):
        self.endings: Counter[str] = Counter()
        self._router = router
        self._max_tokens = max_tokens
        self._numbers = itertools.count()
        self._goes_on = True

    async def lane(self) -> None:
        while self._goes_on:
            prompt = (next(self._numbers), 7)
            try:
                answer = await self._router.generate(request_of(prompt, max_tokens=self._max_tokens), timeout=60)
                assert answer.tokens[0] == tokens_of(prompt, self._max_tokens)
                self.endings["ok"] += 1
            except grpc.RpcError as exc:
                self.endings[f"{exc.code().name}: {exc.details()}"] += 1

    def stop(self) -> None:
        self._goes_on = False


@asynccontextmanager
async def load_on(router: Bed, width: int = 6, max_tokens: int = 30):
    load = Load(router, max_tokens)
    lanes = [asyncio.create_task(load.lane()) for _ in range(width)]
    try:
        yield load
    finally:
        load.stop()
        await asyncio.gather(*lanes)


async def settled(cluster: PoolCluster, holds, timeout_s: float = 90) -> control_pb2.StatusReply:
    return await asyncio.to_thread(cluster.until, holds, timeout_s)


def ready(**groups: int):
    def holds(status: control_pb2.StatusReply) -> bool:
        pools = {pool.pool: pool for pool in status.pools}
        return all(pools[p].ready == n and not pools[p].starting and not pools[p].draining for p, n in groups.items())

    return holds


async def test_draining_a_group_cuts_no_stream_and_another_takes_its_place(checkpoint):
    with pool_cluster("drains", pools_config(checkpoint)) as cluster:
        cluster.scale("decode", 2)
        cluster.until_ready(prefill=1, decode=2)
        async with pool_bed(cluster) as router:
            await router.until_ready(3)
            async with load_on(router) as load:
                for pool in ("decode", "prefill"):
                    group = next(g for g in (await asyncio.to_thread(cluster.listed)).values() if g.pool == pool)
                    await asyncio.to_thread(cluster.drain, group.group)
                    await settled(cluster, lambda s, group=group: all(g.group != group.group for g in s.groups))
                    await settled(cluster, ready(prefill=1, decode=2))
                victim = next(g for g in (await asyncio.to_thread(cluster.listed)).values() if g.pool == "decode")
                kill(victim.ranks[0].pid, signal.SIGTERM)
                status = await settled(cluster, lambda s: any(g.group == victim.group and "SIGTERM" in g.detail for g in s.groups))
                assert victim.group not in await asyncio.to_thread(cluster.listed), status
                await settled(cluster, lambda s: all(g.group != victim.group for g in s.groups))
                await settled(cluster, ready(prefill=1, decode=2))
            assert set(load.endings) == {"ok"}, load.endings
            assert load.endings["ok"] > 20


async def test_what_does_not_finish_in_the_grace_time_goes_on_elsewhere_exactly(checkpoint):
    config = pools_config(checkpoint, cluster={"device": "cpu", "drain_grace_s": 0.5})
    with pool_cluster("moves", config, fake_rank_actor(step_ms=30)) as cluster:
        cluster.until_ready(prefill=1, decode=1)
        async with pool_bed(cluster) as router:
            await router.until_ready(2)
            streams = [asyncio.create_task(router.generate(request_of((i,), max_tokens=300), timeout=120)) for i in range(6)]
            first = next(g for g in (await asyncio.to_thread(cluster.listed)).values() if g.pool == "decode")
            await settled(cluster, lambda s: sum(g.load.running for g in s.groups if g.pool == "decode") == 6)
            await asyncio.to_thread(cluster.scale, "decode", 2)
            await settled(cluster, ready(decode=2))
            await asyncio.to_thread(cluster.drain, first.group, now=True)
            answers = await asyncio.gather(*streams)
            assert [answer.tokens[0] for answer in answers] == [tokens_of((i,), 300) for i in range(6)]
            assert {answer.completes[0].route.attempts for answer in answers} == {2}


@pytest.mark.parametrize("weights", ["same", "other"])
async def test_a_rollout_under_load_replaces_every_group_and_loses_nothing(checkpoint, tmp_path, weights):
    """Another setting, or another checkpoint whose KV must not meet the older one's."""
    config = pools_config(checkpoint, autoscale={"mode": "off", "gpu_budget": 5})
    with pool_cluster("rolls", config) as cluster:
        cluster.scale("decode", 2)
        cluster.until_ready(prefill=1, decode=2)
        before = cluster.listed()
        model = {"path": str(checkpoint), "max_model_len": 1024}
        if weights == "other":
            shutil.copytree(checkpoint, tmp_path / "newer")
            model["path"] = str(tmp_path / "newer")
        newer = pools_config(checkpoint, model=model, autoscale={"mode": "off", "gpu_budget": 5})
        async with pool_bed(cluster) as router:
            await router.until_ready(3)
            async with load_on(router) as load:
                assert set(await asyncio.to_thread(cluster.rollout, newer)) == set(before)
                held = []

                def replaced(status: control_pb2.StatusReply) -> bool:
                    held.append(status.gpus_held)
                    return not any(g.stale for g in status.groups) and ready(prefill=1, decode=2)(status)

                await settled(cluster, replaced, 150)
            assert set(load.endings) == {"ok"}, load.endings
            assert max(held) <= 5
            after = cluster.listed()
            assert not set(before) & set(after)
            versions = {g.kv_version for g in after.values()}
            assert len(versions) == 1
            assert (versions == {g.kv_version for g in before.values()}) == (weights == "same")


async def test_pools_wake_on_the_first_request_grow_with_load_and_sleep_again(checkpoint):
    pools = [
        {"name": "prefill", "role": "prefill", "replicas": {"min": 0, "max": 2, "down_delay_s": 3, "target_queue_wait_s": 0.2}},
        {"name": "decode", "role": "decode", "max_batch": 8, "replicas": {"min": 0, "max": 2, "down_delay_s": 3}},
    ]
    config = pools_config(checkpoint, pools=pools, autoscale={"interval_s": 0.5, "gpu_budget": 4})
    with pool_cluster("wakes", config, fake_rank_actor(step_ms=20)) as cluster:
        assert cluster.status().gpus_held == 0
        async with pool_bed(cluster) as router:
            assert (await router.generate(request_of((1,)), timeout=60)).tokens[0] == tokens_of((1,), 8)
            async with load_on(router, width=14, max_tokens=50) as load:
                await settled(cluster, lambda s: s.pools[1].ready == 2)
            assert set(load.endings) == {"ok"}, load.endings
            status = await settled(cluster, lambda s: s.gpus_held == 0)
        steps = [(c.pool, c.before, c.after) for c in status.changes]
        assert ("decode", 0, 1) in steps
        assert ("decode", 1, 2) in steps
        assert all(c.reason for c in status.changes)


async def test_a_dry_run_says_what_it_would_do_and_does_nothing(checkpoint):
    pools = [
        {"name": "prefill", "role": "prefill"},
        {"name": "decode", "role": "decode", "max_batch": 4, "replicas": {"min": 1, "max": 3}},
    ]
    config = pools_config(checkpoint, pools=pools, autoscale={"mode": "dry_run", "interval_s": 0.3})
    with pool_cluster("dry", config, fake_rank_actor(step_ms=20)) as cluster:
        cluster.until_ready(prefill=1, decode=1)
        async with pool_bed(cluster) as router:
            await router.until_ready(2)
            async with load_on(router, width=8, max_tokens=40):
                status = await settled(cluster, lambda s: s.changes)
        assert status.changes[0].dry_run
        assert (status.changes[0].pool, status.changes[0].before) == ("decode", 1)
        assert [pool.wanted for pool in status.pools] == [1, 1]
        assert len(cluster.listed()) == 2
