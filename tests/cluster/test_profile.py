"""Profiles: what ships loads, cells are met exactly, more work is never faster, and a broken file says which field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.profile import (
    Curve,
    DecodeCell,
    PrefillCell,
    Surface,
    builtin_profile,
    decode_surface,
    load_profile,
    prefill_curve,
    save_profile,
)
from cluster.profiles.make_h200 import MODELS, make
from common.errors import ConfigError


def prefill_cells(points) -> list[PrefillCell]:
    return [PrefillCell(tokens=tokens, ms=ms, how="measured") for tokens, ms in points]


def decode_cells(points) -> list[DecodeCell]:
    return [DecodeCell(batch=batch, context_tokens=context, ms=ms, how="measured") for batch, context, ms in points]


def test_the_shipped_h200_files_are_what_the_records_in_the_tree_make():
    for shape, layers in zip(MODELS, (36, 24), strict=True):
        assert builtin_profile(layers, on_cuda=True) == make(shape)


def test_builtin_profile_by_model_and_device():
    assert builtin_profile(36, on_cuda=True).model == "gpt-oss-120b"
    assert builtin_profile(24, on_cuda=True).model == "gpt-oss-20b"
    assert builtin_profile(4, on_cuda=True).hardware == "CPU"
    assert builtin_profile(None, on_cuda=False).hardware == "CPU"


@pytest.mark.parametrize("layers", [36, 24, None])
def test_every_cell_says_how_it_was_obtained_and_is_met_exactly(layers):
    profile = builtin_profile(layers, on_cuda=layers is not None)
    for table in profile.prefill:
        curve = prefill_curve(profile, table.tp, table.ep, table.weights)
        for cell in table.cells:
            assert cell.how == "measured" or cell.note
            assert curve.at(cell.tokens) == pytest.approx(cell.ms)
    for table in profile.decode:
        surface = decode_surface(profile, table.tp, table.ep, table.weights)
        for cell in table.cells:
            assert cell.how == "measured" or cell.note
            assert surface.at(cell.batch, cell.batch * cell.context_tokens) == pytest.approx(cell.ms)


def test_fp8_prefill_wins_on_long_prompts_and_mxfp4_on_short_ones():
    profile = builtin_profile(36, on_cuda=True)
    fp8, mxfp4 = (prefill_curve(profile, 1, 1, weights) for weights in ("fp8", "mxfp4"))
    assert fp8.at(8192) < mxfp4.at(8192)
    assert mxfp4.at(1024) < fp8.at(1024)


points = st.lists(st.tuples(st.integers(1, 200_000), st.floats(0.01, 1e5)), min_size=1, max_size=8, unique_by=lambda p: p[0])


@given(points, st.integers(1, 4_000_000), st.integers(0, 4_000_000))
def test_more_tokens_never_take_less_time(cells, tokens, more):
    curve = Curve(prefill_cells(cells))
    assert curve.at(tokens) <= curve.at(tokens + more) * (1 + 1e-12)


grid = st.lists(
    st.tuples(st.integers(1, 256), st.integers(1, 200_000), st.floats(0.01, 1e4)),
    min_size=1,
    max_size=10,
    unique_by=lambda p: p[:2],
)


@given(grid, st.floats(0, 2000), st.floats(0, 1e8), st.floats(0, 2000), st.floats(0, 1e8))
def test_more_sequences_or_context_never_make_a_step_faster(cells, batch, context, more_batch, more_context):
    surface = Surface(decode_cells(cells))
    here = surface.at(batch, context)
    assert here > 0
    assert here <= surface.at(batch + more_batch, context) * (1 + 1e-9)
    assert here <= surface.at(batch, context + more_context) * (1 + 1e-9)


def test_between_cells_it_is_linear_and_beyond_it_goes_on_sanely():
    curve = Curve(prefill_cells([(1000, 10.0), (2000, 30.0)]))
    assert curve.at(1500) == pytest.approx(20.0)
    assert curve.at(1) == 10.0
    assert curve.at(4000) == pytest.approx(4000 * (0.015 + 0.005 * 2))  # ms per token grew by 0.005 per 1,000 tokens
    surface = Surface(decode_cells([(1, 1000, 2.0), (1, 3000, 4.0), (4, 1000, 5.0), (4, 3000, 13.0)]))
    assert surface.at(1, 2000) == pytest.approx(3.0)
    assert surface.at(4, 8000) == pytest.approx(9.0)
    assert surface.at(1, 5000) > 5.0
    assert surface.at(8, 8000) > surface.at(4, 8000)


def test_a_layout_that_was_not_measured_takes_the_nearest_one_scaled():
    profile = builtin_profile(36, on_cuda=True)
    only_tp1 = profile.model_copy(update={"prefill": tuple(t for t in profile.prefill if t.tp == 1)})
    one, four = prefill_curve(only_tp1, 1, 1, "fp8"), prefill_curve(only_tp1, 4, 4, "fp8")
    assert one.at(8192) / 4 < four.at(8192) < one.at(8192)


def test_save_and_load_give_the_same_profile(tmp_path):
    profile = builtin_profile(24, on_cuda=True)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"prefill": []}, "prefill"),
        (
            {"prefill": [{"tp": 1, "ep": 1, "weights": "fp8", "cells": [{"tokens": 1, "ms": -1, "how": "measured"}]}]},
            "prefill.0.cells.0.ms",
        ),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_a_broken_profile_is_refused_with_the_field(tmp_path, change, field):
    tree = builtin_profile(None, on_cuda=False).model_dump(mode="json") | change
    path = tmp_path / "p.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=field):
        load_profile(path)


def test_a_missing_or_binary_profile_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        load_profile(tmp_path / "bad.json")


def test_profiles_are_frozen():
    with pytest.raises(ValueError):
        builtin_profile(None, on_cuda=False).model = "other"


def test_a_profile_s_label_says_of_what_and_when():
    profile = builtin_profile(36, on_cuda=True)
    assert profile.label == f"gpt-oss-120b on NVIDIA H200 SXM, {profile.created}"
