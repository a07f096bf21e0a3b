"""Online correction: converges, stays bounded, shrugs off an outlier, forgets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.correction import HALF_LIFE_S, MAX_FACTOR, Correction, Delay, OutputLength


@pytest.mark.parametrize("ratio", [0.2, 0.8, 1.0, 1.5, 6.0])
def test_converges_within_100_requests(ratio):
    correction = Correction()
    for i in range(100):
        correction.observe(100.0, 100.0 * ratio * (1 + 0.1 * math.sin(i)), now_s=i * 0.1)
    assert correction.factor(10.0) == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize("outlier", [1e-6, 1e9])
def test_one_outlier_moves_it_by_less_than_ten_percent(outlier):
    correction = Correction()
    for _ in range(50):
        correction.observe(10.0, 12.0, 0.0)
    before = correction.factor(0.0)
    correction.observe(10.0, outlier, 0.0)
    assert abs(correction.factor(0.0) / before - 1) < 0.1


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats(0, 1e6)), max_size=60))
def test_is_bounded_whatever_it_is_fed(observations):
    correction = Correction()
    now_s = 0.0
    for predicted, actual, wait_s in observations:
        now_s += wait_s
        correction.observe(predicted, actual, now_s)
        assert 1 / MAX_FACTOR <= correction.factor(now_s) <= MAX_FACTOR


def test_forgets_when_nothing_is_seen():
    correction = Correction()
    for _ in range(100):
        correction.observe(1.0, 4.0, 0.0)
    assert correction.factor(0.0) == pytest.approx(4.0, rel=0.05)
    assert correction.factor(HALF_LIFE_S) == pytest.approx(2.0, rel=0.05)
    assert correction.factor(100 * HALF_LIFE_S) == pytest.approx(1.0)


def test_delay_follows_and_ignores_what_is_no_number():
    delay = Delay()
    for _ in range(100):
        delay.observe(5.0)
    assert delay.ms == pytest.approx(5.0, rel=0.01)
    delay.observe(math.nan)
    delay.observe(1e9)
    assert delay.ms < 7.0


def test_output_length_follows_the_mean():
    length = OutputLength(256)
    for _ in range(200):
        length.observe(40)
    assert length.tokens == pytest.approx(40, rel=0.05)
