"""The controller on a real Ray: it adopts what lives, replaces what dies, keeps the budget, drains, and leaves nothing behind."""

from __future__ import annotations

import signal

import grpc
import pytest
import ray

from common.errors import ConfigError
from common.proto import control_pb2
from tests.support.fake_rank import fake_rank_actor
from tests.support.pool_cluster import PoolCluster, connected_ray, kill, pool_cluster, pools_config, until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _ray(tmp_path_factory):
    with connected_ray(tmp_path_factory.mktemp("ray")) as node:
        yield node


@pytest.fixture
def config(checkpoint):
    return pools_config(checkpoint)


def incarnations(cluster: PoolCluster) -> dict[str, int]:
    return {name: group.incarnation for name, group in cluster.listed().items()}


def test_a_controller_that_is_killed_comes_back_at_its_address_and_adopts_its_groups(config):
    with pool_cluster("adopt", config) as cluster:
        cluster.until_ready(prefill=1, decode=1)
        cluster.scale("prefill", 2)
        cluster.until_ready(prefill=2, decode=1)
        before, pids = incarnations(cluster), ray.get(cluster.handle.processes.remote())
        for _ in range(3):
            kill(cluster.pid())
            cluster.until_ready(prefill=2, decode=1)
            assert incarnations(cluster) == before
            assert sorted(ray.get(cluster.handle.processes.remote())) == sorted(pids)
        assert len(cluster.actors()) == 3 + 1
        assert len(cluster.placements()) == 3


def test_a_group_that_died_while_the_controller_was_away_is_replaced_and_its_rest_removed(checkpoint):
    pools = [{"name": "prefill", "role": "prefill", "layout": {"tp": 2}}, {"name": "decode", "role": "decode"}]
    with pool_cluster("halves", pools_config(checkpoint, pools=pools)) as cluster:
        cluster.until_ready(prefill=1, decode=1)
        before = cluster.listed()
        half = next(group for group in before.values() if group.pool == "prefill")
        kill(cluster.pid())
        kill(half.ranks[1].pid)
        cluster.until(lambda s: {g.group for g in s.groups if g.state == "ready"} ^ set(before) and len(s.groups) == 2)
        cluster.until_ready(prefill=1, decode=1)
        after = cluster.listed()
        assert half.group not in after
        assert set(before) - {half.group} <= set(after)
        until_gone(list(half.ranks))
        assert len(cluster.placements()) == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_a_rank_that_dies_or_hangs_takes_its_group_and_another_one_comes(config, how):
    with pool_cluster("dies", config) as cluster:
        cluster.until_ready(prefill=1, decode=1)
        victim = next(group for group in cluster.listed().values() if group.pool == "decode")
        kill(victim.ranks[0].pid, how)
        cluster.until(lambda s: all(g.group != victim.group for g in s.groups))
        until_gone(list(victim.ranks))
        cluster.until_ready(prefill=1, decode=1)
        call = cluster.stub.Watch(control_pb2.WatchRequest())
        assert victim.incarnation in next(call).dead_incarnations
        call.cancel()


def test_shutdown_leaves_no_actor_no_placement_group_and_no_process(config):
    with pool_cluster("leaves", config) as cluster:
        cluster.until_ready(prefill=1, decode=1)
        ranks = [rank for group in cluster.listed().values() for rank in group.ranks]
        ray.get(cluster.handle.shutdown.remote())
        assert cluster.actors() == {"tandem-controller"}
        assert cluster.placements() == set()
        until_gone(ranks, 10)


def test_shutdown_in_the_middle_of_a_start_leaves_nothing_either(config):
    with pool_cluster("midway", config, fake_rank_actor(start_s=60)) as cluster:
        cluster.until(lambda s: sum(g.state == "loading" and g.detail == "fakes its weights" for g in s.groups) == 2)
        ray.get(cluster.handle.shutdown.remote())
        assert cluster.actors() == {"tandem-controller"}
        assert cluster.placements() == set()


def test_a_bundle_that_no_node_can_hold_fails_in_time_naming_bundle_and_free_resources(checkpoint):
    labels = {"pool": "nowhere"}
    pools = [{"name": "prefill", "role": "prefill", "layout": {"tp": 4}, "node_labels": labels}, {"name": "decode", "role": "decode"}]
    config = pools_config(checkpoint, pools=pools, cluster={"device": "cpu", "place_timeout_s": 2})
    with pool_cluster("big", config) as cluster:
        waiting = cluster.until(lambda s: any(g.state == "waiting for resources" and g.detail for g in s.groups))
        assert "4 x {CPU: 0.1} together" in next(g.detail for g in waiting.groups if g.pool == "prefill")
        error = cluster.until(lambda s: s.pools[0].error, 60).pools[0].error
        assert "4 x {CPU: 0.1} together" in error
        assert "nowhere" in error
        assert "free by node: {CPU:" in error
        cluster.until(lambda s: s.pools[1].ready == 1)


def test_an_error_of_a_rank_is_shown_and_the_start_repeated_with_pauses(config):
    with pool_cluster("fails", config, fake_rank_actor(fail="shard 3 of 7 is missing", slow_pool="decode")) as cluster:
        assert "shard 3 of 7 is missing" in cluster.until(lambda s: s.pools[1].error).pools[1].error
        cluster.until(lambda s: s.pools[0].ready == 1)
        failed = ray.get(cluster.handle.status.remote())
        assert any(row["state"] == "failed" and row["pool"] == "decode" for row in failed)


def test_scaling_keeps_the_budget_also_while_roles_move(checkpoint):
    """Prefill gives two GPUs to decode; at no moment are more than four held."""
    pools = [
        {"name": "prefill", "role": "prefill", "replicas": {"min": 1, "max": 3}},
        {"name": "decode", "role": "decode", "replicas": {"min": 1, "max": 3}},
    ]
    config = pools_config(checkpoint, pools=pools, autoscale={"mode": "off", "gpu_budget": 4})
    with pool_cluster("budget", config) as cluster:
        cluster.scale("prefill", 3)
        cluster.until_ready(prefill=3, decode=1)
        with pytest.raises(grpc.RpcError) as caught:
            cluster.scale("decode", 3)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "gpu_budget is 4" in caught.value.details()
        cluster.scale("prefill", 1)
        cluster.scale("decode", 3)
        held = []

        def moved(status: control_pb2.StatusReply) -> bool:
            held.append(status.gpus_held)
            return [pool.ready for pool in status.pools] == [1, 3]

        cluster.until(moved)
        assert max(held) <= 4


@pytest.mark.parametrize(
    ("pool", "replicas", "code"),
    [("nobody", 1, grpc.StatusCode.FAILED_PRECONDITION), ("prefill", 4, grpc.StatusCode.INVALID_ARGUMENT)],
)
def test_scaling_to_what_can_not_be_is_refused_with_the_reason(config, pool, replicas, code):
    with pool_cluster("refuses", config) as cluster:
        with pytest.raises(grpc.RpcError) as caught:
            cluster.scale(pool, replicas)
        assert caught.value.code() is code
        assert pool in caught.value.details()


def test_a_pin_outlives_the_controller_and_is_given_back(config):
    with pool_cluster("pins", config) as cluster:
        cluster.scale("prefill", 2)
        cluster.until_ready(prefill=2)
        kill(cluster.pid())
        cluster.until_ready(prefill=2)
        assert cluster.status().pools[0].pinned
        cluster.stub.Scale(control_pb2.ScaleRequest(pool="prefill", automatic=True))
        assert not cluster.status().pools[0].pinned
        cluster.scale("prefill", 0)
        cluster.until_ready(prefill=0, decode=1)


def test_a_config_the_model_can_not_serve_is_refused_before_anything_starts(checkpoint):
    pools = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
    config = pools_config(checkpoint, pools=pools, model={"path": str(checkpoint), "max_model_len": 10**7})
    with pytest.raises(ConfigError, match="max_model_len"), pool_cluster("bad", config):
        pass
