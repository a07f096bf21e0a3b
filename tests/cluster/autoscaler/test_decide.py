"""Decisions of the autoscaler on driven clocks: fast up, patient down, no flapping, never past bounds or budget."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscaler.decide import decide, start_state
from cluster.autoscaler.types import Change, DecodeLoad, Observation, Policy, PoolPolicy, PrefillLoad, State

PREFILL = PoolPolicy("prefill", "prefill", min=1, max=4, down_delay_s=60)
DECODE = PoolPolicy("decode", "decode", gpus=4, min=1, max=2, target_itl_ms=20.0, down_delay_s=60)


def policy_of(*pools: PoolPolicy, gpu_budget: int = 64) -> Policy:
    return Policy(pools, gpu_budget, interval_s=5.0)


@dataclass
class Run:
    """Drives `decide` with one clock and keeps what it changed. Groups are ready `start_s` after they were wanted, gone at once."""

    policy: Policy
    start_s: float = 0.0
    now_s: float = 0.0
    state: State = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    ready_at_s: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = self.state or start_state(self.policy)
        self.ready_at_s = {name: [0.0] * state.wanted for name, state in self.state.items()}

    def ready(self, pool: str) -> int:
        return sum(at_s <= self.now_s for at_s in self.ready_at_s[pool])

    def step(self, **loads: PrefillLoad | DecodeLoad) -> dict[str, int]:
        seen = {name: Observation(load, self.ready(name)) for name, load in loads.items()}
        decision = decide(self.policy, self.state, seen, self.now_s)
        gpus = {pool.name: pool.gpus for pool in self.policy.pools}
        assert sum(gpus[name] * count for name, count in decision.wanted.items()) <= self.policy.gpu_budget
        for pool in self.policy.pools:
            assert pool.min <= decision.wanted[pool.name] <= pool.max
            groups = self.ready_at_s[pool.name]
            groups += [self.now_s + self.start_s] * (decision.wanted[pool.name] - len(groups))
            del groups[decision.wanted[pool.name] :]
        self.state = decision.state
        self.changes += decision.changes
        self.now_s += self.policy.interval_s
        return dict(decision.wanted)


def rate(value: float, wait_s: float = 0.0, backlog_s: float = 0.0) -> PrefillLoad:
    return PrefillLoad(arriving_s_per_s=value, queue_wait_s=wait_s, backlog_s=backlog_s)


def batch(sequences: float, itl_ms: float = 10.0, **fields) -> DecodeLoad:
    return DecodeLoad(sequences=sequences, sequences_per_group=32, itl_ms=itl_ms, **fields)


def test_prefill_follows_the_arriving_work():
    run = Run(policy_of(PREFILL))
    assert run.step(prefill=rate(0.7))["prefill"] == 1
    for _ in range(20):
        wanted = run.step(prefill=rate(2.2))
    assert wanted["prefill"] == math.ceil(2.2 / PREFILL.target_utilisation)
    assert "prefill s/s" in run.changes[-1].reason


def test_a_long_queue_brings_groups_at_once():
    run = Run(policy_of(PREFILL))
    assert run.step(prefill=rate(0.5, wait_s=9.0, backlog_s=9.0))["prefill"] == 3
    assert "queue wait 9.0 s" in run.changes[0].reason


def test_decode_keeps_sequences_kv_and_itl_under_their_targets():
    for load, why in (
        (batch(40), "40 sequences"),
        (batch(5, kv_blocks_used=95, kv_blocks_per_group=100), "KV blocks"),
        (batch(20, itl_ms=25.0), "ITL 25.0 ms"),
    ):
        run = Run(policy_of(DECODE))
        assert run.step(decode=load)["decode"] == 2, why
        assert why in run.changes[0].reason


def test_one_sequence_that_is_slow_alone_brings_no_second_group():
    run = Run(policy_of(DECODE))
    for _ in range(50):
        assert run.step(decode=batch(1, itl_ms=500.0))["decode"] == 1


@pytest.mark.parametrize("start_s", [0.0, 60.0, 600.0])
def test_groups_that_still_start_are_counted(start_s):
    """The queue grows and ITL stays bad until the new groups serve; that must not bring a third and a fourth."""
    run = Run(policy_of(PREFILL, replace(DECODE, max=8)), start_s=start_s)
    for _ in range(200):
        run.step(prefill=rate(1.0), decode=batch(20, itl_ms=25.0 if run.ready("decode") < 2 else 15.0))
    assert [(c.pool, c.before, c.after) for c in run.changes] == [("prefill", 1, 2), ("decode", 1, 2)]


def test_down_waits_until_one_less_has_fitted_with_margin_all_along():
    run = Run(policy_of(PREFILL))
    while run.step(prefill=rate(1.0))["prefill"] < 2:
        assert run.now_s < 100
    for _ in range(100):  # fits on one group, but without the margin
        assert run.step(prefill=rate(0.72))["prefill"] == 2
    fitted_s = run.now_s
    while run.step(prefill=rate(0.3))["prefill"] == 2:
        assert run.now_s < fitted_s + 500
    assert run.now_s - fitted_s >= PREFILL.down_delay_s


def test_one_burst_during_the_delay_starts_the_wait_anew():
    run = Run(policy_of(PREFILL))
    run.step(prefill=rate(1.4))
    for i in range(60):
        run.step(prefill=rate(0.1, wait_s=5.0, backlog_s=2.0) if i % 10 == 9 else rate(0.1))
    assert run.changes[-1].after == 2


def test_up_waits_for_its_delay_when_there_is_one():
    run = Run(policy_of(replace(PREFILL, up_delay_s=20)))
    for i in range(10):
        wanted = run.step(prefill=rate(2.0))["prefill"]
        assert wanted == (1 if i < 4 else 3), i
    spikes = Run(policy_of(replace(PREFILL, up_delay_s=20)))
    for i in range(40):
        spikes.step(prefill=rate(0.5, wait_s=9.0, backlog_s=9.0) if i % 4 == 0 else rate(0.5))
    assert spikes.changes == []


def test_a_pool_at_zero_wakes_for_the_first_request_and_sleeps_again():
    asleep = replace(PREFILL, min=0, up_delay_s=30)
    run = Run(policy_of(asleep))
    assert run.step(prefill=rate(0.0))["prefill"] == 0
    assert run.step(prefill=PrefillLoad(waiting=1))["prefill"] == 1
    for _ in range(int(PREFILL.down_delay_s / 5)):
        assert run.step(prefill=rate(0.0))["prefill"] == 1
    run.step(prefill=rate(0.0))
    assert run.step(prefill=rate(0.0))["prefill"] == 0


def test_a_pool_nobody_reports_about_keeps_what_it_has():
    run = Run(policy_of(PREFILL, DECODE))
    run.step(prefill=rate(2.0), decode=batch(40))
    before = {name: state.wanted for name, state in run.state.items()}
    for _ in range(100):
        assert run.step() == before


def test_a_pool_with_equal_bounds_is_never_changed():
    run = Run(policy_of(replace(PREFILL, min=2, max=2)))
    for load in (rate(0.0), rate(9.0, 50.0, 50.0), rate(0.0)):
        assert run.step(prefill=load)["prefill"] == 2
    assert run.changes == []


def test_load_beyond_a_maximum_wakes_the_other_pool_of_the_role():
    small, big = replace(PREFILL, name="small", max=2), replace(PREFILL, name="big", gpus=4, min=0, max=1)
    run = Run(policy_of(small, big))
    for _ in range(20):
        wanted = run.step(small=rate(4.0), big=rate(0.0))
    assert wanted == {"small": 2, "big": 1}
    assert "small is at its maximum" in run.changes[-1].reason


def test_roles_move_inside_the_budget_and_the_idle_side_gives_early():
    """Prefill holds what decode now needs: it is given up before the full down delay, and the sum never passes the budget."""
    run = Run(policy_of(replace(PREFILL, max=7, down_delay_s=400), replace(DECODE, gpus=2, max=7, min=1), gpu_budget=8))
    for _ in range(60):
        wanted = run.step(prefill=rate(4.0), decode=batch(10))
    assert wanted == {"prefill": 6, "decode": 1}
    moved_s = run.now_s
    while run.step(prefill=rate(0.2), decode=batch(80))["decode"] < 3:
        assert run.now_s < moved_s + 300
    assert run.now_s - moved_s < 400
    assert any("another pool" in c.reason for c in run.changes)


def test_a_role_without_any_group_gets_one_from_a_pool_that_has_many():
    run = Run(policy_of(replace(PREFILL, min=0, max=4), replace(DECODE, gpus=1, min=0, max=4), gpu_budget=4))
    for _ in range(20):
        run.step(prefill=rate(0.0), decode=batch(400, waiting=3))
    wanted = run.step(prefill=PrefillLoad(waiting=1), decode=batch(400))
    assert wanted == {"prefill": 1, "decode": 3}


def test_changes_that_the_budget_cuts_say_so_and_what_is_short_is_named():
    policy = policy_of(replace(PREFILL, max=9), gpu_budget=3)
    decision = decide(policy, start_state(policy), {"prefill": Observation(rate(6.0), 1)}, 0.0)
    assert decision.wanted == {"prefill": 3}
    assert decision.short == {"prefill": 5}
    assert "budget leaves 3" in decision.changes[0].reason


# -- waves ---------------------------------------------------------------------------------------------------------------------------------


def wave(run: Run, seconds: float, period_s: float, low: float, high: float, rng: random.Random, noise: float) -> None:
    """One pool of each role under a sine of load between `low` and `high`, in groups."""
    backlog_s = 0.0
    end_s = run.now_s + seconds
    while run.now_s < end_s:
        level = low + (high - low) * (1 - math.cos(2 * math.pi * run.now_s / period_s)) / 2
        level *= 1 + noise * rng.uniform(-1, 1)
        ready = run.ready("prefill")
        backlog_s = max(0.0, backlog_s + (level - ready) * run.policy.interval_s)
        wait_s = backlog_s / max(ready, 1)
        run.step(prefill=rate(level, wait_s=wait_s, backlog_s=backlog_s), decode=batch(level * 28))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("start_s", [5.0, 60.0])
def test_a_daily_wave_brings_at_most_two_changes_per_pool(seed, start_s):
    """0.2 to 1.5 times what one group does, 12 waves of an hour, with noise; the sine passes each threshold twice."""
    run = Run(policy_of(replace(PREFILL, max=2), DECODE, gpu_budget=10), start_s=start_s)
    wave(run, seconds=12 * 3600, period_s=3600, low=0.2, high=1.2, rng=random.Random(seed), noise=0.1)
    for pool in ("prefill", "decode"):
        mine = [c for c in run.changes if c.pool == pool]
        assert 12 <= len(mine) <= 24, mine


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_of_many_turns_at_most_twice_per_wave(seed):
    run = Run(policy_of(replace(PREFILL, max=12), replace(DECODE, max=12), gpu_budget=60), start_s=30)
    wave(run, seconds=6 * 3600, period_s=3600, low=1.0, high=8.0, rng=random.Random(seed), noise=0.15)
    for pool in ("prefill", "decode"):
        ups = [c.after > c.before for c in run.changes if c.pool == pool]
        turns = sum(a != b for a, b in itertools.pairwise(ups))
        assert turns <= 2 * 6


@pytest.mark.parametrize("threshold", [0.75, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_load_about_a_threshold_brings_at_most_two_changes_in_ten_minutes(threshold, seed):
    rng = random.Random(seed)
    run = Run(policy_of(PREFILL))
    for _ in range(120):
        run.step(prefill=rate(threshold * rng.uniform(0.9, 1.1)))
    assert len(run.changes) <= 2


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.floats(0, 100), st.floats(0, 500), st.integers(0, 3), st.floats(0, 900), st.floats(0, 90)),
        min_size=1,
        max_size=60,
    ),
    st.integers(3, 24),
    st.integers(0, 1),
)
@settings(max_examples=80, deadline=None)
def test_no_load_brings_a_decision_past_bounds_or_budget_and_equal_input_gives_equal_output(loads, gpu_budget, least):
    pools = (
        replace(PREFILL, min=least, max=9, down_delay_s=20),
        replace(PREFILL, name="big", gpus=2, min=0, max=3, down_delay_s=20),
        replace(DECODE, gpus=2, min=least, max=5, down_delay_s=20),
    )
    first, second = (Run(policy_of(*pools, gpu_budget=gpu_budget)) for _ in range(2))
    for value, wait_s, backlog_s, waiting, sequences, itl_ms in loads:
        load = PrefillLoad(value, backlog_s, wait_s, waiting)
        decode = batch(sequences, itl_ms, kv_blocks_used=sequences, kv_blocks_per_group=100)
        assert first.step(prefill=load, big=load, decode=decode) == second.step(prefill=load, big=load, decode=decode)
    assert first.changes == second.changes


@given(st.floats(0.05, 2.9), st.floats(0, 80))
@settings(max_examples=60, deadline=None)
def test_constant_load_settles_and_stays(level, sequences):
    run = Run(policy_of(PREFILL, replace(DECODE, max=4)))
    for _ in range(60):
        run.step(prefill=rate(level), decode=batch(sequences))
    settled = len(run.changes)
    for _ in range(60):
        wanted = run.step(prefill=rate(level), decode=batch(sequences))
    assert len(run.changes) == settled
    assert wanted["prefill"] * PREFILL.target_utilisation >= level - 1e-6
    assert wanted["decode"] * 32 >= sequences
