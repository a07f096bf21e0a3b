"""Nodes of the Ray cluster, as far as the drain of one needs them: which is meant, which groups stand on it, and that no other comes to it.

Asked by `operations.py`, in threads of their own, since each call goes to Ray's head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group_table

from common.errors import ConfigError

HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives to the head alone
NO_DEADLINE = 0
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RayNode:
    node_id: str
    address: str
    is_alive: bool
    is_head: bool


def find_nodes(name: str) -> list[RayNode]:
    """Every node, also one that is gone, whose address or id this is."""
    found = (RayNode(node["NodeID"], node["NodeManagerAddress"], node["Alive"], HEAD_NODE in node["Resources"]) for node in ray.nodes())
    return [node for node in found if name in (node.node_id, node.address)]


def groups_on(namespace: str, nodes: Sequence[RayNode]) -> set[str]:
    """Names of the groups whose place, taken or still being filled, is on one of the nodes."""
    ids = {node.node_id for node in nodes}
    groups = set()
    for entry in placement_group_table().values():
        owner, _, group = entry["name"].partition("/")
        if owner == namespace and entry["state"] != "REMOVED" and ids & set(entry["bundles_to_node_id"].values()):
            groups.add(group)
    return groups


def close_nodes(nodes: Sequence[RayNode], reason: str) -> None:
    """From now on Ray places nothing on them; Ray ends there by itself once nothing runs on them any more.

    Raises: ConfigError for the head's node, before any other is closed
    """
    for node in nodes:
        if node.is_head:
            raise ConfigError(f"node {node.address} is the head's: Ray and the controller run there; drain its groups, or a pool")
    gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)  # type: ignore[attr-defined]
    preempted = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
    for node in nodes:
        if node.is_alive:
            gcs.drain_node(node.node_id, preempted, reason, NO_DEADLINE, timeout=TIMEOUT_S)
