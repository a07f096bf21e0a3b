"""Which sequences the next step takes, and which steps are under way: the device works on one step while the host is busy with the last.

Pure: no device, no clock. Owned by the leader's engine thread. A step may be launched before the tokens of the one before are known; so a
sequence that ends by what it samples takes part in one step too many, whose token nobody gets, and its blocks are its own until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from decode_worker.sequence import Sequence
from model.sampling import GREEDY


@dataclass(frozen=True)
class Row:
    """One sequence in one step. `follows`: its token is what the step before picks; else it is the sequence's `next_token`."""

    sequence: Sequence
    position: int
    follows: bool


class RunAhead:
    """`lookahead`: steps that may be launched while the oldest one is not finished; 0: each is finished before the next."""

    def __init__(self, lookahead: int):
        self._lookahead = lookahead
        self._under_way: deque[list[Row]] = deque()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def next_rows(self, running: Iterable[Sequence]) -> list[Row]:
        """The rows of a step that can be launched now; none if there is nothing to do, or if the oldest step has to be finished first:
        because too many are under way, or because a sequence's next token needs the host (masks, bias, penalties)."""
        if self.num_under_way > self._lookahead:
            return []
        rows = []
        for sequence in running:
            ahead = self.count(sequence)
            if sequence.tokens_left <= ahead:
                continue
            if ahead and sequence.state.on_device() is None:
                return []
            rows.append(Row(sequence, sequence.position + ahead, follows=ahead > 0))
        return rows

    def launched(self, rows: list[Row]) -> None:
        self._under_way.append(rows)

    def must_finish(self, has_launched: bool) -> bool:
        """Whether the oldest step is to be waited for now. Units: has_launched: a step was launched in this turn"""
        return self.num_under_way > self._lookahead or (self.num_under_way > 0 and not has_launched)

    def finished(self) -> list[Row]:
        """Takes the oldest step off. Returns: its rows"""
        return self._under_way.popleft()

    def count(self, sequence: Sequence) -> int:
        """Steps under way that this sequence takes part in: its blocks are written to until they are finished."""
        return sum(row.sequence is sequence for rows in self._under_way for row in rows)


def is_greedy(rows: list[Row]) -> bool:
    """Whether every row's token is the likeliest one, without a look at other logits."""
    return all(row.sequence.state.on_device() == GREEDY for row in rows)
