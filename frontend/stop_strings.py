"""Matches stop strings on the visible text of one choice, as it streams.

Owns held-back text: what may still become a stop string is not sent until it can't. Matching sees characters, so
neither token borders nor control tokens matter. Called by `frontend.choice` for chat and completions alike.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """State of one text. The stop string that is completed first wins; of two completed together, the longer."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that may be sent now. After a match (`matched` is set) nothing more is."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = self._first_match(len(self._held) - len(text))
        if found is not None:
            start, self.matched = found
            sent, self._held = self._held[:start], ""
            return sent
        keep = self._open_suffix()
        cut = len(self._held) - keep
        sent, self._held = self._held[:cut], self._held[cut:]
        return sent

    def flush(self) -> str:
        """The held text, once no more comes."""
        sent, self._held = self._held, ""
        return sent

    def _first_match(self, num_old: int) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first; only matches that end in new text exist."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(num_old - len(stop) + 1, 0))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _open_suffix(self) -> int:
        """Characters at the end that begin some stop string."""
        most = min(len(self._held), self._longest - 1)
        for size in range(most, 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
