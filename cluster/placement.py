"""The processes of one group under Ray: its placement group and rank actors, all detached and named, so that they outlive the controller.

Used by `group.py`. Names carry everything that a later controller needs to find them again: actors are `GROUP-rRANK` in the cluster's
namespace, the placement group is `NAMESPACE/GROUP`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors
from ray.util.placement_group import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.rank_actor import Found
from common.errors import ConfigError
from common.process import host_id, is_known_dead
from common.proto import types_pb2

CPU_PER_RANK = 0.1  # rank processes on a CPU share its cores; the bundle only says where they stand
ANSWER_S = 10.0  # a rank that runs answers a question about itself within this time
GONE_S = 30.0


@dataclass(frozen=True)
class Place:
    """Where a group's ranks stand: `tp` equal bundles on one node, which has the labels."""

    namespace: str
    group: str
    tp: int
    device: str
    node_labels: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.group}"

    @property
    def bundle(self) -> dict[str, float]:
        return {"GPU": 1.0, "CPU": 1.0} if self.device == "cuda" else {"CPU": CPU_PER_RANK}


class Ranks:
    """A group's actors, in the order of their ranks; empty until `start`."""

    def __init__(self, place: Place, actors: list[Any] | None = None):
        self._place = place
        self.actors: list[Any] = actors or []
        self._identities: list[types_pb2.ProcessIdentity] = []
        self._placement: Any = None

    def ask_for_place(self) -> None:
        """From now on the group is demand that an autoscaler of nodes sees."""
        place = self._place
        labels = {"bundle_label_selector": [place.node_labels] * place.tp} if place.node_labels else {}
        self._placement = placement_group([place.bundle] * place.tp, strategy="STRICT_PACK", name=place.name, lifetime="detached", **labels)

    async def placed(self, timeout_s: float) -> None:
        """Raises: ConfigError naming the bundle and what is free, if no node has room for the group by then"""
        ready = asyncio.wrap_future(self._placement.ready().future())
        try:
            await asyncio.wait_for(ready, timeout_s)
        except TimeoutError:
            raise ConfigError(f"after {timeout_s:.0f} s {self.lacks()}; lower the layout, or add a node") from None

    def lacks(self) -> str:
        """What the group waits for, in words."""
        place = self._place
        labels = f" with labels {place.node_labels}" if place.node_labels else ""
        return f"no node{labels} can hold {place.tp} x {_show(place.bundle)} together; {_free_resources(place.device)}"

    async def start(self, actor_class: type) -> None:
        """Returns once every rank's process runs."""
        place = self._place
        remote_class: Any = ray.remote(actor_class)
        for rank in range(place.tp):
            where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
            options: dict[str, Any] = {"num_gpus": 1} if place.device == "cuda" else {"num_cpus": CPU_PER_RANK}
            options |= {"name": f"{place.group}-r{rank}", "namespace": place.namespace, "lifetime": "detached"}
            options |= {"max_restarts": 0, "max_concurrency": 8, "scheduling_strategy": where}
            self.actors.append(remote_class.options(**options).remote())
        await self.identify()

    async def identify(self) -> list[types_pb2.ProcessIdentity]:
        answers = await asyncio.gather(*(actor.process.remote() for actor in self.actors))
        self._identities = [types_pb2.ProcessIdentity.FromString(data) for data in answers]
        return self._identities

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    async def remove(self) -> bool:
        """Ends every process and gives the resources back. Returns: whether every process is gone for sure; only then may others reuse
        what it could write to"""
        self.kill()
        _remove_placement(self._placement, self._place.name)
        return await asyncio.to_thread(self._wait_gone)

    def _wait_gone(self) -> bool:
        for rank, actor in enumerate(self.actors):
            try:
                ray.get(actor.process.remote(), timeout=GONE_S)
                return False
            except GetTimeoutError:
                return False
            except RayError:
                pass
            mine = self._identities[rank] if rank < len(self._identities) else None
            if mine is not None and mine.host == host_id() and not _gone_within(mine, GONE_S):
                return False
        return True


async def find_ranks(namespace: str) -> dict[str, tuple[Found | None, list[Any]]]:
    """The groups that run in a namespace: what rank 0 says of each (None: no answer, or a rank is missing), and its actors by rank."""
    handles: dict[str, dict[int, Any]] = defaultdict(dict)
    for entry in await asyncio.to_thread(list_named_actors, all_namespaces=True):
        group, is_rank, rank = entry["name"].rpartition("-r")
        if entry["namespace"] == namespace and is_rank and rank.isdigit():
            with contextlib.suppress(ValueError):  # it ended meanwhile
                handles[group][int(rank)] = ray.get_actor(entry["name"], namespace=namespace)
    answers = await asyncio.gather(*(_about(ranks) for ranks in handles.values()))
    return {group: (found, [ranks[r] for r in sorted(ranks)]) for (group, ranks), found in zip(handles.items(), answers, strict=True)}


async def _about(ranks: dict[int, Any]) -> Found | None:
    try:
        answers = await asyncio.wait_for(asyncio.gather(*(actor.about.remote() for actor in ranks.values())), ANSWER_S)
    except (RayError, TimeoutError):
        return None
    found: Found | None = dict(zip(ranks, answers, strict=True)).get(0)
    is_whole = found is not None and all(answers) and sorted(ranks) == list(range(found.spec.tp))
    return found if is_whole else None


def remove_leftovers(namespace: str, keep: set[str]) -> int:
    """Kills every rank actor and placement group of the namespace whose group is not in `keep`. Returns: how many groups there were"""
    gone = set()
    for entry in list_named_actors(all_namespaces=True):
        group = entry["name"].rpartition("-r")[0]
        if entry["namespace"] == namespace and group and group not in keep:
            gone.add(group)
            with contextlib.suppress(ValueError, RayError):
                ray.kill(ray.get_actor(entry["name"], namespace=namespace))
    for entry in placement_group_table().values():
        owner, _, group = entry["name"].partition("/")
        if owner == namespace and group not in keep and entry["state"] != "REMOVED":
            gone.add(group)
            _remove_placement(None, entry["name"])
    return len(gone)


def _remove_placement(placement: Any, name: str) -> None:
    with contextlib.suppress(ValueError, RayError):
        remove_placement_group(placement or get_placement_group(name))


def _gone_within(identity: types_pb2.ProcessIdentity, timeout_s: float) -> bool:
    import time

    deadline = time.monotonic() + timeout_s
    while not is_known_dead(identity):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _free_resources(device: str) -> str:
    kinds = ("GPU", "CPU") if device == "cuda" else ("CPU",)
    nodes = available_resources_per_node().values()
    return "free by node: " + (", ".join(_show({k: node[k] for k in kinds if k in node} or {kinds[0]: 0}) for node in nodes) or "none")


def _show(resources: dict[str, float]) -> str:
    return "{" + ", ".join(f"{key}: {value:g}" for key, value in resources.items()) + "}"
