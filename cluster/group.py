"""One running group under Ray: its placement group, its rank actors, and the moment it ends.

Owned by the controller, one object per incarnation; a group that died is never revived, another takes its place.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.rank_actor import RankActor
from cluster.specs import for_rank
from common.errors import ConfigError, ServingError, WorkerLost
from common.proto import types_pb2
from common.rank_spec import RankSpec

logger = logging.getLogger(__name__)
CPU_PER_RANK = 0.1  # rank processes on a CPU share its cores; the bundle only says where they stand


class GroupState(enum.Enum):
    PLACING = "waiting for resources"
    LOADING = "loading weights"
    READY = "ready"
    DEAD = "dead"


class Group:
    """PLACING -> LOADING -> READY -> DEAD; from each state straight to DEAD if something fails.

    `description` is set in READY. `error` says why it is DEAD, None after a wanted stop.
    """

    def __init__(self, spec: RankSpec, on_change: Callable[[], None]):
        self.spec = spec
        self._on_change = on_change
        self.state = GroupState.PLACING
        self.description: types_pb2.GroupDescription | None = None
        self.error: str | None = None
        self.failed_in = GroupState.PLACING  # the state that `error` ended
        self.is_proved_dead = False
        self._placement: Any = None
        self._actors: list = []
        self._stopping = False

    @property
    def name(self) -> str:
        return self.spec.group

    @property
    def is_stopping(self) -> bool:
        return self._stopping or self.state is GroupState.DEAD

    async def run(self, timeout_s: float) -> None:
        """Starts the group and returns when it has ended for good, its processes gone and its resources given back."""
        try:
            await asyncio.wait_for(self._start(timeout_s), timeout_s)
            logger.info("group %s is ready at %s", self.name, self.description.address if self.description else "?")
            await self._wait_first_death()
        except TimeoutError:
            self.error = f"not ready within {timeout_s:.0f} s ({self.state.value})"
        except (RayError, ServingError) as exc:
            self.error = _cause(exc)
        finally:
            self.failed_in = self.state
            self._enter(GroupState.DEAD)
            if self._stopping:
                self.error = None
            elif self.error:
                logger.error("group %s ended: %s", self.name, self.error)
            await self._clean_up()

    async def stop(self) -> None:
        """Asks the ranks to end; `run` returns soon after."""
        self._stopping = True
        for actor in self._actors:
            actor.stop.remote()
        await asyncio.sleep(0)

    def kill(self) -> None:
        self._stopping = True
        for actor in self._actors:
            ray.kill(actor)

    async def _start(self, timeout_s: float) -> None:
        spec = self.spec
        bundle = {"GPU": 1.0, "CPU": 1.0} if spec.device == "cuda" else {"CPU": CPU_PER_RANK}
        self._placement = placement_group([bundle] * spec.tp, strategy="STRICT_PACK", name=spec.group)
        await self._placed(bundle, min(timeout_s, 60.0))
        self._enter(GroupState.LOADING)
        actor_class = ray.remote(RankActor)
        for rank in range(spec.tp):
            where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
            options: dict[str, Any] = {"num_gpus": 1} if spec.device == "cuda" else {"num_cpus": CPU_PER_RANK}
            options |= {"name": f"{spec.group}-r{rank}", "max_restarts": 0, "max_concurrency": 4, "scheduling_strategy": where}
            self._actors.append(actor_class.options(**options).remote())
        rendezvous = await self._actors[0].reserve_rendezvous.remote()
        host = rendezvous.rpartition(":")[0]
        identities = await asyncio.gather(*(actor.process.remote() for actor in self._actors))
        starts = [actor.start.remote(for_rank(spec, rank, rendezvous, host)) for rank, actor in enumerate(self._actors)]
        answers = await asyncio.gather(*starts)
        description = types_pb2.GroupDescription.FromString(answers[0])
        del description.ranks[:]
        description.ranks.extend(types_pb2.ProcessIdentity.FromString(data) for data in identities)
        self.description = description
        self._enter(GroupState.READY)

    def _enter(self, state: GroupState) -> None:
        self.state = state
        self._on_change()

    async def _placed(self, bundle: dict[str, float], timeout_s: float) -> None:
        """Raises: ConfigError naming the bundle and what is free, if no node can hold the group"""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._placement.ready().future()), timeout_s)
        except TimeoutError:
            free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
            raise ConfigError(
                f"no node can hold {self.spec.tp} bundles of {bundle} together (STRICT_PACK) after {timeout_s:.0f} s; "
                f"free in the whole cluster: {free}; lower the layout or add a node"
            ) from None

    async def _wait_first_death(self) -> None:
        """Returns when any rank has ended; the group is worth nothing without it."""
        waits = [asyncio.wrap_future(actor.wait_ended.remote().future()) for actor in self._actors]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        reason = done.pop().result()
        if not self._stopping:
            raise WorkerLost(f"a rank ended by itself: {reason}")

    async def _clean_up(self) -> None:
        if self._stopping:
            await asyncio.sleep(0.2)  # lets gRPC servers answer their last calls
        for actor in self._actors:
            ray.kill(actor)
        if self._placement is not None:
            remove_placement_group(self._placement)
        self.is_proved_dead = await asyncio.to_thread(self._wait_gone)

    def _wait_gone(self) -> bool:
        """Whether every process has ended for sure; only then may others reuse what it could write to."""
        for actor in self._actors:
            try:
                ray.get(actor.process.remote(), timeout=30)
                return False
            except GetTimeoutError:
                return False
            except RayError:
                continue
        return True


def _cause(exc: Exception) -> str:
    inner = getattr(exc, "cause", None) or exc
    return " ".join(str(inner).split())[:500]
