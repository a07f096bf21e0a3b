"""Describes all pools to the choice: how long until a group is free, what a step takes, whether there is room, and why a pool is out.

Kept as arrays with one entry per pool (`prefill_entries.py`, `decode_entries.py`). One is worked out anew only when its pool has changed
or it has aged, so that a choice among hundreds of groups costs what a choice among their pools does. Reads pools, changes nothing.
Called by `chooser.py`.
"""

from __future__ import annotations

from cluster.cost_model import Shape
from cluster.profile import Profile
from cluster.router.choice import DecodeSide, Pairs, PrefillSide, pairs_of
from cluster.router.decode_entries import DecodeEntries
from cluster.router.pool import PoolSet
from cluster.router.prefill_entries import PrefillEntries

NEVER = frozenset[int]()


class Board:
    """`prefill` and `decode` describe the pools of the set as they are at `now_s`. `avoid`: incarnations that must not be counted on."""

    def __init__(self, pools: PoolSet, profile: Profile):
        self._pools = pools
        self._profile = profile
        self._version = -1
        self._prefill = PrefillEntries([])
        self._decode = DecodeEntries([], profile)
        self._pairs = pairs_of([], [], {})

    def prefill(self, shape: Shape, now_s: float, priority: int = 0, avoid: frozenset[int] = NEVER) -> PrefillSide:
        self._follow()
        return self._prefill.side(shape, now_s, priority, avoid)

    def decode(self, shape: Shape, now_s: float, avoid: frozenset[int] = NEVER) -> DecodeSide:
        self._follow()
        return self._decode.side(shape, now_s, avoid)

    def pairs(self) -> Pairs:
        self._follow()
        return self._pairs

    def _follow(self) -> None:
        if self._version != self._pools.version:
            self._version = self._pools.version
            self._prefill = PrefillEntries(list(self._pools.prefill.values()))
            self._decode = DecodeEntries(list(self._pools.decode.values()), self._profile)
            prefills, decodes = ([pool.spec for pool in role.values()] for role in (self._pools.prefill, self._pools.decode))
            self._pairs = pairs_of(prefills, decodes, self._pools.not_joinable)
