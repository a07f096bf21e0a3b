"""`tandem simulate` and `tandem plan`: what a configuration would do under a load, and which one to deploy."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cluster.cli.app import app, err, out
from cluster.cli.load_options import (
    BurstinessOption,
    InputOption,
    OutputOption,
    PriceOption,
    ProfileOption,
    RateOption,
    RequestsOption,
    SeedOption,
    SpreadOption,
    TraceOption,
    load_from,
    profile_from,
)
from common.config import load_config
from common.errors import ConfigError

if TYPE_CHECKING:
    from cluster.autoscaler.types import Policy
    from cluster.load.arrivals import Load
    from cluster.planner.plan import Outcome
    from cluster.profile import Profile
    from cluster.sim.record import Summary
    from cluster.sim.simulation import PoolPlan

JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")]


@app.command()
def simulate(
    pool: Annotated[
        list[str] | None, typer.Option("--pool", help="ROLE:LAYOUT:WEIGHTS:GROUPS[@USD], as in prefill:tp1:fp8:4; once per pool.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Take the pools, prices and queue from a config instead.")] = None,
    trace: TraceOption = None,
    rate: RateOption = None,
    input_tokens: InputOption = 8000,
    output_tokens: OutputOption = 300,
    spread: SpreadOption = 0.5,
    burstiness: BurstinessOption = 1.0,
    requests: RequestsOption = 10_000,
    ttft_ms: Annotated[float | None, typer.Option(help="Wanted time to first token of every request [ms].")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="Wanted time between tokens [ms].")] = None,
    latency_weight: Annotated[float | None, typer.Option(min=0, max=1, help="1 buys speed, 0 saves money.")] = None,
    policy: Annotated[
        Literal["cost-aware", "round-robin", "least-loaded", "shortest-queue", "all"], typer.Option(help="Who picks the pools.")
    ] = "cost-aware",
    autoscale: Annotated[bool, typer.Option("--autoscale", help="Let the config's autoscaler add and drain groups.")] = False,
    profile: ProfileOption = "120b",
    price: PriceOption = 3.0,
    seed: SeedOption = 0,
    json_path: JsonOption = None,
) -> None:
    """Run a load against a configuration that exists in numbers only, with the router's own code. Needs no cluster."""
    from cluster.autoscaler.from_config import policy_of
    from cluster.router.choice import Aim
    from cluster.router.queue import QueueLimits
    from cluster.sim.deployment import plans_of_config, plans_of_names
    from cluster.sim.policies import POLICIES
    from cluster.sim.simulation import SimSettings

    if (config is None) == (not pool):
        raise ConfigError("simulate: give either --pool, once per pool, or --config FILE")
    if autoscale and config is None:
        raise ConfigError("--autoscale needs --config: the bounds and targets stand there")
    figures, scaling = profile_from(profile), None
    weight, limits = 0.5, QueueLimits()
    if config is not None:
        tree = load_config(config)
        plans, queue = plans_of_config(tree, figures), tree.router.queue
        weight, limits = tree.router.objective.latency_weight, QueueLimits(queue.max_requests, queue.max_prompt_tokens, queue.max_wait_s)
        scaling = policy_of(tree) if autoscale else None
    else:
        plans = plans_of_names(pool or [], figures, price)
    settings = SimSettings(
        aim=Aim(weight if latency_weight is None else latency_weight, ttft_ms, itl_ms), limits=limits, noise=0.05, seed=seed
    )
    load = load_from(trace, rate, input_tokens, output_tokens, spread, burstiness, requests, seed)
    found = {}
    for name in POLICIES if policy == "all" else (policy,):
        found[name] = _simulate(figures, plans, settings, load, name, scaling)
    out.print(_summary_table(found, ttft_ms is not None or itl_ms is not None))
    if json_path is not None:
        json_path.write_text(json.dumps({name: asdict(summary) for name, summary in found.items()}, indent=1) + "\n")


def _simulate(profile: Profile, plans: list[PoolPlan], settings, load: Load, policy: str, scaling: Policy | None) -> Summary:
    from cluster.cost_model import Shape
    from cluster.sim.policies import policy_named
    from cluster.sim.scaling import Scaling
    from cluster.sim.simulation import Simulation

    simulation = Simulation(profile, plans, settings)
    simulation.policy = policy_named(policy, simulation.chooser, simulation.pools)
    if scaling is not None:
        prompt, output = round(load.prompt_tokens.mean()), max(1, round(load.output_tokens.mean()))
        Scaling(simulation, scaling, start_s=60.0, mean=Shape(prompt, output, prompt + output)).start()
    with Progress(TextColumn(policy), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=err) as bar:
        task = bar.add_task(policy, total=len(load))
        record = simulation.run(load, lambda done: bar.update(task, completed=done))
    return record.summary(settings.aim.ttft_slo_ms, settings.aim.itl_slo_ms)


def _summary_table(found: dict[str, Summary], has_slo: bool) -> Table:
    table = Table("figure", *found)

    def row(name: str, cell) -> None:
        table.add_row(name, *(cell(summary) for summary in found.values()))

    row("finished / requests", lambda s: f"{s.finished:,} / {s.requests:,}")
    row("refused", lambda s: ", ".join(f"{count} {status}" for status, count in s.refused.items()) or "none")
    if has_slo:
        row("within the SLO", lambda s: f"{s.attainment:.1%}")
        row("goodput", lambda s: f"{s.goodput_per_s:.2f} requests/s")
    for name, unit, figures in (("TTFT", "ms", "ttft_ms"), ("ITL", "ms", "itl_ms"), ("latency", "s", "latency_s")):
        for key in ("p50", "p90", "p99"):
            row(f"{name} {key}", lambda s, figures=figures, key=key, unit=unit: f"{getattr(s, figures)[key]:.2f} {unit}")
    row("$ per 1M output tokens, occupied", lambda s: f"{s.usd_per_1m_tokens:.3f}")
    row("$ per 1M output tokens, whole fleet", lambda s: f"{s.fleet_usd_per_1m_tokens:.3f}")
    row("fleet", lambda s: f"${s.fleet_usd_per_hour:.2f}/h")
    for pool in sorted({pool for summary in found.values() for pool in summary.utilisation}):
        row(f"{pool}: busy, requests", lambda s, pool=pool: f"{s.utilisation.get(pool, 0):.0%}, {s.shares.get(pool, 0):,}")
    return table


@app.command()
def plan(
    ttft_ms: Annotated[float, typer.Option(min=0.001, help="Wanted time to first token [ms].")],
    itl_ms: Annotated[float, typer.Option(min=0.001, help="Wanted time between tokens, mean of a request [ms].")],
    gpus: Annotated[int, typer.Option(min=1, help="Most GPUs to use.")],
    trace: TraceOption = None,
    rate: RateOption = None,
    input_tokens: InputOption = 8000,
    output_tokens: OutputOption = 800,
    spread: SpreadOption = 0.5,
    burstiness: BurstinessOption = 1.0,
    requests: RequestsOption = 2000,
    attainment: Annotated[float, typer.Option(min=0.01, max=1, help="Part of the requests that must meet both bounds.")] = 0.95,
    profile: ProfileOption = "120b",
    price: PriceOption = 3.0,
    seed: SeedOption = 0,
    json_path: JsonOption = None,
) -> None:
    """Find the cheapest pools that meet an SLO under a load, by simulation; separate pools or not."""
    from cluster.planner.candidates import Slo
    from cluster.planner.plan import make_plan

    load = load_from(trace, rate, input_tokens, output_tokens, spread, burstiness, requests, seed)
    with Progress(TextColumn("{task.description}"), console=err) as bar:
        task = bar.add_task("screening", total=None)
        answer = make_plan(
            profile_from(profile),
            load,
            Slo(ttft_ms, itl_ms, attainment),
            gpus,
            price,
            lambda tried, candidate: bar.update(task, description=f"{tried} tried, now {candidate.label}"),
        )
    out.print(f"[bold]{answer.verdict}[/bold]")
    shown: dict[str, Outcome | None] = {"best": answer.best, "next best": answer.next_best, "best of the other kind": answer.other}
    shown |= {"cheaper, but fails" if answer.best else "comes closest": answer.cheaper if answer.best else answer.closest}
    out.print(_plan_table({name: outcome for name, outcome in shown.items() if outcome is not None}))
    limiting = answer.cheaper if answer.best else answer.closest
    if limiting is not None:
        out.print(f"what limits it: {limiting.candidate.label}: {limiting.limit}")
    if json_path is not None:
        tree = {name: None if o is None else {"configuration": o.candidate.label, "kind": o.candidate.kind, "gpus": o.candidate.gpus,
                "usd_per_hour": o.candidate.usd_per_hour, "limit": o.limit} | asdict(o.summary) for name, o in shown.items()}  # fmt: skip
        json_path.write_text(json.dumps({"verdict": answer.verdict, "tried": answer.tried} | tree, indent=1) + "\n")


def _plan_table(shown: dict[str, Outcome]) -> Table:
    table = Table("", "configuration", "GPUs", "$/h", "$ per 1M output", "within SLO", "TTFT p50 / p90 / p99 ms", "ITL p50 / p90 / p99 ms")
    for name, outcome in shown.items():
        summary, candidate = outcome.summary, outcome.candidate
        times = [" / ".join(f"{figures[key]:.1f}" for key in ("p50", "p90", "p99")) for figures in (summary.ttft_ms, summary.itl_ms)]
        prices = (f"{candidate.usd_per_hour:.2f}", f"{summary.fleet_usd_per_1m_tokens:.3f}")
        table.add_row(name, candidate.label, str(candidate.gpus), *prices, f"{summary.attainment:.1%}", *times)
    return table
