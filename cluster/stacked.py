"""Curves and surfaces of many pools, evaluated at once: what `profile.py` gives one at a time, on grids that hold every pool's points.

Pure; exact, since a piecewise linear function stays itself on a finer grid. Used by the router's board.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from cluster.profile import Curve, Surface


class StackedCurves:
    """Prefill ms of P pools."""

    def __init__(self, curves: Sequence[Curve]):
        self._x = sorted({x for curve in curves for x in curve.points})
        values = np.array([[curve.at(x) for curve in curves] for x in self._x])  # [points, P]
        self._values = list(values)
        self._slopes = list(_slopes(values, np.array(self._x, float)))

    def at(self, tokens: float) -> np.ndarray:
        """Returns: [P] ms"""
        i = max(bisect.bisect_right(self._x, tokens) - 1, 0)
        return self._values[i] + self._slopes[i] * max(tokens - self._x[i], 0.0)


class StackedSurfaces:
    """Decode step ms of P pools, each at a batch of its own that changes seldom (`set_batch`) and a context sum that changes with every
    request (`at`). Sums of contexts begin at 0."""

    def __init__(self, surfaces: Sequence[Surface]):
        sums = sorted({total for surface in surfaces for total in surface.sums})
        self._sums = np.array(sums, float)
        self._batches = [surface.batches for surface in surfaces]
        cells, starts = [], [0]
        for surface in surfaces:
            values = np.array([[surface.at(batch, total) for total in sums] for batch in surface.batches])  # [batches, sums]
            here = np.stack([values, _slopes(values.T, self._sums).T], axis=-1)
            above = np.concatenate([np.diff(here, axis=0), np.zeros_like(here[:1])])
            cells.append(np.concatenate([here, above], axis=-1).reshape(-1, 4))
            starts.append(starts[-1] + len(cells[-1]))
        self._cells = np.concatenate(cells)  # per pool, batch and sum: ms, its slope over sums; and how both change towards the next batch
        self._starts = starts
        self._rows = np.array(starts[:-1])  # where in `_cells` the pool's batch begins
        self._parts = np.zeros((len(surfaces), 1))  # how far the pool's batch lies towards the next one

    def set_batch(self, pool: int, batch: float) -> None:
        """`batch`: sequences in the step."""
        batches = self._batches[pool]
        i = max(bisect.bisect_right(batches, batch) - 1, 0)
        self._rows[pool] = self._starts[pool] + i * len(self._sums)
        self._parts[pool, 0] = max(batch - batches[i], 0.0) / (batches[i + 1] - batches[i]) if i + 1 < len(batches) else 0.0

    def at(self, context_tokens: np.ndarray) -> np.ndarray:
        """`context_tokens` [P]: sum over the sequences. Returns: [P] ms"""
        column = self._sums[1:].searchsorted(context_tokens, "right")
        cells = self._cells.take(self._rows + column, 0)
        at_batch = cells[:, :2] + cells[:, 2:] * self._parts
        return at_batch[:, 0] + at_batch[:, 1] * (context_tokens - self._sums.take(column))


def _slopes(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """`values` [points, n] over `x` [points]. Returns: [points, n] slope from each point on, 0 after the last"""
    steps = np.diff(values, axis=0) / np.diff(x)[:, None]
    return np.concatenate([steps, np.zeros_like(values[:1])])
