"""The ledger of fault runs finds what it is there to find."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.fake_model import expected_tokens, seeded_tokens
from tests.support.faults.load import guard
from tests.support.faults.oracle import Fault, Footprint, Oracle, Record, Slope, percentile, slope_of


def record(**changes) -> Record:
    fields = {"number": 1, "expected": [5, 6, 7], "deadline_s": 20.0, "sent_s": 10.0, "ends": ["ok"], "ended_s": 12.0, "tokens": [5, 6, 7]}
    return Record(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "lost", "double", "wrong"),
    [
        ({}, 0, 0, 0),
        ({"ends": [], "ended_s": 0.0}, 1, 0, 0),
        ({"ended_s": 21.5}, 1, 0, 0),
        ({"ends": ["ok", "ok"]}, 0, 1, 0),
        ({"ends": ["ok", "UNAVAILABLE"]}, 0, 1, 0),
        ({"tokens": [5, 6, 8]}, 0, 0, 1),
        ({"tokens": [5, 6]}, 0, 0, 1),
        ({"tokens": [5, 6, 7, 8]}, 0, 0, 1),
        ({"tokens": []}, 0, 0, 1),
        ({"is_gapless": False}, 0, 0, 1),
        ({"ends": ["UNAVAILABLE"], "tokens": [5, 6]}, 0, 0, 0),
        ({"ends": ["UNAVAILABLE"], "tokens": [6]}, 0, 0, 1),
        ({"ends": ["cancelled"], "tokens": []}, 0, 0, 0),
    ],
)
def test_each_way_of_going_wrong_is_counted_once(changes, lost, double, wrong):
    oracle = Oracle([record(), record(**changes)])
    assert (len(oracle.lost()), len(oracle.double()), len(oracle.wrong())) == (lost, double, wrong)


def test_a_failure_is_within_the_blast_only_of_faults_that_touched_its_life():
    oracle = Oracle([record(ends=["UNAVAILABLE"], tokens=[])])
    for began, over, within in ((11.0, 11.0, True), (8.0, 8.5, True), (5.0, 6.0, False), (12.5, 13.0, False), (2.0, 9.0, True)):
        oracle.faults = [Fault("kill", "g", began, over)]
        assert (oracle.out_of_blast(2.0) == []) is within


@pytest.mark.parametrize(("before", "ends"), [([], ["cancelled"]), (["ok"], ["ok"])], ids=["under way", "all was there"])
async def test_a_client_that_leaves_ends_only_what_had_not_ended(before, ends):
    left = record(ends=list(before), ended_s=0.0)

    async def read() -> None:
        raise asyncio.CancelledError

    await guard(left, read)
    assert left.ends == ends
    assert left.ended_s > 0


@pytest.mark.parametrize(
    ("points", "expected"),
    [([], (0, 0, 0)), ([(1.0, 5.0)], (0, 0, 0)), ([(1.0, 5.0), (11.0, 6.0)], (360, 360, 360)), ([(t, 9.0) for t in range(99)], (0, 0, 0))],
    ids=["nothing", "one point", "two points", "level"],
)
def test_growth_of_few_and_of_level_points(points, expected):
    assert slope_of(points) == Slope(*map(float, expected))


def test_growth_of_a_line_is_its_slope_and_noise_widens_the_middle_half_only():
    line = [(float(t), 100 + 0.01 * t) for t in range(300)]
    found = slope_of(line)
    assert (found.low, found.per_hour, found.high) == pytest.approx((36.0, 36.0, 36.0))
    rng = random.Random(3)
    noisy = slope_of([(t, y + rng.gauss(0, 0.5)) for t, y in line])
    assert noisy.per_hour == pytest.approx(36.0, abs=4)
    assert noisy.low < 36.0 < noisy.high


@pytest.mark.parametrize("at_s", [30, 270], ids=["early", "late"])
def test_one_step_or_a_spike_is_no_growth(at_s):
    assert slope_of([(t, 100.0 + (t >= at_s)) for t in range(300)]) == Slope(0.0, 0.0, 0.0)
    assert slope_of([(t, 100.0 + 50 * (at_s <= t < at_s + 4)) for t in range(300)]) == Slope(0.0, 0.0, 0.0)


def test_a_step_in_the_middle_and_steps_in_a_row_show():
    middle = slope_of([(t, 100.0 + (t >= 150)) for t in range(300)])
    assert middle.low == 0.0
    assert middle.high > 20.0
    stairs = slope_of([(t, 100.0 + t // 50) for t in range(600)])  # 1 in 50 s
    assert stairs.per_hour == pytest.approx(72.0, rel=0.05)


def test_percentiles_and_footprints():
    assert [percentile([3, 1, 2], p) for p in (0, 50, 99)] == [1, 2, 3]
    import os

    footprint = Footprint.of(os.getpid())
    assert footprint.anonymous_bytes > 1e6
    assert footprint.threads >= 1


def test_the_fake_model_without_sampling_is_the_greedy_one():
    from common.requests import SamplingParams

    prompt = list(range(3, 180))
    assert seeded_tokens(prompt, SamplingParams(max_tokens=12, temperature=0.0)) == expected_tokens(prompt, 12)
