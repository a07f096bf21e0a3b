"""The command's root: options that all subcommands share, and the one place where errors become one line and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from common.config import Config, load_config
from common.errors import ConfigError, InvalidRequestError, ServingError

app = typer.Typer(
    help="Serve gpt-oss with prefill and decode in separate pools. Start with `tandem up --config FILE`.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PIPE_COLUMNS = 160  # tables in a pipe or file are not cut to a terminal's width
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
err = Console(stderr=True, highlight=False, soft_wrap=True)

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML file with the configuration tree.", show_default=False)]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override one key: a.b=c; pools by name: pools.NAME.max_batch=64.")]
NameOption = Annotated[str, typer.Option("--name", help="Which cluster of this machine.")]
RouterOption = Annotated[str | None, typer.Option("--router", help="host:port; unset = the router of --name on this machine.")]


class _Errors:
    """How this run of the command reports them; set once, from `--debug`."""

    show_traceback = False


@app.callback()
def _root(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    _Errors.show_traceback = debug


def main() -> None:
    """Exit codes: 0 done; 1 the work failed; 2 the command or a config is wrong; 130 interrupted."""
    from cluster.cli import (  # noqa: F401 - they register their commands
        bench,
        chat,
        client,
        deploy,
        diagnose,
        economics,
        operate,
        profile,
        serve,
        tools,
        watch,
    )

    try:
        app()
    except ServingError as exc:
        if _Errors.show_traceback:
            raise
        err.print(f"tandem: {exc}", style="red", markup=False)
        sys.exit(2 if isinstance(exc, ConfigError | InvalidRequestError) else 1)
    except KeyboardInterrupt:
        err.print("tandem: interrupted")
        sys.exit(130)


def read_config(path: Path, overrides: list[str] | None) -> Config:
    return load_config(path, overrides or [])
