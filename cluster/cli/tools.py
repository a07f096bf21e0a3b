"""`tandem convert`, `fixture`, `sweep` and `version`: work on files, with a progress bar."""

from __future__ import annotations

from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.cli.app import app, err, out


@app.command()
def version() -> None:
    """Print Tandem's version and those of what it stands on."""
    names = ("tandem", "torch", "ray", "grpcio", "protobuf", "openai-harmony")
    for name in names:
        out.print(f"{name} {distribution_version(name)}")


@app.command()
def convert(path: Annotated[Path, typer.Argument(help="Official checkpoint folder with MXFP4 experts.")]) -> None:
    """Write FP8 128x128 expert shards beside a checkpoint, for pools with `weights: fp8`."""
    from model.convert import convert_to_fp8

    with file_progress("converting layers") as step:
        report = convert_to_fp8(path, progress=step)
    out.print(f"{report.folder}: {report.num_values:,} values, {report.exact_fraction:.4%} exactly as in MXFP4")


fixture = typer.Typer(help="Write a small gpt-oss checkpoint in the official layout.", no_args_is_help=True)
app.add_typer(fixture, name="fixture")


@fixture.command("random")
def fixture_random(
    out_dir: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    vocab_size: Annotated[int, typer.Option(help="Rows of embedding and lm_head; 201088 is the real one.")] = 201088,
    layout: Annotated[Literal["hf", "original"], typer.Option(help="Which of the two published layouts.")] = "hf",
) -> None:
    """Random weights with known numbers: proves arithmetic, answers nonsense."""
    from model.fixture import write_random_fixture

    write_random_fixture(out_dir, vocab_size=vocab_size, layout=layout)
    out.print(f"{out_dir}: random gpt-oss, vocabulary {vocab_size}")


def file_progress(description: str):
    """A progress bar whose `with` value is a function (done, total) -> None."""

    class _Bar:
        def __enter__(self):
            columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=err)
            self._task = self._bar.add_task(description, total=None)
            self._bar.start()
            return lambda done, total: self._bar.update(self._task, completed=done, total=total)

        def __exit__(self, *exc) -> None:
            self._bar.stop()

    return _Bar()
