"""The ranks' cuts cover every tensor: each head, expert, intermediate unit and vocabulary row exactly once."""

from __future__ import annotations

from collections import Counter

import pytest

from model.fixture import fixture_config
from model.layout import RankCut, cut_for_rank

LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 8)]


def cuts(tp: int, ep: int, granule: int, **size: int) -> list[RankCut]:
    return [cut_for_rank(fixture_config(**size), tp=tp, ep=ep, rank=rank, granule=granule) for rank in range(tp)]


@pytest.mark.parametrize("granule", [32, 128])
@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
@pytest.mark.parametrize("intermediate_size", [32, 192, 352, 2880])
def test_heads_vocabulary_and_expert_units_are_covered_once(tp: int, ep: int, granule: int, intermediate_size: int):
    ranks = cuts(tp, ep, granule, intermediate_size=intermediate_size, vocab_size=1003)
    assert [head for cut in ranks for head in cut.qo_heads] == list(range(8))
    assert [row for cut in ranks for row in cut.vocab] == list(range(1003))
    units = Counter((expert, unit) for cut in ranks for expert in cut.experts for unit in cut.intermediate)
    assert set(units.values()) == {1}
    assert len(units) == 8 * intermediate_size


@pytest.mark.parametrize("granule", [32, 128])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_cut_experts_start_on_granules_and_differ_by_one_at_most(tp: int, granule: int):
    pieces = [cut.intermediate for cut in cuts(tp, 1, granule, intermediate_size=2880)]
    assert all(piece.start % granule == 0 for piece in pieces)
    granules = [-(-len(piece) // granule) for piece in pieces]
    assert max(granules) - min(granules) <= 1


@pytest.mark.parametrize(("tp", "expected"), [(2, [0, 1]), (4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])])
def test_kv_heads_are_repeated_on_neighbours_when_ranks_outnumber_them(tp: int, expected: list[int]):
    ranks = cuts(tp, tp, 32)
    assert [list(cut.kv_heads) for cut in ranks] == [[head] for head in expected]
    for cut in ranks:  # query head h uses KV head h // 4, which must be on its rank
        assert {head // 4 for head in cut.qo_heads} == set(cut.kv_heads)


@pytest.mark.parametrize(("tp", "ep", "expected"), [(4, 4, [True] * 4), (4, 1, [True, False, False, False]), (1, 1, [True])])
def test_down_bias_is_added_once_per_expert(tp: int, ep: int, expected: list[bool]):
    assert [cut.adds_down_bias for cut in cuts(tp, ep, 32)] == expected
