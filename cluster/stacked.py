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
        self._y = np.array([[curve.at(x) for curve in curves] for x in self._x])

    def at(self, tokens: float) -> np.ndarray:
        """Returns: [P] ms"""
        x = self._x
        if tokens <= x[0]:
            return self._y[0]
        if tokens >= x[-1]:
            return self._y[-1]
        i = bisect.bisect_right(x, tokens)
        below = self._y[i - 1]
        return below + (self._y[i] - below) * ((tokens - x[i - 1]) / (x[i] - x[i - 1]))


class StackedSurfaces:
    """Decode step ms of P pools, each at a batch of its own that changes seldom (`set_batch`) and a context sum that changes with every
    request (`at`)."""

    def __init__(self, surfaces: Sequence[Surface]):
        sums = sorted({total for surface in surfaces for total in surface.sums})
        self._sums = np.array(sums, float)
        self._gaps = np.diff(self._sums)
        self._batches = [surface.batches for surface in surfaces]
        self._columns = [
            np.array([[surface.at(batch, total) for total in sums] for batch in surface.batches]) for surface in surfaces
        ]  # per pool [batches, sums]
        self._steps = np.empty((len(surfaces), len(sums)))  # ms at the pool's batch, over sums
        self._starts = np.arange(len(surfaces)) * len(sums)
        for pool in range(len(surfaces)):
            self.set_batch(pool, 1.0)

    def set_batch(self, pool: int, batch: float) -> None:
        """`batch`: sequences in the step."""
        batches, columns = self._batches[pool], self._columns[pool]
        if batch <= batches[0]:
            self._steps[pool] = columns[0]
        elif batch >= batches[-1]:
            self._steps[pool] = columns[-1]
        else:
            i = bisect.bisect_right(batches, batch)
            part = (batch - batches[i - 1]) / (batches[i] - batches[i - 1])
            self._steps[pool] = columns[i - 1] + part * (columns[i] - columns[i - 1])

    def at(self, context_tokens: np.ndarray) -> np.ndarray:
        """`context_tokens` [P]: sum over the sequences. Returns: [P] ms"""
        row = np.minimum(self._sums.searchsorted(context_tokens, "right") - 1, len(self._gaps) - 1)  # sums begin at 0
        part = np.minimum((context_tokens - self._sums[row]) / self._gaps[row], 1.0)
        steps, place = self._steps.ravel(), self._starts + row
        low = steps[place]
        return low + part * (steps[place + 1] - low)
