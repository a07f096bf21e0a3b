"""The figures of `benchmarks/local_cluster.py`, on rows made up here."""

from __future__ import annotations

import pytest

from benchmarks.local_cluster import LEARNING, Row, compare, config_of, errors_of, simulate
from cluster.load.arrivals import Lengths, random_load
from cluster.profile import builtin_profile, prefill_curve
from common.proto import router_pb2

PROFILE = builtin_profile(None, on_cuda=False)


def test_what_the_simulation_says_is_off_by_nothing_from_itself_and_by_a_tenth_from_a_tenth_less(tmp_path):
    load = random_load(60, 2.0, Lengths(200, 0.5, 1000), Lengths(20, 0.5, 100), seed=3)
    record = simulate(config_of(tmp_path, None), PROFILE, load, 7.0, 0.0, 1)
    assert record.ttft_ms[0] == pytest.approx(prefill_curve(PROFILE, 1, 1, "mxfp4").at(load.prompt_tokens[0]) + 7.0)
    for factor, off in ((1.0, 0.0), (1.1, -1 / 11)):
        rows = [
            Row(int(p), int(o), t * factor, router_pb2.Prediction(), router_pb2.Prediction(itl_ms=i * factor))
            for p, o, t, i in zip(load.prompt_tokens, load.output_tokens, record.ttft_ms, record.itl_ms, strict=True)
        ]
        assert [row["off"] for row in compare(rows, record).values()] == pytest.approx([off] * 4, abs=1e-6)


def test_errors_are_medians_of_what_came_after_the_corrections_have_learnt():
    good, bad = (router_pb2.Prediction(ttft_ms=x, prefill_ms=x, itl_ms=x, transfer_ms=x, cost_usd=x) for x in (1.0, 9.0))
    rows = [Row(1, 2, 1.0, bad, good)] * LEARNING + [Row(1, 2, 1.0, good, good)] * 3
    assert errors_of(rows) == dict.fromkeys(errors_of(rows), 0.0)
