"""The figures of `benchmarks/local_cluster.py`, on rows made up here."""

from __future__ import annotations

import pytest

from benchmarks.local_cluster import LEARNING, Learned, Row, compare, config_of, errors_of, learn, simulate
from cluster.load.arrivals import Lengths, random_load
from cluster.profile import builtin_profile, prefill_curve
from common.proto import router_pb2

PROFILE = builtin_profile(None, on_cuda=False)


def test_what_the_simulation_says_is_off_by_nothing_from_itself_and_by_a_tenth_from_a_tenth_less(tmp_path):
    load = random_load(60, 2.0, Lengths(200, 0.5, 1000), Lengths(20, 0.5, 100), seed=3)
    record = simulate(config_of(tmp_path, None), PROFILE, load, Learned(1.0, 1.0, 7.0, 0.0), 1)
    assert record.ttft_ms[0] == pytest.approx(prefill_curve(PROFILE, 1, 1, "mxfp4").at(load.prompt_tokens[0]) + 7.0)
    for factor, off in ((1.0, 0.0), (1.1, -1 / 11)):
        rows = [
            Row(int(p), int(o), t * factor, router_pb2.Prediction(), router_pb2.Prediction(itl_ms=i * factor))
            for p, o, t, i in zip(load.prompt_tokens, load.output_tokens, record.ttft_ms, record.itl_ms, strict=True)
        ]
        assert [row["off"] for row in compare(rows, record).values()] == pytest.approx([off] * 4, abs=1e-6)


def test_slower_engines_are_learned_from_every_other_request(tmp_path):
    load = random_load(120, 2.0, Lengths(200, 0.5, 1000), Lengths(20, 0.5, 100), seed=3)
    truth = Learned(1.3, 1.6, 7.0, 0.0)
    record, curve = simulate(config_of(tmp_path, None), PROFILE, load, truth, 1), prefill_curve(PROFILE, 1, 1, "mxfp4")
    actual = [
        router_pb2.Prediction(prefill_ms=1.3 * curve.at(int(n)) + 4.0, itl_ms=itl)
        for n, itl in zip(load.prompt_tokens, record.itl_ms, strict=True)
    ]
    rows = [Row(int(p), int(o), 0.0, a, a) for p, o, a in zip(load.prompt_tokens, load.output_tokens, actual, strict=True)]
    learned = learn(config_of(tmp_path, None), PROFILE, load, rows, 3.0, 1)
    assert (learned.prefill, learned.itl, learned.dispatch_ms) == pytest.approx((1.3, 1.6, 7.0), rel=0.01)
    assert learned.noise == pytest.approx(0.0, abs=1e-6)
    rows[1::2] = [Row(1, 2, 0.0, router_pb2.Prediction(), router_pb2.Prediction(prefill_ms=1e3, itl_ms=1e3))] * 60
    assert learn(config_of(tmp_path, None), PROFILE, load, rows, 3.0, 1) == learned  # the others are not looked at


def test_errors_are_medians_of_what_came_after_the_corrections_have_learnt():
    good, bad = (router_pb2.Prediction(ttft_ms=x, prefill_ms=x, itl_ms=x, transfer_ms=x, cost_usd=x) for x in (1.0, 9.0))
    rows = [Row(1, 2, 1.0, bad, good)] * LEARNING + [Row(1, 2, 1.0, good, good)] * 3
    assert errors_of(rows) == dict.fromkeys(errors_of(rows), 0.0)
