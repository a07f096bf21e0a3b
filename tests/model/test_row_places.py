"""Rows of a decode step: dense, and moved as little as possible."""

from __future__ import annotations

import random

from model.row_places import Place, RowPlaces


def test_sequences_stay_and_gaps_are_filled():
    places = RowPlaces()
    assert places.place([5, 6, 7]) == [Place(0, None), Place(1, None), Place(2, None)]
    assert places.place([6, 7]) == [Place(1, 1), Place(0, 2)]  # 7 moves into the gap, 6 stays
    assert places.place([6, 7, 8]) == [Place(1, 1), Place(0, 0), Place(2, None)]
    assert places.place([6, 5]) == [Place(1, 1), Place(0, None)]


def test_rows_are_dense_and_the_same_for_the_same_plans():
    rng = random.Random(3)
    a, b, keys = RowPlaces(), RowPlaces(), []
    for number in range(300):
        keys = [key for key in keys if rng.random() > 0.2] + [number]
        rng.shuffle(keys)
        placed = a.place(keys)
        assert sorted(place.row for place in placed) == list(range(len(keys)))
        assert placed == b.place(keys)
