"""Transfer ids, and how old they are: a decode leader makes them, a prefill leader tells by them what has been given up without being told.

    bits 33 to 62   when it was issued: ticks of an eighth of a second since the decode leader's start, for four years
    bits 0 to 32    a count that begins anywhere, so that ids of two decode groups do not meet

Pure: callers pass the time. Used by the decode engine (`TransferIds`) and by `writer_ledger.py` (`Horizon`).
"""

from __future__ import annotations

import math
import secrets

TICK_S = 0.125
_COUNT_BITS = 33


class TransferIds:
    """Units: start_s: of the decode leader, on the clock that `make` is told"""

    def __init__(self, start_s: float):
        self._start_s = start_s
        self._count = secrets.randbits(_COUNT_BITS)

    def make(self, now_s: float) -> int:
        """Returns: a positive id below 2^63 that this group has not made before"""
        self._count = (self._count + 1) % (1 << _COUNT_BITS) or 1
        return int((now_s - self._start_s) / TICK_S) << _COUNT_BITS | self._count


def issued_s(transfer_id: int) -> float:
    """Returns: the beginning of the tick that it was issued in, on its decode group's clock"""
    return (transfer_id >> _COUNT_BITS) * TICK_S


class Horizon:
    """Which ids of one decode group are so old that their first lease is over, as far as one of its writers can know.

    The group's clock shows at least what its newest reservation says, and as much more as has passed since that came, of which a lease is
    counted at most: clocks that go at slightly different rates don't drift apart over an idle night. Never goes back.

    Units: lease_s: of the group's reservations
    """

    def __init__(self, lease_s: float):
        self._lease_s = lease_s
        self._newest_s = -math.inf  # on the group's clock
        self._seen_s = 0.0  # on ours
        self._at_s = -math.inf  # what was reached before the newest one came

    def saw(self, transfer_id: int, now: float) -> None:
        """A reservation of the group is here."""
        if issued_s(transfer_id) > self._newest_s:
            self._at_s = self._reached_s(now)
            self._newest_s, self._seen_s = issued_s(transfer_id), now

    def is_past(self, transfer_id: int, now: float) -> bool:
        """Returns: whether the group has given it up by now, unless its lease was renewed"""
        return issued_s(transfer_id) + TICK_S <= self._reached_s(now)

    def _reached_s(self, now: float) -> float:
        since_s = min(now - self._seen_s, self._lease_s + TICK_S)
        return max(self._at_s, self._newest_s - self._lease_s + since_s)
