"""What finished requests teach about one pool: a factor on the profile's times, a constant delay, and how long outputs get.

Pure; the caller gives the time. Bounded, forgetful, and moved little by any single observation. Kept by the router, read by the cost model.
"""

from __future__ import annotations

import math

ALPHA = 0.1  # weight of one observation once warm
MAX_STEP = math.log(2.0)  # an observation counts as at most twice or half of what was expected
MAX_FACTOR = 16.0
HALF_LIFE_S = 600.0  # a pool that looked slow and is no longer chosen gets another chance


class Correction:
    """Factor on a predicted time: EWMA of `log(actual / predicted)`, surprises cut to `MAX_STEP`; drifts back to 1 when unfed."""

    def __init__(self) -> None:
        self._log = 0.0
        self._count = 0
        self._seen_s = 0.0

    def factor(self, now_s: float) -> float:
        return math.exp(self._faded(now_s)) if self._log else 1.0

    def observe(self, predicted_ms: float, actual_ms: float, now_s: float) -> None:
        """`predicted_ms` is the profile's own figure, without this factor. Values that are no times are ignored."""
        if not (predicted_ms > 0 and actual_ms > 0 and math.isfinite(predicted_ms) and math.isfinite(actual_ms)):
            return
        state = self._faded(now_s)
        surprise = math.log(actual_ms / predicted_ms) - state
        step = max(-MAX_STEP, min(MAX_STEP, surprise))
        self._count += 1
        bound = math.log(MAX_FACTOR)
        self._log = max(-bound, min(bound, state + max(ALPHA, 1 / (self._count + 2)) * step))
        self._seen_s = now_s

    def _faded(self, now_s: float) -> float:
        return self._log * 0.5 ** (max(0.0, now_s - self._seen_s) / HALF_LIFE_S)


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
