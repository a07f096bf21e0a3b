"""The shipped H200 profiles say what was measured where it was, and scale what lies between."""

from __future__ import annotations

import pytest

from cluster.profiles.make_h200 import MODELS, Correction, decode_table, prefill_estimate, prefill_table

SHAPE = MODELS[0]


def record(ms, **key):
    return {
        "model": SHAPE.name, "layout": "tp1", "weights": "fp8", "median_ms": ms, "min_ms": ms - 1, "max_ms": ms + 2, "date": "2026-12-01",
        "commit": "c0ffee", **key,
    }  # fmt: skip


def test_a_record_is_its_cell_and_the_newest_one_counts():
    table = prefill_table(SHAPE, "fp8", 1, 1, [record(300.0, tokens=8192), record(200.0, tokens=8192)])
    cell = next(cell for cell in table.cells if cell.tokens == 8192)
    assert (cell.ms, cell.spread_ms, cell.how) == (200.0, 3.0, "measured")
    assert "c0ffee" in cell.note
    assert all(cell.how == "derived" for cell in table.cells if cell.tokens != 8192)


def test_a_record_of_another_model_layout_or_format_counts_for_nothing():
    plain = prefill_table(SHAPE, "fp8", 1, 1, [])
    others = [record(1.0, tokens=8192) | other for other in ({"model": "x"}, {"layout": "tp2"}, {"weights": "mxfp4"})]
    assert prefill_table(SHAPE, "fp8", 1, 1, others) == plain


def test_other_cells_are_scaled_but_for_what_ranks_spend_on_each_other():
    alone = prefill_estimate(SHAPE, 8192, "fp8", 1)
    half = [record(alone.own_ms / 2, tokens=8192)]
    for tp in (1, 4):
        estimate = prefill_estimate(SHAPE, 1024, "fp8", tp)
        cell = next(cell for cell in prefill_table(SHAPE, "fp8", tp, tp, half).cells if cell.tokens == 1024)
        assert cell.ms == pytest.approx(estimate.own_ms / 2 + estimate.comm_ms, abs=1e-3)
        assert "x 0.500" in cell.note


def test_corrections_go_by_the_logarithm_and_stay_beyond_the_ends():
    correction = Correction({8: 1.0, 32: 2.0})
    assert [correction.at(x) for x in (1, 8, 16, 32, 128)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.0])
    assert Correction({}).at(5) == 1.0


def test_a_step_measured_at_another_context_is_its_own_cell_alone():
    records = [record(5.0, batch=8, context=8192), record(50.0, batch=8, context=32768)]
    cells = {(c.batch, c.context_tokens): c for c in decode_table(SHAPE, "fp8", 1, 1, records).cells}
    assert (cells[8, 32768].ms, cells[8, 32768].how) == (50.0, "measured")
    plain = {(c.batch, c.context_tokens): c for c in decode_table(SHAPE, "fp8", 1, 1, []).cells}
    ratio = cells[8, 8192].ms / plain[8, 8192].ms
    assert cells[8, 1024].ms == pytest.approx(plain[8, 1024].ms * ratio, rel=1e-3)
