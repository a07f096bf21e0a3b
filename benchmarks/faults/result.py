"""What a run found, and what it must reach."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.faults.oracle import Oracle, percentile


@dataclass
class Result:
    """`figures`: for the record; `misses`: sentences, one for each figure that is not what it must be."""

    figures: dict[str, object] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)

    def must(self, name: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        self.figures[name] = round(value, 3)
        if at_most is not None and value > at_most:
            self.misses.append(f"{name} is {value:.3f}, at most {at_most:g} is allowed")
        if at_least is not None and value < at_least:
            self.misses.append(f"{name} is {value:.3f}, at least {at_least:g} is wanted")

    def note(self, **figures: object) -> None:
        self.figures |= {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}

    def judge(self, oracle: Oracle) -> None:
        """What every run must hold: each request ends once and in time, and no client saw a wrong token."""
        self.note(requests=len(oracle.records), ends=dict(oracle.ends()))
        self.must("lost", len(oracle.lost()), at_most=0)
        self.must("double", len(oracle.double()), at_most=0)
        self.must("wrong", len(oracle.wrong()), at_most=0)
        took = [r.ended_s - r.sent_s for r in oracle.records if r.ends == ["ok"]]
        self.note(p50_s=percentile(took, 50), p99_s=percentile(took, 99), retried=sum(r.attempts > 1 for r in oracle.records))
        for record in [*oracle.wrong(), *oracle.lost(), *oracle.double()][:5]:
            self.misses.append(f"request {record.number}: {record.ends} {record.detail[:120]} {record.tokens} of {list(record.expected)}")
