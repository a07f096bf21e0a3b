"""What finished requests teach about one pool: factors on the profile's times, a constant delay, and how long outputs get.

Pure; the caller gives the time. Bounded, forgetful, and moved little by any single observation. Kept by the router, read by the cost model.
"""

from __future__ import annotations

import math

ALPHA = 0.1  # weight of one observation once warm
ALPHA_GLOBAL, ALPHA_LOCAL = 0.06, 0.08  # of a correction by size: its two parts
MAX_STEP = math.log(2.0)  # an observation counts as at most twice or half of what was expected
MAX_LOG = math.log(16.0)  # bound of a factor
HALF_LIFE_S = 600.0  # a pool that looked slow and is no longer chosen gets another chance
KNOTS = 10  # sizes 1, 4, 16, ... 4 ** 9


class Correction:
    """Factor on a predicted time: EWMA of `log(actual / predicted)`, surprises cut to `MAX_STEP`; drifts back to 1 when unfed."""

    def __init__(self) -> None:
        self._log = 0.0
        self._count = 0
        self._seen_s = 0.0

    def factor(self, now_s: float) -> float:
        return math.exp(self._log * _faded(now_s - self._seen_s)) if self._log else 1.0

    def observe(self, predicted_ms: float, actual_ms: float, now_s: float) -> None:
        """`predicted_ms` is the profile's own figure, without this factor. Values that are no times are ignored."""
        expected = self._log * _faded(now_s - self._seen_s)
        surprise = _surprise(predicted_ms, actual_ms, expected)
        if surprise is None:
            return
        self._count += 1
        self._log = _bounded(expected + max(ALPHA, 1 / (self._count + 2)) * surprise)
        self._seen_s = now_s


class SizeCorrection:
    """As `Correction`, where the error depends on the size of the request too: a common part, and one per power of four of the size
    [tokens], linear in between. Sizes that were not seen yet share the common part."""

    def __init__(self) -> None:
        self._common = 0.0
        self._local = [0.0] * KNOTS
        self._seen_s = 0.0

    def factor(self, size: int, now_s: float) -> float:
        return math.exp(_bounded(self._log(size) * _faded(now_s - self._seen_s)))

    def logs(self, now_s: float) -> list[float]:
        """Logarithms of the factor at the knots; between them it is `exp` of what lies linear between (see `place`)."""
        fade = _faded(now_s - self._seen_s)
        return [_bounded((self._common + local) * fade) for local in self._local]

    def observe(self, size: int, predicted_ms: float, actual_ms: float, now_s: float) -> None:
        """`predicted_ms` is the profile's own figure, without this factor. Values that are no times are ignored."""
        fade = _faded(now_s - self._seen_s)
        surprise = _surprise(predicted_ms, actual_ms, _bounded(self._log(size) * fade))
        if surprise is None:
            return
        knot, part = place(size)
        self._local = [_bounded(x * fade) for x in self._local]
        self._local[knot] = _bounded(self._local[knot] + ALPHA_LOCAL * (1 - part) * surprise)
        self._local[knot + 1] = _bounded(self._local[knot + 1] + ALPHA_LOCAL * part * surprise)
        self._common = _bounded(self._common * fade + ALPHA_GLOBAL * surprise)
        self._seen_s = now_s

    def _log(self, size: int) -> float:
        knot, part = place(size)
        return self._common + (1 - part) * self._local[knot] + part * self._local[knot + 1]


class Delay:
    """A constant part in ms: EWMA, each observation cut to at most 2 ms above twice the present value."""

    def __init__(self) -> None:
        self.ms = 0.0

    def observe(self, actual_ms: float) -> None:
        if math.isfinite(actual_ms):
            self.ms += ALPHA * (max(0.0, min(actual_ms, 2 * self.ms + 2.0)) - self.ms)


class OutputLength:
    """Mean output length [tokens] of finished requests, for those that set no `max_tokens`."""

    def __init__(self, first_guess_tokens: float = 256.0):
        self.tokens = first_guess_tokens

    def observe(self, tokens: int) -> None:
        self.tokens += ALPHA / 2 * (tokens - self.tokens)


def _faded(idle_s: float) -> float:
    return 0.5 ** (max(0.0, idle_s) / HALF_LIFE_S)


def _bounded(log_factor: float) -> float:
    return max(-MAX_LOG, min(MAX_LOG, log_factor))


def _surprise(predicted_ms: float, actual_ms: float, expected_log: float) -> float | None:
    """How far `actual / predicted` lies from what was expected, in logs and cut; None if these are no times."""
    if not (predicted_ms > 0 and actual_ms > 0 and math.isfinite(predicted_ms) and math.isfinite(actual_ms)):
        return None
    return max(-MAX_STEP, min(MAX_STEP, math.log(actual_ms) - math.log(predicted_ms) - expected_log))


def place(size: int) -> tuple[int, float]:
    """Returns: the knot at or below a size [tokens], and how far it lies towards the next one"""
    x = min(math.log2(max(size, 1)) / 2, KNOTS - 1.0)
    knot = min(int(x), KNOTS - 2)
    return knot, x - knot
