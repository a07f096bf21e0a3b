"""Tables: the numbers against ones worked out by hand, the Pareto front, and that every format holds every row."""

from __future__ import annotations

import csv
import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.profile import builtin_profile
from cluster.tables import PIXELS, decode_points, pareto, prefill_markdown, prefill_rows, to_csv, to_markdown, write_all
from common.errors import ConfigError

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


def test_after_a_sweep_nothing_is_interpolated_where_a_cell_is_missing():
    assert decode_points(H200, 5000, 3.0, only_cells=True) == []
    assert "No cell of this context." in to_markdown(H200, (5000,), 3.0, only_cells=True)
    assert decode_points(H200, 8192, 3.0, only_cells=True) == decode_points(H200, 8192, 3.0)


def test_the_decode_table_tells_the_steps_own_time():
    (point,) = [p for p in decode_points(H200, 8192, 3.0) if (p.layout, p.batch) == ("TP1 mxfp4", 32)]
    assert f"| {point.ms:.2f} | {point.tokens_per_s:.1f} |" in to_markdown(H200, (8192,), 3.0).replace("**", "")


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


def test_every_file_is_written_for_each_model_and_the_page_stands_alone(tmp_path):
    written = write_all([H200, builtin_profile(24, on_cuda=True)], (8192,), 2.5, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in written)
    images = [path.read_bytes() for path in written if path.suffix == ".png"]
    assert len(images) == 2
    for image in images:
        assert image.startswith(b"\x89PNG")
        assert struct.unpack(">II", image[16:24]) == PIXELS
    assert len([path for path in written if path.suffix == ".csv"]) == 4
    assert (tmp_path / "tables.md").read_text().count("## Prefill") == 2
    page = (tmp_path / "tables.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2
    assert "http" not in page
    assert "$2.50 per GPU-hour" in page


def test_profiles_of_one_model_are_not_written_over_each_other(tmp_path):
    with pytest.raises(ConfigError, match="same model"):
        write_all([H200, H200], (8192,), 3.0, tmp_path)
