"""`tandem sweep` and `tables`: measure a profile on the running groups, and show what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.cli.app import NameOption, RouterOption, app, err, out
from cluster.cli.load_options import profile_from
from common.errors import ConfigError
from common.proto import router_pb2

PriceOption = Annotated[float, typer.Option("--price", min=0.001, help="$ per GPU-hour.")]


@app.command()
def sweep(
    profile: Annotated[Path, typer.Option("--out", help="Profile to write; a journal beside it lets a broken-off sweep go on.")],
    hardware: Annotated[str, typer.Option(help="What the profile is of, as people call it: H200, laptop CPU.")],
    prefill_tokens: Annotated[str, typer.Option(help="Prompt lengths, with commas between.")] = "1,128,512,1024,2048,4096,8192,16384,32768",
    batches: Annotated[str, typer.Option(help="Decode batches.")] = "1,2,4,8,16,32,64,128",
    contexts: Annotated[str, typer.Option(help="Decode contexts [tokens].")] = "1024,8192,32768",
    role: Annotated[
        Literal["both", "prefill", "decode"],
        typer.Option(help="Measure one alone: the other's cells stay what --out holds, else the shipped profile's."),
    ] = "both",
    runs: Annotated[int, typer.Option(min=1, help="Prefills per length.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps per decode cell.")] = 100,
    usd_per_gpu_hour: PriceOption = 3.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would run, and for how long.")] = False,
    name: NameOption = "default",
    router: RouterOption = None,
) -> None:
    """Measure prefill time by length and decode step time by batch and context. Nothing else should run there meanwhile."""
    from cluster.client import router_stub
    from cluster.profile import builtin_profile
    from cluster.sweep import plan_sweep
    from cluster.sweep import sweep as run_sweep
    from cluster.sweep_bench import SweepSettings
    from cluster.tables import to_markdown

    with router_stub(name, router) as stub:
        groups = [g.description for g in stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10).groups]
        model = stub.GetModelInfo(router_pb2.GetModelInfoRequest(), timeout=10)
    layers = groups[0].kv.num_layers if groups else None
    guess = builtin_profile(layers, on_cuda=hardware.upper().startswith("H"))
    settings = SweepSettings(
        _numbers("--prefill-tokens", prefill_tokens),
        _numbers("--batches", batches),
        _numbers("--contexts", contexts),
        runs=runs,
        steps=steps,
        vocab_size=min(model.vocab_size, SweepSettings.vocab_size),
        role=None if role == "both" else role,
    )
    cells = plan_sweep(groups, settings, guess)
    if dry_run:
        for cell in cells:
            out.print(f"{cell.key:<40} about {cell.estimated_s:.1f} s")
        out.print(f"{len(cells)} cells, about {sum(cell.estimated_s for cell in cells):.0f} s by the shipped profile")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("measuring", total=len(cells))
        measured = asyncio.run(
            run_sweep(
                groups,
                settings,
                profile,
                model=model.model,
                hardware=hardware,
                guess=guess,
                on_progress=lambda done, total, cell, result: bar.update(task, completed=done, total=total, description=cell.key),
            )
        )
    typer.echo(to_markdown(measured, settings.contexts, usd_per_gpu_hour))
    out.print(f"{profile}: {len(cells)} cells; route by it with --set router.profile={profile}, prices of other hardware: tandem tables")


@app.command()
def tables(
    profiles: Annotated[list[str], typer.Argument(help="120b, 20b: the shipped H200 profiles; else files that `tandem sweep` wrote.")],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for Markdown, CSV, PNG and one HTML page; unset = print the Markdown.")
    ] = None,
    contexts: Annotated[str, typer.Option("--contexts", help="Decode contexts [tokens].")] = "8192,32768",
    usd_per_gpu_hour: PriceOption = 3.0,
) -> None:
    """Show latency and price: prefill by length, decode speed against $ per 1M output tokens."""
    from cluster.tables import to_markdown, write_all

    found, numbers = [profile_from(text) for text in profiles], _numbers("--contexts", contexts)
    if folder is None:
        typer.echo("\n".join(to_markdown(profile, numbers, usd_per_gpu_hour) for profile in found))
        return
    for path in write_all(found, numbers, usd_per_gpu_hour, folder):
        out.print(str(path))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Raises: ConfigError naming the option"""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option} {text!r}: expected whole numbers above 0 with commas between")
    return numbers
