"""What to start and what to drain so that the groups become what is wanted. Pure; the controller carries it out and asks again.

Owns three promises: all groups that hold GPUs, also those that still drain, stay within the budget; one group at a time is replaced by a
newer one; and replacing never takes the last pair of groups that can serve a request.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class Phase(enum.Enum):
    """Of a group, as far as it matters here. All of them hold GPUs."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(frozen=True)
class GroupView:
    """`version`: groups exchange KV only with those of the same one. `is_stale`: to be replaced. `running`: requests on it."""

    name: str
    pool: str
    phase: Phase
    gpus: int = 1
    version: str = ""
    is_stale: bool = False
    running: int = 0


@dataclass(frozen=True)
class PoolGoal:
    """`version`: of groups that would be started now. `may_start`: False while a start has just failed."""

    name: str
    role: str
    wanted: int
    gpus: int = 1
    version: str = ""
    may_start: bool = True


@dataclass(frozen=True)
class Start:
    pool: str


@dataclass(frozen=True)
class Drain:
    group: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """`waits_for`: why something wanted is not done now, empty if nothing is held up."""

    actions: tuple[Start | Drain, ...]
    waits_for: str = ""


def plan_next(goals: Mapping[str, PoolGoal], groups: Sequence[GroupView], gpu_budget: int, *, allow_gap: bool = False) -> Plan:
    """`allow_gap`: groups may be replaced even if nobody can serve meanwhile. Groups of pools without a goal are drained."""
    planner = _Planner(goals, groups, gpu_budget, allow_gap)
    for group in groups:
        if group.pool not in goals and group.phase is not Phase.LEAVING:
            planner.drain(group, "its pool is gone")
    for goal in goals.values():
        planner.lower(goal)
    for goal in goals.values():
        planner.raise_to_wanted(goal)
    planner.replace_one()
    return Plan(tuple(planner.actions), planner.waits_for)


def first_to_go(group: GroupView) -> tuple[bool, bool, int, str]:
    """Order in which a pool gives groups up: those that still start, stale ones, idle ones, the least loaded."""
    return (group.phase is not Phase.STARTING, not group.is_stale, group.running, group.name)


class _Planner:
    def __init__(self, goals: Mapping[str, PoolGoal], groups: Sequence[GroupView], gpu_budget: int, allow_gap: bool):
        self.actions: list[Start | Drain] = []
        self.waits_for = ""
        self._goals = goals
        self._allow_gap = allow_gap
        self._staying = [g for g in groups if g.phase is not Phase.LEAVING and g.pool in goals]
        self._is_replacing = any(g.phase is Phase.LEAVING and g.is_stale for g in groups)
        self._left = gpu_budget - sum(g.gpus for g in groups)

    def drain(self, group: GroupView, reason: str) -> None:
        self.actions.append(Drain(group.name, reason))
        self._staying = [g for g in self._staying if g is not group]

    def lower(self, goal: PoolGoal) -> None:
        """Gives up what is too many. A newer group that still starts counts only when it can take the older one's place."""
        for group in self._of(goal):
            if group.is_stale and group.phase is Phase.STARTING:
                self.drain(group, "a newer group starts instead")
        mine = self._of(goal)
        stale = [g for g in mine if g.is_stale]
        fresh = [g for g in mine if not g.is_stale]
        fresh_ready = sum(g.phase is Phase.READY for g in fresh)
        for group in sorted(fresh, key=first_to_go)[: max(0, len(fresh) - goal.wanted)]:
            self.drain(group, "fewer are wanted")
        too_many = len(stale) - max(0, goal.wanted - fresh_ready)
        for group in sorted(stale, key=first_to_go)[: max(0, too_many)]:
            is_replaced = goal.wanted >= len(mine) - 1 and goal.wanted > 0
            if is_replaced and not self._may_lose(group):
                self._wait(f"{group.name} stays until groups of both roles can take over")
            else:
                self.drain(group, "replaced by a newer group" if is_replaced else "fewer are wanted")

    def raise_to_wanted(self, goal: PoolGoal) -> None:
        for _ in range(goal.wanted - len(self._of(goal))):
            if not goal.may_start:
                return
            if goal.gpus > self._left:
                self._wait(f"{goal.name} needs {goal.gpus} GPUs, the budget leaves {max(0, self._left)}")
                return
            self._start(goal)

    def replace_one(self) -> None:
        """The next step of a replacement, if none is under way: a newer group beside the older one, or in its place if GPUs are short."""
        behind = [goal for goal in self._goals.values() if any(g.is_stale for g in self._of(goal))]
        if not behind or self._is_replacing or any(isinstance(action, Drain) for action in self.actions):
            return
        if any(g.phase is Phase.STARTING for goal in behind for g in self._of(goal)):
            return
        waiting = [goal for goal in behind if len(self._of(goal)) <= goal.wanted and goal.may_start]
        for goal in sorted(waiting, key=self._has_fresh):
            if goal.gpus <= self._left:
                self._start(goal)
                return
        for goal in sorted(waiting, key=self._has_fresh):
            group = min((g for g in self._of(goal) if g.is_stale), key=first_to_go)
            if self._may_lose(group):
                self.drain(group, "makes room for a newer group")
                return
        if waiting:
            needs = min(goal.gpus for goal in waiting)
            self._wait(f"replacing needs {needs} GPUs beside the running groups, the budget leaves {max(0, self._left)}")

    def _has_fresh(self, goal: PoolGoal) -> tuple[bool, int]:
        return (any(not g.is_stale for g in self._of(goal)), goal.gpus)

    def _may_lose(self, group: GroupView) -> bool:
        """Whether some pair that can exchange KV stays without it."""
        if self._allow_gap or group.phase is not Phase.READY:
            return True
        versions: dict[str, set[str]] = {"prefill": set(), "decode": set()}
        for other in self._staying:
            if other is not group and other.phase is Phase.READY:
                versions[self._goals[other.pool].role].add(other.version)
        return bool(versions["prefill"] & versions["decode"])

    def _of(self, goal: PoolGoal) -> list[GroupView]:
        return [g for g in self._staying if g.pool == goal.name]

    def _start(self, goal: PoolGoal) -> None:
        self.actions.append(Start(goal.name))
        self._staying.append(GroupView("", goal.name, Phase.STARTING, goal.gpus, goal.version))
        self._left -= goal.gpus

    def _wait(self, reason: str) -> None:
        self.waits_for = self.waits_for or reason
