"""Tables: the numbers against ones worked out by hand, the Pareto front, and that every format holds every row."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.profile import builtin_profile
from cluster.tables import decode_points, decode_svg, pareto, prefill_markdown, prefill_rows, to_csv, to_html, to_markdown

H200 = builtin_profile(36, on_cuda=True)


def test_prefill_price_is_all_gpus_for_the_time_of_the_prompt():
    (row,) = [row for row in prefill_rows(H200, 3.0) if (row.layout, row.tokens) == ("TP4 EP4 fp8", 8192)]
    cell = next(c for t in H200.prefill if (t.tp, t.weights) == (4, "fp8") for c in t.cells if c.tokens == 8192)
    assert row.ms == cell.ms
    assert row.usd_per_1m == pytest.approx(4 * 3.0 / 3600 * cell.ms / 1e3 / 8192 * 1e6)
    assert row.how == "derived"


def test_decode_price_is_shared_by_the_batch():
    (point,) = [p for p in decode_points(H200, 8192, 3.0) if (p.layout, p.batch) == ("TP1 mxfp4", 32)]
    cell = next(c for t in H200.decode if (t.tp, t.weights) == (1, "mxfp4") for c in t.cells if (c.batch, c.context_tokens) == (32, 8192))
    assert point.tokens_per_s == pytest.approx(1000 / cell.ms)
    assert point.usd_per_1m == pytest.approx(3.0 / 3600 * cell.ms / 1e3 / 32 * 1e6)


def test_a_context_that_was_not_measured_is_marked():
    assert {p.how for p in decode_points(H200, 5000, 3.0)} == {"interpolated"}


@given(st.lists(st.tuples(st.floats(1, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=30))
def test_the_front_is_what_nobody_beats(points):
    front = [p for p, best in zip(points, pareto(points), strict=True) if best]
    assert front
    for speed, price in points:
        assert any(s >= speed and p <= price for s, p in front)
    for speed, price in front:
        assert not any(s >= speed and p <= price and (s > speed or p < price) for s, p in points)


def test_every_format_holds_every_row():
    rows, points = prefill_rows(H200, 3.0), decode_points(H200, 8192, 3.0)
    assert len(list(csv.DictReader(io.StringIO(to_csv(rows))))) == len(rows)
    assert len(list(csv.DictReader(io.StringIO(to_csv(points))))) == len(points)
    assert to_csv([]) == ""
    table = prefill_markdown(H200, 3.0)
    assert all(f"{row.ms:.1f} ms (${row.usd_per_1m:.3f})" in table for row in rows)
    text = to_markdown(H200, (8192, 32768), 3.0)
    assert text.count("## Decode") == 2
    assert "derived" in text


def test_plot_and_page_are_well_formed_and_stand_alone():
    points = decode_points(H200, 8192, 3.0)
    svg = ElementTree.fromstring(decode_svg(points))
    circles = [e for e in svg.iter() if e.tag.endswith("circle")]
    assert len(circles) == len(points)
    assert sum(e.get("fill") != "white" for e in circles) == sum(p.is_best for p in points)
    page = to_html(H200, (8192, 32768), 3.0)
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
