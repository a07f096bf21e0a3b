"""`tandem doctor`: what is wrong with this machine or this configuration, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from cluster.cli.app import SetOption, app, out, read_config

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Check this configuration too.", show_default=False)] = None,
    set_: SetOption = None,
) -> None:
    """Check driver, NCCL, peer access, transports, ports, weights, vocabulary, clock and secrets. Exit code 1 if something fails."""
    from cluster.doctor import Level, examine

    findings = examine(read_config(config, set_) if config is not None else None)
    table = Table("", "check", "found", "what to do", box=box.SIMPLE_HEAD, pad_edge=False)
    for finding in findings:
        table.add_row(finding.level.value, finding.check, finding.found, finding.action, style=_STYLES[finding.level.value])
    out.print(table)
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)
