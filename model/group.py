"""Joins the ranks of one group: the control channel, the collectives of the forward pass, and a watch on each other's processes.

Called by each rank when it starts, before it loads anything; the rank closes it when it ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import NotSupportedError
from common.process import is_known_dead
from common.proto import types_pb2
from common.rank_spec import RankSpec
from model.control import FollowerChannel, LeaderChannel
from model.device_group import open_device_group
from model.parallel import LocalGroup, ParallelGroup
from model.star import StarListener, join_star
from model.star_group import StarGroup

logger = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 60.0
_WATCH_INTERVAL_S = 0.25


@dataclass
class GroupLinks:
    """What one rank holds of its group: the leader's end of the control channel on rank 0, a follower's end on the others.

    `end_compute`: ends the collectives of `compute`. A decode group on GPUs has those of a CPU, for its start; its steps meet over mapped
    memory (`peer_memory.py`).
    """

    compute: ParallelGroup
    control: LeaderChannel | FollowerChannel
    end_compute: Callable[[], None] = lambda: None

    def close(self) -> None:
        self.control.close()
        self.end_compute()


def open_group(spec: RankSpec) -> GroupLinks:
    """Blocks until all ranks of the group have joined.

    Raises: WorkerLost if one does not come within a minute
    """
    if spec.tp == 1:
        return GroupLinks(LocalGroup(), LeaderChannel([]))
    on_gpus = spec.device == "cuda" and spec.role == "prefill"
    if spec.device not in ("cpu", "cuda"):
        raise NotSupportedError(f"{spec.role} groups of {spec.tp} ranks on {spec.device}: collectives exist for cuda and for cpu")
    control: LeaderChannel | FollowerChannel
    if spec.rank > 0:
        control = FollowerChannel(join_star(spec.rendezvous, spec.key, spec.rank, "control", JOIN_TIMEOUT_S))
        star = StarGroup(spec.rank, spec.tp, [join_star(spec.rendezvous, spec.key, spec.rank, "compute", JOIN_TIMEOUT_S)])
    else:
        listener = StarListener(spec.rendezvous, spec.key)
        try:
            links = listener.accept(spec.tp, ("control", "compute"), JOIN_TIMEOUT_S)
        finally:
            listener.close()
        control, star = LeaderChannel(links["control"]), StarGroup(0, spec.tp, links["compute"])
    if not on_gpus:
        return GroupLinks(star, control, star.close)
    try:
        compute, end = open_device_group(star)
    except BaseException:
        control.close()
        raise
    finally:
        star.close()
    return GroupLinks(compute, control, end)


class RankWatch:
    """Looks a few times a second whether the other ranks' processes still exist: a rank that waits for a dead one in a collective of a
    GPU can't find out by itself. Calls `on_death(rank)` once, from its own thread."""

    def __init__(self, ranks: list[types_pb2.ProcessIdentity], own_rank: int, on_death: Callable[[int], None]):
        self._others = [(rank, process) for rank, process in enumerate(ranks) if rank != own_rank]
        self._on_death = on_death
        self._stop = threading.Event()
        if self._others:
            threading.Thread(target=self._run, name="rank-watch", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_WATCH_INTERVAL_S):
            for rank, process in self._others:
                if is_known_dead(process):
                    self._on_death(rank)
                    return
