"""`tandem sweep` and `tables`: measure a profile on the running groups, and show what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.cli.app import NameOption, RouterOption, app, err, out, read_config
from cluster.cli.load_options import profile_from
from common.config import Config
from common.errors import ConfigError
from common.proto import router_pb2, types_pb2

if TYPE_CHECKING:
    from cluster.profile import Profile
    from cluster.sweep_bench import Cell, Layout, Result, SweepSettings
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
    from cluster.sweep import plan_sweep
    from cluster.sweep import sweep as run_sweep
    from cluster.sweep_bench import SweepSettings

    groups = _healthy_groups(name, router)
    with router_stub(name, router) as stub:
        model = stub.GetModelInfo(router_pb2.GetModelInfoRequest(), timeout=10)
    guess = builtin_profile(groups[0].kv.num_layers if groups else None, on_cuda=hardware.upper().startswith("H"))
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
        _list_cells(cells)
        return
    tree, num_cells = _config_of(config, name, router), sum(not cell.skip for cell in cells)
    run = partial(
        run_sweep, groups, settings, profile, model=model.model, hardware=hardware, guess=guess,
        planned=_planned(groups, tree, hardware, gpu_gib),
    )  # fmt: skip
    _report(_measure(run, profile, tree, name, router, num_cells), settings, profile, usd_per_gpu_hour, num_cells)


def _healthy_groups(name: str, router: str | None) -> list[types_pb2.GroupDescription]:
    from cluster.client import router_stub

    with router_stub(name, router) as stub:
        return [g.description for g in stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10).groups if g.healthy]


def _list_cells(cells: list[Cell]) -> None:
    """What a dry run shows."""
    for cell in cells:
        out.print(f"{cell.key:<40} " + (f"does not fit: {cell.skip}" if cell.skip else f"about {cell.estimated_s:.1f} s"))
    fitting = [cell.estimated_s for cell in cells if not cell.skip]
    out.print(f"{len(fitting)} cells, about {sum(fitting):.0f} s by the shipped profile")


def _measure(
    run: Callable[..., Coroutine[Any, Any, Profile]], path: Path, tree: Config | None, name: str, router: str | None, num_cells: int
) -> Profile:
    """The sweep `run`, told of its surroundings and behind a progress bar."""
    from cluster.state import load_state
    from cluster.sweep_groups import RunningGroups

    state = load_state(name) if router is None else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("measuring", total=num_cells)
        around = RunningGroups(
            lambda: _healthy_groups(name, router),
            state.ray_folder if state is not None else None,
            path,
            tree.cluster.start_timeout_s + REPLACE_S if tree is not None else REPLACE_S,
            show=lambda text: bar.update(task, description=text),
            say=lambda text: bar.console.print(text, style="red", markup=False),
        )

        def on_progress(done: int, total: int, cell: Cell, result: Result | None) -> None:
            bar.update(task, completed=done, total=total, description=cell.key)

        return asyncio.run(run(surroundings=around, on_progress=on_progress))


def _report(measured: Profile, settings: SweepSettings, path: Path, usd_per_gpu_hour: float, num_cells: int) -> None:
    """Raises: typer.Exit with 1 if cells failed"""
    from cluster.tables import to_markdown

    typer.echo(to_markdown(measured, settings.contexts, usd_per_gpu_hour, only_cells=True))
    failed = sum(": failed, " in line and not line.startswith("largest") for line in measured.unmeasured)
    cells_done = f"{num_cells - failed} of {num_cells} cells" if failed else f"{num_cells} cells"
    out.print(f"{path}: {cells_done}; route by it with --set router.profile={path}, prices of other hardware: tandem tables")
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
