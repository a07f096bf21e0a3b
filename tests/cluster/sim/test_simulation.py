"""The simulated cluster: times worked out by hand, accounts that add up, admission under overload, the autoscaler, determinism."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.autoscaler.types import Policy, PoolPolicy
from cluster.cost_model import PairLoad, Shape, itl_ms, prefill_ms, prepare_decode, prepare_prefill
from cluster.load.arrivals import Lengths, Load, random_load
from cluster.profile import builtin_profile
from cluster.router.choice import Aim
from cluster.router.queue import QueueLimits
from cluster.sim.deployment import capacity_tokens, plans_of_names
from cluster.sim.engines import Truth
from cluster.sim.policies import POLICIES, policy_named
from cluster.sim.scaling import Scaling
from cluster.sim.simulation import SimSettings, Simulation
from common.errors import ConfigError

PROFILE = builtin_profile(36, on_cuda=True)


def plans(*names: str):
    return plans_of_names(names or ("prefill:tp1:fp8:2", "decode:tp4ep4:mxfp4:1"), PROFILE, 3.0)


def load_of(*requests: tuple[float, int, int]) -> Load:
    at_s, prompt, output = zip(*requests, strict=True)
    return Load(np.array(at_s, float), np.array(prompt), np.array(output))


def assert_nothing_is_left(simulation: Simulation) -> None:
    for pool in simulation.pools.prefill.values():
        assert not pool.queue
        assert all(group.is_idle for group in pool.links.values())
    for pool in simulation.pools.decode.values():
        assert pool.front is None
        assert not pool.expected
        assert all(group.is_idle and not group.used_blocks and group.book.batch == 0 for group in pool.links.values())


def test_one_request_takes_what_the_profile_says():
    simulation = Simulation(PROFILE, plans(), SimSettings())
    record = simulation.run(load_of((0.0, 8000, 101)))
    prefill, decode = (prepare(PROFILE, plan.spec) for prepare, plan in zip((prepare_prefill, prepare_decode), plans(), strict=True))
    assert record.ttft_ms[0] == pytest.approx(prefill_ms(prefill, 8000))
    assert record.itl_ms[0] == pytest.approx(itl_ms(decode, PairLoad(), Shape(8000, 101, 8101)), rel=1e-3)
    assert_nothing_is_left(simulation)


def test_a_third_prefill_waits_for_the_first_of_two_groups():
    record = Simulation(PROFILE, plans(), SimSettings()).run(load_of((0.0, 8000, 1), (0.0, 8000, 1), (0.0, 8000, 1)))
    alone = record.ttft_ms[0]
    assert record.ttft_ms.tolist() == pytest.approx([alone, alone, 2 * alone])


def test_sequences_that_share_a_group_slow_each_other_and_end_in_order_of_length():
    requests = [(0.0, 1000, 100), (0.0, 1000, 300)]
    together = Simulation(PROFILE, plans(), SimSettings()).run(load_of(*requests))
    alone = Simulation(PROFILE, plans(), SimSettings()).run(load_of(requests[1]))
    assert together.latency_s[0] < together.latency_s[1]
    assert alone.itl_ms[0] < together.itl_ms[1] < together.itl_ms[0] * 1.001


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_and_everything_comes_back(policy):
    load = random_load(600, 60.0, Lengths(3000, 1.0), Lengths(150, 1.0), burstiness=0.3, seed=5)
    simulation = Simulation(PROFILE, plans("prefill:tp1:fp8:2", "prefill:tp4ep4:fp8:1", "decode:tp1:mxfp4:1", "decode:tp4ep4:mxfp4:1"),
                            SimSettings(noise=0.1, deadline_s=2.0))  # fmt: skip
    simulation.policy = policy_named(policy, simulation.chooser, simulation.pools)
    record = simulation.run(load)
    assert record.ended == 600
    assert int((~np.isnan(record.ttft_ms)).sum()) + sum(record.refusals.values()) == 600
    assert_nothing_is_left(simulation)


def test_the_same_seed_gives_the_same_run():
    load = random_load(300, 40.0, Lengths(3000, 1.0), Lengths(100, 1.0), seed=2)
    first, second = (Simulation(PROFILE, plans(), SimSettings(noise=0.2, seed=7)).run(load) for _ in range(2))
    assert np.array_equal(first.latency_s, second.latency_s, equal_nan=True)


def test_a_full_decode_pool_makes_requests_wait_and_all_finish():
    simulation = Simulation(PROFILE, plans("prefill:tp1:fp8:4", "decode:tp1:mxfp4:1"), SimSettings())
    pool = next(iter(simulation.pools.decode.values()))
    for group in pool.links.values():
        group.book.max_batch = 3
    record = simulation.run(load_of(*[(i * 1e-3, 500, 200) for i in range(30)]))
    assert not record.refusals
    assert_nothing_is_left(simulation)


def test_three_times_the_load_still_gives_nine_tenths_of_the_capacity():
    """Prompts of one length, so that capacity is known: groups / prefill time. Good is what finished within the longest wait that admission
    allows and the prefill itself."""
    took_s = prefill_ms(prepare_prefill(PROFILE, plans()[0].spec), 8000) / 1e3
    capacity = 4 / took_s
    load = random_load(4000, 3 * capacity, Lengths(8000), Lengths(2), seed=1)
    settings = SimSettings(limits=QueueLimits(max_wait_s=1.0), deadline_s=10.0)
    record = Simulation(PROFILE, plans("prefill:tp1:fp8:4", "decode:tp4ep4:mxfp4:2"), settings).run(load)
    summary = record.summary(ttft_slo_ms=1e3 * (1.0 + took_s) * 1.05)
    assert summary.goodput_per_s >= 0.9 * capacity
    assert summary.refused["RESOURCE_EXHAUSTED"] > 2000


def test_corrections_learn_that_a_pool_is_slower_than_its_profile_and_requests_move_away():
    names = ("prefill:tp1:fp8:2", "prefill:tp1:fp8:2", "decode:tp4ep4:mxfp4:2")
    slow = {plans(*names)[0].spec.name: Truth(prefill=2.0)}
    load = random_load(800, 10.0, Lengths(4000), Lengths(50), seed=4)
    shares = Simulation(PROFILE, plans(*names), SimSettings(truth=slow)).run(load).summary().shares
    slow_share, fast_share = (shares.get(plan.spec.name, 0) for plan in plans(*names)[:2])
    assert slow_share < 0.25 * fast_share
    equal = Simulation(PROFILE, plans(*names), SimSettings()).run(load).summary().shares
    assert min(equal.get(plan.spec.name, 0) for plan in plans(*names)[:2]) > 300


def test_an_slo_buys_the_dearer_pool_and_no_slo_the_cheaper():
    names = ("prefill:tp1:fp8:2", "prefill:tp8ep8:fp8:1@20", "decode:tp4ep4:mxfp4:1")
    load = random_load(100, 0.5, Lengths(30_000), Lengths(5), seed=4)
    cheap = Simulation(PROFILE, plans(*names), SimSettings(aim=Aim(0.0))).run(load).summary()
    bound = cheap.ttft_ms["p50"] * 0.5
    quick = Simulation(PROFILE, plans(*names), SimSettings(aim=Aim(0.0, ttft_slo_ms=bound))).run(load).summary(bound)
    assert quick.attainment > 0.9
    assert quick.usd_per_request > cheap.usd_per_request


def test_the_autoscaler_grows_a_pool_under_load_and_shrinks_it_afterwards():
    simulation = Simulation(PROFILE, plans("prefill:tp1:fp8:1", "decode:tp4ep4:mxfp4:1"), SimSettings())
    names = [plan.spec.name for plan in plans("prefill:tp1:fp8:1", "decode:tp4ep4:mxfp4:1")]
    policy = Policy((PoolPolicy(names[0], "prefill", 1, 1, 6, down_delay_s=20.0), PoolPolicy(names[1], "decode", 4, 1, 1)), 16)
    scaling = Scaling(simulation, policy, start_s=5.0, mean=Shape(8000, 50, 8050))
    scaling.start()
    busy = random_load(600, 20.0, Lengths(8000), Lengths(20), seed=3)
    quiet = random_load(100, 0.5, Lengths(8000), Lengths(20), seed=3)
    load = Load(np.concatenate([busy.at_s, quiet.at_s + busy.at_s[-1] + 1]), *(np.concatenate([a, b]) for a, b in (
        (busy.prompt_tokens, quiet.prompt_tokens), (busy.output_tokens, quiet.output_tokens))))  # fmt: skip
    record = simulation.run(load)
    assert max(change.after for change in scaling.changes) >= 3
    assert len(simulation.pools.prefill[names[0]].links) == 1
    assert not record.refusals
    assert_nothing_is_left(simulation)


def test_kv_memory_of_a_group_grows_with_its_gpus():
    assert 0 < capacity_tokens(PROFILE, 1, "mxfp4") * 4 < capacity_tokens(PROFILE, 4, "mxfp4")
    assert capacity_tokens(builtin_profile(None, on_cuda=False), 1, "mxfp4") == 0


@pytest.mark.parametrize(
    "name", ["prefill:tp1", "router:tp1:fp8", "decode:tp3:mxfp4", "decode:tp4ep2:mxfp4", "prefill:tp1:int4x2", "a:b:c@d"]
)
def test_pool_names_that_mean_nothing_are_refused(name):
    with pytest.raises(ConfigError, match="ROLE"):
        plans_of_names([name], PROFILE, 3.0)
