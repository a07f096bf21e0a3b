"""A node of a real Ray cluster is drained: its groups end, others come elsewhere and none comes back to it."""

from __future__ import annotations

import grpc
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from cluster.nodes import find_nodes
from common.proto import control_pb2
from tests.support.fake_rank import fake_rank_actor
from tests.support.pool_cluster import pool_cluster, pools_config

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
LABELS = {"pool": "decode"}


@pytest.fixture
def ray_nodes(monkeypatch):
    """A head and two nodes that decode groups ask for."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1, labels=LABELS) for _ in range(2)]
        ray.init(address=cluster.address, namespace="tests")
        yield [node.node_id for node in nodes]
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_groups_of_a_drained_node_end_and_come_back_on_another(ray_nodes, checkpoint):
    pools = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode", "node_labels": LABELS}]
    config = pools_config(checkpoint, pools=pools, cluster={"device": "cpu", "place_timeout_s": 120})
    with pool_cluster("leaves", config, fake_rank_actor()) as cluster:
        cluster.until_ready(prefill=1, decode=1)
        (before,) = [name for name in cluster.listed() if name.startswith("decode")]
        here = node_of(before)
        assert drain(cluster, here) == [before]
        cluster.until_ready(prefill=1, decode=1)
        (after,) = [name for name in cluster.listed() if name.startswith("decode")]
        assert after != before
        assert node_of(after) != here
        assert drain(cluster, here) == [], "and asking again is no error, also when Ray has ended there"
        cluster.until(lambda _: not find_nodes(here)[0].is_alive)
        for name, says in (("10.9.9.9", "no pool, group or node '10.9.9.9'"), (find_nodes(here)[0].address, "is the head's")):
            with pytest.raises(grpc.RpcError, match=says):
                drain(cluster, name)
        cluster.until_ready(prefill=1, decode=1)


def node_of(group: str) -> str:
    (entry,) = [entry for entry in placement_group_table().values() if entry["name"].endswith(f"/{group}")]
    return entry["bundles_to_node_id"][0]


def drain(cluster, target: str) -> list[str]:
    return list(cluster.stub.Drain(control_pb2.DrainRequest(target=target), timeout=30).groups)
