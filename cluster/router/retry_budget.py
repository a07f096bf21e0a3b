"""How many of a pool's requests may be tried again: a share of what it gets, so that a pool that fails is not drowned in retries.

Pure. One per pool; `dispatch.py` pays in for each request and takes out for each retry that the pool's groups caused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RetryLimits:
    """`max_per_request`: fresh attempts after a group died that had begun on the request; `patience_s`: how long to wait for a healthy
    group where there is none; the rest as in `RetryBudget`."""

    max_per_request: int = 1
    ratio: float = 0.2
    burst: int = 256
    patience_s: float = 0.25


class RetryBudget:
    """A bucket that starts full. `ratio`: retries that each request pays for; `burst`: retries that are always possible in a row."""

    def __init__(self, ratio: float, burst: int):
        self._ratio = ratio
        self._burst = burst
        self._left = float(burst)

    def note_request(self) -> None:
        self._left = min(self._burst, self._left + self._ratio)

    def take(self) -> bool:
        """Whether a retry is within the budget; it is spent then."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
