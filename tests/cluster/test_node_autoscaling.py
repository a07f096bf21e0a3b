"""A pool's groups are demand that Ray's own autoscaler adds nodes for, and takes them away for when the pool has shrunk again.

With Ray's fake provider: nodes are processes of this machine, the autoscaler (v2) and its decisions are real.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray

from cluster.local_ray import connect, stop_local_ray
from cluster.state import spawn_held
from tests.support.pool_cluster import SETTLE_S, pool_cluster, pools_config

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
PORT = 6379  # the fake provider knows no other
HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # the id that Ray's fake provider gives its head


def autoscaling_config() -> dict:
    node = {"resources": {"CPU": 1}, "labels": {"pool": "decode"}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    head = {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0}
    provider = {
        "type": "external", "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "use_node_id_as_ip": True, "disable_node_updaters": True, "disable_launch_config_check": True, "launch_multiple": True,
        "head_node_id": HEAD,
    }  # fmt: skip
    return {
        "cluster_name": "pools", "max_workers": 2, "idle_timeout_minutes": 0.05, "upscaling_speed": 1.0, "docker": {}, "auth": {},
        "provider": provider, "available_node_types": {"ray.head.default": head, "decode": node}, "head_node_type": "ray.head.default",
        "file_mounts": {}, "cluster_synced_files": [], "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
        "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
    }  # fmt: skip


@pytest.fixture
def autoscaling_ray(tmp_path, monkeypatch):
    with socket.socket() as probe:
        if probe.connect_ex((ray.util.get_node_ip_address(), PORT)) == 0:
            pytest.skip(f"port {PORT}, the only one of Ray's fake nodes, is taken")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    folder = Path(tempfile.mkdtemp(prefix="tandem-ray-"))
    (tmp_path / "autoscaling.json").write_text(json.dumps(autoscaling_config()))
    switches = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1"}
    switches |= {"RAY_CLOUD_INSTANCE_ID": HEAD, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={PORT}", "--num-cpus=2"]
    command += [f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats", f"--object-store-memory={100 << 20}"]
    command += [f"--autoscaling-config={tmp_path / 'autoscaling.json'}"]
    held = spawn_held(command, tmp_path / "ray.log", os.environ | switches)
    held.release()
    try:
        deadline = time.monotonic() + SETTLE_S
        while "will now block forever" not in (log := (tmp_path / "ray.log").read_text()):
            assert time.monotonic() < deadline, log
            assert not held.process.is_dead(), log
            time.sleep(0.1)
        connect(f"{ray.util.get_node_ip_address()}:{PORT}", None, "tests")
        yield
    finally:
        if ray.is_initialized():
            ray.shutdown()
        stop_local_ray(held.process, folder)


def nodes() -> list[dict]:
    return [node for node in ray.nodes() if node["Alive"]]


def until_nodes(count: int, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while len(nodes()) != count:
        assert time.monotonic() < deadline, nodes()
        time.sleep(0.2)


def test_a_pool_that_grows_adds_a_node_of_its_kind_and_a_pool_that_shrinks_removes_it(autoscaling_ray, checkpoint):
    pools = [
        {"name": "prefill", "role": "prefill"},
        {"name": "decode", "role": "decode", "node_labels": {"pool": "decode"}, "replicas": {"min": 0, "max": 1}},
    ]
    config = pools_config(checkpoint, pools=pools, cluster={"device": "cpu", "place_timeout_s": 120})
    with pool_cluster("grows", config) as cluster:
        cluster.until_ready(prefill=1, decode=0)
        assert len(nodes()) == 1
        cluster.scale("decode", 1)
        waiting = cluster.until(lambda s: [g for g in s.groups if g.pool == "decode"])
        assert any("no node with labels {'pool': 'decode'}" in g.detail for g in waiting.groups) or len(nodes()) == 2
        cluster.until_ready(prefill=1, decode=1, timeout_s=150)
        (added,) = [node for node in nodes() if node["Labels"].get("pool") == "decode"]
        assert added["Alive"]
        cluster.scale("decode", 0)
        cluster.until_ready(prefill=1, decode=0)
        until_nodes(1)
        assert cluster.status().pools[0].ready == 1
