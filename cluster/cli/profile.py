"""`tandem sweep` and `tables`: measure a profile on the running groups, and show what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.cli.app import NameOption, RouterOption, app, err, out, read_config
from cluster.cli.load_options import profile_from
from common.config import Config
from common.errors import ConfigError
from common.proto import router_pb2, types_pb2

if TYPE_CHECKING:
    from cluster.sweep_bench import Layout
    from cluster.sweep_fit import Planned

REPLACE_S = 60.0  # for a group that ended to be noticed and another to get its place; its start comes on top

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
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            show_default=False,
            help="Configuration of the cluster, from which memory is computed; unset = that of --name on this machine.",
        ),
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option("--gpu-memory-gib", min=1, show_default=False, help="Memory of one GPU; unset = known for --hardware H200 alone."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would run, for how long, and what does not fit.")] = False,
    name: NameOption = "default",
    router: RouterOption = None,
) -> None:
    """Measure prefill time by length, decode step time by batch and context, and the largest batch that fits.

    Nothing else should run on the cluster meanwhile. For each decode layout and context:

    step ms; tokens/s of one user; $ per 1M output tokens at --price; KV and all memory of one rank.

    The largest batch is computed from the configuration, then confirmed: the group is really asked for places until it refuses one. Where
    the two differ a line says DIFFERENCE. Cells that do not fit are skipped with their reason.

    If a group ends, the last lines of its ranks' logs are shown and kept beside --out, the cell is left out, and the sweep goes on with the
    group that takes its place. Then the exit code is 1, and the same command again measures only what is missing.

    Example: tandem sweep --role decode --out h200.json --hardware H200 --batches 1,8,32,128 --contexts 1024,8192,32768
    """
    from cluster.client import router_stub
    from cluster.profile import builtin_profile
    from cluster.state import load_state
    from cluster.sweep import plan_sweep
    from cluster.sweep import sweep as run_sweep
    from cluster.sweep_bench import SweepSettings
    from cluster.sweep_groups import RunningGroups
    from cluster.tables import to_markdown

    def ask() -> list[types_pb2.GroupDescription]:
        with router_stub(name, router) as stub:
            return [g.description for g in stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10).groups if g.healthy]

    groups = ask()
    with router_stub(name, router) as stub:
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
    fitting = [cell for cell in cells if not cell.skip]
    if dry_run:
        for cell in cells:
            out.print(f"{cell.key:<40} " + (f"does not fit: {cell.skip}" if cell.skip else f"about {cell.estimated_s:.1f} s"))
        out.print(f"{len(fitting)} cells, about {sum(cell.estimated_s for cell in fitting):.0f} s by the shipped profile")
        return
    tree = _config_of(config, name, router)
    planned = _planned(groups, tree, hardware, gpu_gib)
    state = load_state(name) if router is None else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("measuring", total=len(fitting))
        around = RunningGroups(
            ask,
            state.ray_folder if state is not None else None,
            profile,
            tree.cluster.start_timeout_s + REPLACE_S if tree is not None else REPLACE_S,
            show=lambda text: bar.update(task, description=text),
            say=lambda text: bar.console.print(text, style="red", markup=False),
        )
        measured = asyncio.run(
            run_sweep(
                groups,
                settings,
                profile,
                model=model.model,
                hardware=hardware,
                guess=guess,
                planned=planned,
                surroundings=around,
                on_progress=lambda done, total, cell, result: bar.update(task, completed=done, total=total, description=cell.key),
            )
        )
    typer.echo(to_markdown(measured, settings.contexts, usd_per_gpu_hour, only_cells=True))
    failed = sum(": failed, " in line and not line.startswith("largest") for line in measured.unmeasured)
    cells_done = f"{len(fitting) - failed} of {len(fitting)} cells" if failed else f"{len(fitting)} cells"
    out.print(f"{profile}: {cells_done}; route by it with --set router.profile={profile}, prices of other hardware: tandem tables")
    if any(": failed, " in line for line in measured.unmeasured):
        err.print("tandem: cells failed, see `Not measured`; the same command again measures what is missing", style="red")
        raise typer.Exit(1)


def _config_of(path: Path | None, name: str, router: str | None) -> Config | None:
    """The configuration that is given, else the one that `tandem up` has kept; None for a cluster elsewhere."""
    from cluster.state import state_dir

    kept = state_dir(name) / "config.json"
    if path is None and (router is not None or not kept.exists()):
        return None
    return read_config(path or kept, None)


def _planned(groups: list[types_pb2.GroupDescription], tree: Config | None, hardware: str, gpu_gib: float | None) -> dict[Layout, Planned]:
    """What each decode layout has by its configuration; nothing without one."""
    from cluster.sweep_bench import layout_of
    from cluster.sweep_fit import GIB, GPU_GIB, planned_of

    if tree is None:
        return {}
    known = gpu_gib or GPU_GIB.get(hardware.upper())
    device_bytes = int(known * GIB) if known is not None and tree.cluster.device != "cpu" else None
    decodes = [group for group in groups if group.role == types_pb2.ROLE_DECODE]
    found = {layout_of(group): planned_of(group, tree, device_bytes) for group in decodes}
    return {layout: planned for layout, planned in found.items() if planned is not None}


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
