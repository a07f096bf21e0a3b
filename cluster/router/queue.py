"""Where requests wait for a prefill group: one bounded queue per prefill pool, late binding.

Pure: no clock, no tasks. Producer: `dispatch.py` pushes a ticket per request. Consumer: `pools.py` pops one whenever a group has a free
place. Owns order, bounds and expiry; knows nothing of groups beyond an estimate of when one is free.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.errors import OverloadedError

AGEING_S_PER_LEVEL = 0.1  # one level of priority is worth this head start, so that nobody waits for ever


@dataclass(frozen=True)
class QueueLimits:
    """Bounds of one pool's queue."""

    max_requests: int = 1024
    max_prompt_tokens: int = 8_000_000
    max_wait_s: float = 30.0


@dataclass(eq=False)
class Ticket:
    """One request in line. Times in seconds of the caller's clock; `service_ms`: predicted prefill; `decode_pool`: "" if none is needed;
    `owner`: the request behind it; `avoid`: incarnations that must not get it."""

    prompt_tokens: int
    service_ms: float
    deadline_s: float
    enqueued_s: float
    priority: int = 0
    decode_pool: str = ""
    owner: object = None
    avoid: frozenset[int] = frozenset()
    key: tuple[float, int] = field(default=(0.0, 0), repr=False)

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        return False

    def rank(self, sequence: int) -> None:
        self.key = (self.enqueued_s - self.priority * AGEING_S_PER_LEVEL, sequence)


class PrefillQueue:
    """Ordered by arrival, each level of priority counting as a head start of `AGEING_S_PER_LEVEL`: everyone ages alike, so the order of two
    tickets never changes."""

    def __init__(self, limits: QueueLimits):
        self.limits = limits
        self.prompt_tokens = 0
        self.service_ms = 0.0
        self.version = 0  # counts comings and goings
        self._tickets: list[Ticket] = []  # sorted by key
        self._sequence = 0
        self._ms_by_priority: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def refusal(self, prompt_tokens: int, wait_ms: float) -> str:
        """Why a request of this size can't join now; empty if it can. `wait_ms`: its predicted wait."""
        limits = self.limits
        if len(self._tickets) >= limits.max_requests:
            return f"{len(self._tickets)} requests wait, at most {limits.max_requests} may"
        if self._tickets and self.prompt_tokens + prompt_tokens > limits.max_prompt_tokens:
            return f"{self.prompt_tokens} prompt tokens wait, at most {limits.max_prompt_tokens} may"
        if wait_ms > limits.max_wait_s * 1e3:
            return f"predicted wait {wait_ms / 1e3:.1f} s, at most {limits.max_wait_s:g} s is allowed"
        return ""

    def push(self, ticket: Ticket, wait_ms: float = 0.0, *, accepted_before: bool = False) -> None:
        """`accepted_before`: the request was in a queue already and has to choose again; bounds do not apply, its old arrival counts.

        Raises: OverloadedError with the time after which a place is likely
        """
        refusal = "" if accepted_before else self.refusal(ticket.prompt_tokens, wait_ms)
        if refusal:
            raise OverloadedError(f"queue is full: {refusal}", retry_after_s=self.retry_after_s(wait_ms))
        self._insert(ticket)

    def pop(self, now_s: float, blocked: Callable[[Ticket], bool] = lambda ticket: False) -> Ticket | None:
        """The first ticket that has not expired and is not blocked. Expired ones are never handed out; `expire` takes them."""
        for i, ticket in enumerate(self._tickets):
            if ticket.deadline_s > now_s and not blocked(ticket):
                self._take(i)
                return ticket
        return None

    def remove(self, ticket: Ticket) -> bool:
        """For cancellation. Returns: whether it was still in line"""
        i = bisect.bisect_left(self._tickets, ticket.key, key=lambda t: t.key)
        if i < len(self._tickets) and self._tickets[i] is ticket:
            self._take(i)
            return True
        return False

    def expire(self, now_s: float) -> list[Ticket]:
        """Takes out what has passed its deadline."""
        gone = [t for t in self._tickets if t.deadline_s <= now_s]
        for ticket in gone:
            self.remove(ticket)
        return gone

    def drain(self) -> list[Ticket]:
        """Takes everything out, in order."""
        gone = list(self._tickets)
        for ticket in gone:
            self.remove(ticket)
        return gone

    def ahead_ms(self, priority: int) -> float:
        """Predicted prefill time of everything that would go before a newcomer of this priority."""
        if len(self._ms_by_priority) <= 1 and priority in self._ms_by_priority:
            return self.service_ms
        return sum(ms for level, ms in self._ms_by_priority.items() if level >= priority)

    def retry_after_s(self, wait_ms: float) -> float:
        """Seconds until a place is likely: what must drain before the predicted wait is within bounds, at least one request's time."""
        mean_ms = self.service_ms / len(self._tickets) if self._tickets else 100.0
        return max(mean_ms, wait_ms - self.limits.max_wait_s * 1e3) / 1e3

    def _insert(self, ticket: Ticket) -> None:
        if not ticket.key[1]:
            self._sequence += 1
            ticket.rank(self._sequence)
        bisect.insort(self._tickets, ticket, key=lambda t: t.key)
        self._account(ticket, 1)

    def _take(self, i: int) -> None:
        self._account(self._tickets.pop(i), -1)

    def _account(self, ticket: Ticket, sign: int) -> None:
        self.version += 1
        self.prompt_tokens += sign * ticket.prompt_tokens
        level = self._ms_by_priority.get(ticket.priority, 0.0) + sign * ticket.service_ms
        self._ms_by_priority[ticket.priority] = level
        if not self._tickets:
            self._ms_by_priority.clear()
        self.service_ms = max(0.0, sum(self._ms_by_priority.values()))


def wait_until_free_ms(busy_ms: Iterable[float], ahead_ms: float) -> float:
    """When a newcomer starts, if groups are busy for `busy_ms` each, the least busy first, and `ahead_ms` of work is in line before it: the
    level to which that work fills up the groups. Infinite without groups."""
    level, total = math.inf, ahead_ms
    for count, busy in enumerate(busy_ms, start=1):
        if busy >= level:
            break
        total += busy
        level = total / count
    return level
