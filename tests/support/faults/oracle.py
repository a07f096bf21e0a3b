"""The ledger of a fault run: what was asked, how each request ended, and what must hold afterwards.

Pure but for `Process` figures read from /proc. Filled by `load.py`, judged by the runs of `benchmarks/faults`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

SLACK_S = 1.0  # a request ends by its deadline and this


@dataclass
class Record:
    """One request. Times on the monotonic clock, 0 = has not happened. `end`: ok, cancelled, or a gRPC status name."""

    number: int
    expected: Sequence[int]
    deadline_s: float
    sent_s: float
    ends: list[str] = field(default_factory=list)
    detail: str = ""
    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    is_gapless: bool = True
    attempts: int = 0
    groups: tuple[str, str] = ("", "")

    def is_wrong(self) -> bool:
        """Whether the client saw anything but the tokens of a run without faults, in order."""
        whole = self.ends == ["ok"]
        return not self.is_gapless or self.tokens != list(self.expected[: len(self.tokens) if not whole else None])


@dataclass(frozen=True)
class Fault:
    """Something done to a group or process: when it began and when its effect was over (for a stop, when it went on)."""

    kind: str
    what: str
    began_s: float
    over_s: float


@dataclass
class Oracle:
    records: list[Record] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def lost(self) -> list[Record]:
        """Not ended, or later than its deadline allows."""
        return [r for r in self.records if not r.ends or r.ended_s > r.deadline_s + SLACK_S]

    def double(self) -> list[Record]:
        return [r for r in self.records if len(r.ends) > 1]

    def wrong(self) -> list[Record]:
        return [r for r in self.records if r.is_wrong()]

    def ends(self) -> Counter[str]:
        return Counter(end for r in self.records for end in r.ends)

    def success_percent(self) -> float:
        """Of those that were not cancelled by their client."""
        wanted = [r for r in self.records if r.ends != ["cancelled"]]
        return 100 * sum(r.ends == ["ok"] for r in wanted) / max(1, len(wanted))

    def failed(self) -> list[Record]:
        return [r for r in self.records if r.ends and r.ends[0] not in ("ok", "cancelled")]

    def out_of_blast(self, recovery_s: float) -> list[Record]:
        """Requests that failed though no fault was in effect, or had been up to `recovery_s` before, while they ran."""
        return [r for r in self.failed() if not any(f.began_s <= r.ended_s and r.sent_s <= f.over_s + recovery_s for f in self.faults)]

    def error_delays_s(self, kind: str) -> list[float]:
        """For each failed request that ran when such a fault began, and after which no other came, the time from there to its end."""
        delays = []
        for record in self.failed():
            before = [fault for fault in self.faults if fault.began_s <= record.ended_s]
            last = max(before, key=lambda fault: fault.began_s, default=None)
            if last is not None and last.kind == kind and record.sent_s <= last.began_s:
                delays.append(record.ended_s - last.began_s)
        return delays


def percentile(values: Iterable[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def gaps_s(records: Iterable[Record]) -> list[float]:
    """Times between tokens as clients saw them."""
    return [b - a for r in records for a, b in zip(r.arrivals_s, r.arrivals_s[1:], strict=False)]


@dataclass(frozen=True)
class Footprint:
    """What a process holds. `anonymous_bytes`: its own memory; pages of files come and go as the machine likes."""

    anonymous_bytes: int
    fds: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Raises: FileNotFoundError, ProcessLookupError if the process is gone"""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return cls(int(fields["RssAnon"].split()[0]) * 1024, fds, int(fields["Threads"]))


@dataclass(frozen=True)
class Slope:
    """Growth per hour: the median over all pairs of points (Theil-Sen), and between `low` and `high` the middle half of them."""

    per_hour: float = 0.0
    low: float = 0.0
    high: float = 0.0


def slope_of(points: Iterable[tuple[float, float]], every_s: float = 10.0) -> Slope:
    """Of (seconds, value). Each `every_s` count as one point, their median: what comes and goes within them is no growth. A step early or
    late moves the median little, and shows between low and high."""
    parts: dict[float, list[float]] = {}
    for x, y in points:
        parts.setdefault(x // every_s, []).append(y)
    medians = [(part * every_s, median(values)) for part, values in sorted(parts.items())]
    slopes = [3600 * (y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(medians, 2)]
    if len(slopes) < 2:
        return Slope(*slopes * 3)
    low, middle, high = quantiles(slopes, n=4, method="inclusive")
    return Slope(middle, low, high)
