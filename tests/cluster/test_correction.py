"""Online correction: converges, stays bounded, shrugs off an outlier, forgets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.correction import HALF_LIFE_S, MAX_LOG, Correction, Delay, OutputLength, SizeCorrection


@pytest.mark.parametrize("ratio", [0.2, 0.8, 1.0, 1.5, 6.0])
def test_converges_within_100_requests(ratio):
    correction = Correction()
    for i in range(100):
        correction.observe(100.0, 100.0 * ratio * (1 + 0.1 * math.sin(i)), now_s=i * 0.1)
    assert correction.factor(10.0) == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize("outlier", [1e-6, 1e9])
def test_one_outlier_moves_it_by_little(outlier):
    correction, by_size = Correction(), SizeCorrection()
    for _ in range(50):
        correction.observe(10.0, 12.0, 0.0)
        by_size.observe(256, 10.0, 12.0, 0.0)
    before, before_by_size = correction.factor(0.0), by_size.factor(256, 0.0)
    correction.observe(10.0, outlier, 0.0)
    by_size.observe(256, 10.0, outlier, 0.0)
    assert abs(correction.factor(0.0) / before - 1) < 0.1
    assert abs(by_size.factor(256, 0.0) / before_by_size - 1) < 0.11


def test_an_error_that_depends_on_the_size_is_learnt_within_100_requests():
    correction = SizeCorrection()
    ratios = {20: 1.6, 100: 1.2, 400: 0.8, 1000: 0.65}
    for i in range(100):
        size = list(ratios)[i % 4]
        correction.observe(size, 50.0, 50.0 * ratios[size], i * 0.1)
    for size, ratio in ratios.items():
        assert correction.factor(size, 10.0) == pytest.approx(ratio, rel=0.1)


def test_sizes_that_were_not_seen_share_the_common_part():
    correction = SizeCorrection()
    for _ in range(100):
        correction.observe(16, 1.0, 2.0, 0.0)
    assert 1.2 < correction.factor(100_000, 0.0) < 2.0


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats(0, 1e6), st.integers(0, 10**7)), max_size=60))
def test_is_bounded_whatever_it_is_fed(observations):
    correction, by_size = Correction(), SizeCorrection()
    now_s = 0.0
    for predicted, actual, wait_s, size in observations:
        now_s += wait_s
        correction.observe(predicted, actual, now_s)
        by_size.observe(size, predicted, actual, now_s)
        assert abs(math.log(correction.factor(now_s))) <= MAX_LOG * (1 + 1e-9)
        assert abs(math.log(by_size.factor(size, now_s))) <= MAX_LOG * (1 + 1e-9)


def test_forgets_when_nothing_is_seen():
    correction, by_size = Correction(), SizeCorrection()
    for _ in range(100):
        correction.observe(1.0, 4.0, 0.0)
        by_size.observe(64, 1.0, 4.0, 0.0)
    assert by_size.factor(64, HALF_LIFE_S) == pytest.approx(by_size.factor(64, 0.0) ** 0.5)
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
