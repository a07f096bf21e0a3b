"""The plan never passes the budget, replaces one group at a time, and never takes the last pair that can serve."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.reconcile import Drain, GroupView, Phase, Plan, PoolGoal, Start, plan_next

P = PoolGoal("p", "prefill", wanted=1)
D = PoolGoal("d", "decode", wanted=1)


def group(name: str, pool: str = "p", phase: Phase = Phase.READY, **fields) -> GroupView:
    return GroupView(name, pool, phase, **fields)


def plan(goals, groups, gpu_budget: int = 8, **options) -> Plan:
    return plan_next({goal.name: goal for goal in goals}, groups, gpu_budget, **options)


def test_missing_groups_are_started_and_those_that_start_are_counted():
    goals = (replace(P, wanted=3), D)
    assert plan(goals, [group("p0", phase=Phase.STARTING)]).actions == (Start("p"), Start("p"), Start("d"))


@pytest.mark.parametrize("leaving", [1, 2])
def test_gpus_of_groups_that_drain_are_not_given_away(leaving):
    groups = [group(f"p{i}", phase=Phase.LEAVING) for i in range(leaving)]
    done = plan((replace(P, wanted=0), replace(D, gpus=2)), groups, gpu_budget=2)
    assert done.actions == ()
    assert "d needs 2 GPUs" in done.waits_for


def test_a_pool_that_just_failed_is_left_alone():
    assert plan((replace(P, may_start=False),), []).actions == ()


def test_idle_and_starting_groups_go_first():
    groups = [
        group("busy", running=9), group("less", running=1), group("idle"), group("starts", phase=Phase.STARTING), group("other", "d"),
    ]  # fmt: skip
    order = []
    for wanted in (3, 2, 1, 0):
        (action,) = plan((replace(P, wanted=wanted), D), groups).actions
        assert isinstance(action, Drain)
        order.append(action.group)
        groups = [g for g in groups if g.name != action.group]
    assert order == ["starts", "idle", "less", "busy"]


def test_groups_of_a_pool_that_is_gone_are_drained():
    assert plan((D,), [group("p0"), group("d0", "d")]).actions == (Drain("p0", "its pool is gone"),)


def test_replacing_starts_the_newer_beside_the_older_where_there_is_room():
    old = [group("p0", is_stale=True), group("p1", is_stale=True), group("d0", "d")]
    goals = (replace(P, wanted=2), D)
    assert plan(goals, old).actions == (Start("p"),)
    with_new = [*old, group("n0", phase=Phase.STARTING)]
    assert plan(goals, with_new).actions == ()
    ready = [*old, group("n0")]
    assert plan(goals, ready).actions == (Drain("p0", "replaced by a newer group"),)
    assert plan(goals, [replace(old[0], phase=Phase.LEAVING), *ready[1:]]).actions == ()
    assert plan(goals, ready[1:]).actions == (Start("p"),)


def test_without_room_one_goes_first_unless_it_is_the_last():
    old = [group("p0", is_stale=True, running=3), group("p1", is_stale=True), group("d0", "d")]
    assert plan((replace(P, wanted=2), D), old, gpu_budget=3).actions == (Drain("p1", "makes room for a newer group"),)
    alone = [old[0], group("d0", "d")]
    stuck = plan((P, D), alone, gpu_budget=2)
    assert stuck.actions == ()
    assert "replacing needs 1 GPUs" in stuck.waits_for
    assert plan((P, D), alone, gpu_budget=2, allow_gap=True).actions == (Drain("p0", "makes room for a newer group"),)


def test_no_further_group_is_touched_while_a_newer_one_fails_to_start():
    old = [group("p0", is_stale=True), group("p1", is_stale=True), group("d0", "d")]
    assert plan((replace(P, wanted=2, may_start=False), D), old).actions == ()


# -- a whole life, driven step by step -----------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Groups as the controller would keep them: each turn carries a plan out and lets some groups move on."""

    budget: int
    rng: random.Random
    groups: list[GroupView] = field(default_factory=list)
    made: int = 0
    drained: list[str] = field(default_factory=list)

    def turn(self, goals: list[PoolGoal], fresh: str, **options) -> Plan:
        by_name = {goal.name: goal for goal in goals}
        self.groups = [replace(g, is_stale=g.version != by_name[g.pool].version) for g in self.groups]
        done = plan_next(by_name, self.groups, self.budget, **options)
        for action in done.actions:
            if isinstance(action, Start):
                self.made += 1
                goal = by_name[action.pool]
                self.groups.append(GroupView(f"g{self.made}", goal.name, Phase.STARTING, goal.gpus, goal.version))
            else:
                self.drained.append(action.reason)
                self.groups = [replace(g, phase=Phase.LEAVING) if g.name == action.group else g for g in self.groups]
        assert sum(g.gpus for g in self.groups) <= self.budget
        moved = []
        for g in self.groups:
            if self.rng.random() < 0.4:
                if g.phase is Phase.LEAVING:
                    continue
                g = replace(g, phase=Phase.READY)
            moved.append(replace(g, running=self.rng.randrange(5)))
        self.groups = moved
        return done

    def serves(self, goals: list[PoolGoal]) -> bool:
        roles = {goal.name: goal.role for goal in goals}
        ready = [(roles[g.pool], g.version) for g in self.groups if g.phase is Phase.READY]
        return any(("prefill", v) in ready and ("decode", v) in ready for _, v in ready)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_a_replacement_ends_serves_all_along_and_keeps_the_budget(seed, prefills, decodes, decode_gpus, room):
    """Every pool gets another KV format, in a budget with or without room."""
    rng = random.Random(seed)
    goals = [PoolGoal("p", "prefill", prefills, 1, "v1"), PoolGoal("d", "decode", decodes, decode_gpus, "v1")]
    world = World(prefills + decodes * decode_gpus + room, rng)
    for _ in range(100):
        world.turn(goals, "v1")
    assert world.serves(goals)
    newer = [replace(goal, version="v2") for goal in goals]
    waits = ""
    for _ in range(400):
        waits = world.turn(newer, "v2").waits_for
        assert world.serves(newer), world.groups
    stale = [g for g in world.groups if g.version == "v1"]
    if stale:  # only a budget that can't hold one newer pair beside the older ones may stop it
        assert waits
        assert room < 1 + decode_gpus
        for _ in range(400):
            world.turn(newer, "v2", allow_gap=True)
        assert all(g.version == "v2" for g in world.groups)
    for goal in newer:
        assert sum(g.pool == goal.name for g in world.groups) == goal.wanted
