"""A controller on a real Ray with fake groups behind it, and what tests of pools ask of it. One Ray serves many of them in turn."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table

from cluster.goals import Goals
from cluster.local_ray import LocalRay, connect, namespace_of, start_local_ray, stop_local_ray
from cluster.placement import remove_leftovers
from cluster.up import start_controller
from common.config import Config, parse_config
from common.process import is_known_dead
from common.proto import control_pb2, control_pb2_grpc, types_pb2
from tests.support.fake_rank import fake_rank_actor

SETTLE_S = 60.0  # far beyond what anything here takes, for machines that are busy


@contextlib.contextmanager
def connected_ray(folder: Path, num_cpus: int = 8) -> Iterator[LocalRay]:
    """A Ray of one node, this process connected to it."""
    started: list[LocalRay] = []
    try:
        node = start_local_ray(folder, num_cpus=num_cpus, record=started.append)
        connect(node.address, node.token_file, "tests")
        yield node
    finally:
        if ray.is_initialized():
            ray.shutdown()
        for node in started:
            stop_local_ray(node.process, node.folder)


def pools_config(checkpoint: Path, **changes: Any) -> Config:
    """One prefill and one decode pool of 0 to 3 groups each, not scaled by itself; `changes` replace whole sections."""
    tree: dict[str, Any] = {
        "model": {"path": str(checkpoint), "max_model_len": 2048},
        "pools": [
            {"name": "prefill", "role": "prefill", "replicas": {"min": 1, "max": 3}},
            {"name": "decode", "role": "decode", "replicas": {"min": 1, "max": 3}},
        ],
        "autoscale": {"mode": "off"},
        "cluster": {"device": "cpu", "drain_grace_s": 20, "health_timeout_s": 5},
    }
    return parse_config(tree | changes)


@dataclass
class PoolCluster:
    """`handle`: the controller's actor."""

    name: str
    config: Config
    handle: Any
    address: str
    channel: grpc.Channel
    stub: control_pb2_grpc.DirectoryStub

    def status(self, timeout_s: float = SETTLE_S) -> control_pb2.StatusReply:
        """Waits for a controller that is away."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.stub.Status(control_pb2.StatusRequest(), timeout=10, wait_for_ready=True)
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def until(self, holds: Callable[[control_pb2.StatusReply], Any], timeout_s: float = SETTLE_S) -> control_pb2.StatusReply:
        """Raises: AssertionError with the last status"""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if holds(status):
                return status
            assert time.monotonic() < deadline, f"after {timeout_s} s: {status}"
            time.sleep(0.05)

    def until_ready(self, timeout_s: float = SETTLE_S, **groups: int) -> control_pb2.StatusReply:
        """Until each pool has exactly so many groups, all ready."""

        def settled(status: control_pb2.StatusReply) -> bool:
            pools = {pool.pool: pool for pool in status.pools}
            return all(pools[p].ready == n and not pools[p].starting and not pools[p].draining for p, n in groups.items())

        return self.until(settled, timeout_s)

    def scale(self, pool: str, replicas: int) -> None:
        self.stub.Scale(control_pb2.ScaleRequest(pool=pool, replicas=replicas), timeout=10)

    def drain(self, target: str, *, now: bool = False) -> None:
        self.stub.Drain(control_pb2.DrainRequest(target=target, now=now), timeout=30)

    def rollout(self, config: Config) -> list[str]:
        """Returns: groups that are to be replaced"""
        return list(self.stub.Rollout(control_pb2.RolloutRequest(config_json=config.model_dump_json()), timeout=60).groups)

    def listed(self) -> dict[str, types_pb2.GroupDescription]:
        """By group, as a router would see them now."""
        call = self.stub.Watch(control_pb2.WatchRequest(), wait_for_ready=True)
        groups = {group.group: group for group in next(call).groups}
        call.cancel()
        return groups

    def pid(self) -> int:
        """Of the controller's process."""
        return ray.get(self.handle.pid.remote())

    def actors(self) -> set[str]:
        return {a["name"] for a in list_named_actors(all_namespaces=True) if a["namespace"] == namespace_of(self.name)}

    def placements(self) -> set[str]:
        table = placement_group_table().values()
        return {p["name"] for p in table if p["name"].startswith(namespace_of(self.name) + "/") and p["state"] != "REMOVED"}


@contextlib.contextmanager
def pool_cluster(name: str, config: Config, actor_class: type | None = None) -> Iterator[PoolCluster]:
    """Controller and groups on the Ray that this process is connected to; nothing of them is left afterwards."""
    handle = start_controller(config, name, actor_class or fake_rank_actor())
    try:
        address = ray.get(handle.start.remote())["controller_address"]
        with grpc.insecure_channel(address) as channel:
            yield PoolCluster(name, config, handle, address, channel, control_pb2_grpc.DirectoryStub(channel))
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(handle.shutdown.remote(), timeout=60)
        ray.kill(handle)
        remove_leftovers(namespace_of(name), set())
        Goals.forget_all(namespace_of(name))


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def until_gone(processes: list[types_pb2.ProcessIdentity], timeout_s: float = SETTLE_S) -> None:
    """Raises: AssertionError naming the processes that are still there"""
    deadline = time.monotonic() + timeout_s
    while left := [p.pid for p in processes if not is_known_dead(p)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)
