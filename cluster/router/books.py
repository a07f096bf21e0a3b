"""What one router knows of the work on one group: what it gave and what others did. Pure accounting, no I/O and no clock.

`PrefillBook` and `DecodeBook` are kept by the links (`groups.py`, `decode_link.py`) and by the simulator's groups, and read by `pool.py`.
"""

from __future__ import annotations

from collections.abc import Hashable

CREDITS = 2  # requests a prefill group is given: one running, one ahead to hide the way there
LATE = 0.05  # part of its prediction that a request is taken to need still, once that has passed


class PrefillBook:
    """Requests that a prefill group was given, in order. Each counts until its first token: from then on only bytes travel."""

    def __init__(self) -> None:
        self.given: dict[Hashable, float] = {}  # predicted ms
        self.free_at_s = 0.0
        self.rest_ms = 0.0
        self._foreign = 0
        self._typical_ms = 0.0
        self._head_since_s = 0.0

    def give(self, key: Hashable, predicted_ms: float, now_s: float) -> None:
        if not self.given:
            self._head_since_s = now_s
        self.given[key] = predicted_ms
        self._typical_ms = predicted_ms
        self._reckon()

    def take_back(self, key: Hashable, now_s: float) -> bool:
        """The group has computed the request's first token, or will not get it. Returns: whether it was there"""
        if self.given.pop(key, None) is None:
            return False
        self._head_since_s = now_s
        self._reckon()
        return True

    def set_foreign(self, requests: int) -> None:
        """Requests of other routers, by the last load seen; each is taken to need what ours needed last."""
        if requests != self._foreign:
            self._foreign = requests
            self._reckon()

    def busy_ms(self, now_s: float) -> float:
        """Predicted time until the group is free."""
        return max((self.free_at_s - now_s) * 1e3, self.rest_ms)

    @property
    def is_idle(self) -> bool:
        return not self.given and self.rest_ms == 0.0

    @property
    def late_at_s(self) -> float:
        """From this moment on the first request takes longer than predicted, and `busy_ms` stays the same."""
        return self.free_at_s - self.rest_ms / 1e3

    def rank(self) -> tuple[bool, float]:
        """Least first: the idle, longest idle first, then who is free soonest."""
        return (not self.is_idle, self.free_at_s if self.given else self.free_at_s + self.rest_ms / 1e3)

    def _reckon(self) -> None:
        """`free_at_s` if all goes as predicted; `rest_ms`: the least that is left however late the first request is."""
        foreign = self._foreign * self._typical_ms
        if self.given:
            total = sum(self.given.values()) + foreign
            self.free_at_s = self._head_since_s + total / 1e3
            self.rest_ms = total - (1 - LATE) * next(iter(self.given.values()))
        else:
            self.free_at_s = self._head_since_s
            self.rest_ms = foreign


class DecodeBook:
    """Sequences on a decode group: own ones count from the moment they are attached, those of other routers by the group's last load."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self.free_blocks = 0
        self.total_blocks = 0  # 0: the group has not told yet
        self._contexts: dict[Hashable, int] = {}  # tokens of own sequences
        self._own_context_tokens = 0
        self._foreign = 0
        self._foreign_mean_tokens = 0.0

    def attach(self, key: Hashable, context_tokens: int) -> None:
        self._contexts[key] = context_tokens
        self._own_context_tokens += context_tokens

    def detach(self, key: Hashable) -> bool:
        """Returns: whether it was there"""
        tokens = self._contexts.pop(key, None)
        if tokens is None:
            return False
        self._own_context_tokens -= tokens
        return True

    def take_load(self, running: int, context_tokens: int, free_blocks: int, total_blocks: int) -> None:
        """What the group says of itself."""
        self._foreign = max(0, running - len(self._contexts))
        self._foreign_mean_tokens = context_tokens / max(running, 1)
        self.free_blocks, self.total_blocks = free_blocks, total_blocks

    @property
    def batch(self) -> int:
        """Sequences that run here or are on the way."""
        return len(self._contexts) + self._foreign

    @property
    def context_tokens(self) -> float:
        """Sum of their contexts."""
        return self._own_context_tokens + self._foreign * self._foreign_mean_tokens

    def has_room(self, blocks: int) -> bool:
        """By the last load seen; only `Reserve` knows. `blocks`: full-layer blocks of the worst case."""
        return self.batch < self.max_batch and (not self.total_blocks or self.free_blocks >= blocks)

    def rank(self) -> tuple[int, float, int]:
        """Least first: who gets the next sequence."""
        return (self.batch, self.context_tokens, -self.free_blocks)
