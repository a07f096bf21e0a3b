"""Loads: random ones have the rate and burstiness asked for; both public trace formats are read, and bad lines are named."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.load.arrivals import Lengths, mixed_load, random_load
from cluster.load.traces import read_trace
from common.errors import ConfigError


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_random_gaps_have_the_rate_and_the_burstiness(burstiness):
    load = random_load(20_000, 50.0, Lengths(1000, 0.5), Lengths(200), burstiness=burstiness, seed=3)
    gaps = np.diff(load.at_s)
    assert load.rate == pytest.approx(50.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert load.prompt_tokens.mean() == pytest.approx(1000, rel=0.05)
    assert set(load.output_tokens) == {200}


def test_the_same_seed_gives_the_same_load_and_a_new_rate_the_same_requests():
    first, second = (random_load(100, 5.0, Lengths(50, 1.0), Lengths(5, 1.0), seed=9) for _ in range(2))
    assert (first.at_s == second.at_s).all()
    faster = first.at_rate(10.0)
    assert faster.rate == pytest.approx(10.0)
    assert (faster.prompt_tokens == first.prompt_tokens).all()


def test_parts_are_merged_in_order_of_arrival():
    both = mixed_load([random_load(50, 5.0, Lengths(10), Lengths(2), seed=1), random_load(50, 5.0, Lengths(99), Lengths(2), seed=2)])
    assert (np.diff(both.at_s) >= 0).all()
    assert sorted(set(both.prompt_tokens)) == [10, 99]


def test_a_mooncake_trace_is_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 6755, "output_length": 500, "hash_ids": [46, 47]}\n'
        '{"timestamp": 1000, "input_length": 7322, "output_length": 490, "hash_ids": [46]}\n\n'
    )
    load = read_trace(path)
    assert load.at_s.tolist() == [0.0, 2.0]
    assert load.prompt_tokens.tolist() == [7322, 6755]
    assert list(load.prefixes) == [(46,), (46, 47)]


def test_an_azure_trace_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    load = read_trace(path)
    assert load.at_s.tolist() == pytest.approx([0.0, 4.314579])
    assert load.output_tokens.tolist() == [44, 109]
    assert load.prefixes == ()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"timestamp": 1, "input_length": 5}\n', "line 1: 'output_length' is missing"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2}\n{"timestamp": 1, "input_length": 0, "output_length": 2}\n', "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2"),
        ("a,b\n1,2\n", "TIMESTAMP"),
        ("", "no requests"),
    ],
)
def test_bad_traces_are_refused_by_line(tmp_path, text, names):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=names):
        read_trace(path)


def test_impossible_loads_are_refused():
    with pytest.raises(ConfigError, match="rate"):
        random_load(5, 0.0, Lengths(1), Lengths(1))
