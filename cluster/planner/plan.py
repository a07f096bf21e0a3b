"""Simulates candidates from the cheapest on until it knows the best, the next best and the best of the other kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.load.arrivals import Load
from cluster.planner.candidates import Candidate, Slo, candidates
from cluster.profile import Profile
from cluster.router.choice import Aim
from cluster.sim.aggregated import run_aggregated
from cluster.sim.record import Record, Summary
from cluster.sim.simulation import SimSettings, Simulation

NOISE = 0.05
MOST_RUNS = 60


@dataclass(frozen=True)
class Outcome:
    """A candidate with what it came to. `limit`: which bound it breaks, or comes closest to; `meets`: the SLO."""

    candidate: Candidate
    summary: Summary
    ttft_within: float
    itl_within: float
    meets: bool

    @property
    def limit(self) -> str:
        name, part = min((("TTFT", self.ttft_within), ("ITL", self.itl_within)), key=lambda pair: pair[1])
        pool, use = max(self.summary.utilisation.items(), key=lambda pair: pair[1], default=("", 0.0))
        return f"{name} ({part:.1%} within), {pool} is busy {use:.0%} of the time"


@dataclass(frozen=True)
class Answer:
    """`best` None: nothing within the GPUs meets the SLO, `closest` comes nearest. `next_best`: the second cheapest that does; `other`: the
    cheapest of the kind that `best` is not; `cheaper`: the dearest configuration below `best` that was tried and failed: what limits it."""

    best: Outcome | None
    next_best: Outcome | None
    other: Outcome | None
    cheaper: Outcome | None
    closest: Outcome | None
    tried: int

    @property
    def verdict(self) -> str:
        if self.best is None:
            return "nothing within these GPUs meets the SLO"
        if self.best.candidate.kind == "aggregated":
            if self.other is None:
                return "do not disaggregate this: only serving prefill and decode on the same GPUs meets the SLO"
            more = self.other.candidate.usd_per_hour / self.best.candidate.usd_per_hour - 1
            return f"do not disaggregate this: separate pools cost {more:.0%} more"
        if self.other is None:
            return "disaggregate: serving prefill and decode on the same GPUs does not meet the SLO here"
        more = self.other.candidate.usd_per_hour / self.best.candidate.usd_per_hour - 1
        return f"disaggregate: serving on the same GPUs costs {more:.0%} more"


def make_plan(
    profile: Profile,
    load: Load,
    slo: Slo,
    gpus: int,
    usd_per_gpu_hour: float,
    on_progress: Callable[[int, Candidate], None] = lambda tried, candidate: None,
) -> Answer:
    """Raises: ConfigError for a load without requests"""
    outcomes: list[Outcome] = []
    lost: list[Candidate] = []
    for candidate in candidates(profile, load, slo, gpus, usd_per_gpu_hour):
        good = [outcome for outcome in outcomes if outcome.meets]
        kinds = {outcome.candidate.kind for outcome in good}
        if len(outcomes) >= MOST_RUNS or (len(good) >= 2 and len(kinds) == 2):
            break
        if len(good) >= 2 and candidate.kind in kinds:
            continue
        if any(_is_less(candidate, failed) for failed in lost):
            continue  # a larger one of the same pools has failed already
        on_progress(len(outcomes), candidate)
        outcome = try_candidate(profile, load, slo, candidate)
        outcomes.append(outcome)
        if not outcome.meets:
            lost.append(candidate)
    return _answer(outcomes)


def try_candidate(profile: Profile, load: Load, slo: Slo, candidate: Candidate) -> Outcome:
    record: Record
    if candidate.kind == "aggregated":
        (plan,) = candidate.plans
        record = run_aggregated(profile, plan.spec, plan.groups, load)
    else:
        settings = SimSettings(aim=Aim(0.5, slo.ttft_ms, slo.itl_ms), noise=NOISE)
        record = Simulation(profile, candidate.plans, settings).run(load)
    both = record.summary(slo.ttft_ms, slo.itl_ms)
    ttft, itl = record.summary(slo.ttft_ms).attainment, record.summary(None, slo.itl_ms).attainment
    return Outcome(candidate, both, ttft, itl, both.attainment >= slo.attainment)


def _is_less(candidate: Candidate, failed: Candidate) -> bool:
    same = [plan.spec for plan in candidate.plans] == [plan.spec for plan in failed.plans] and candidate.kind == failed.kind
    return same and all(a.groups <= b.groups for a, b in zip(candidate.plans, failed.plans, strict=True))


def _answer(outcomes: list[Outcome]) -> Answer:
    good = sorted((outcome for outcome in outcomes if outcome.meets), key=_goodness)
    closest = max(outcomes, key=lambda outcome: outcome.summary.attainment, default=None)
    if not good:
        return Answer(None, None, None, None, closest, len(outcomes))
    best = good[0]
    cheaper = [o for o in outcomes if not o.meets and o.candidate.usd_per_hour <= best.candidate.usd_per_hour]
    return Answer(
        best=best,
        next_best=good[1] if len(good) > 1 else None,
        other=next((o for o in good if o.candidate.kind != best.candidate.kind), None),
        cheaper=max(cheaper, key=lambda o: (o.candidate.kind == best.candidate.kind, o.summary.attainment), default=None),
        closest=closest,
        tried=len(outcomes),
    )


def _goodness(outcome: Outcome) -> tuple[float, float, float]:
    """Least is best: price, then how many requests are within the SLO, then how fast."""
    return (outcome.candidate.usd_per_hour, -outcome.summary.attainment, outcome.summary.ttft_ms["p99"])
