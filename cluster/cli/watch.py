"""`tandem top`: a live table of pools, from the metrics that every process serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.cli.app import NameOption, app, out
from common.errors import ConfigError

if TYPE_CHECKING:
    from cluster.live import Overview, PoolLine

_RIGHT = ("groups", "running", "queue", "wait", "KV", "tok/s", "p50", "p99", "$/h")


@app.command()
def top(
    interval_s: Annotated[float, typer.Option(min=0.2, help="Between two looks [s].")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One table, of one interval, and end.")] = False,
    metrics: Annotated[str | None, typer.Option(help="host:port of the controller's metrics; unset = of --name on this machine.")] = None,
    name: NameOption = "default",
) -> None:
    """Show pools live: groups, queue, KV, tokens/s, dollars, p50 and p99 of prefill or of the gap between tokens. Ctrl-C ends."""
    from cluster.live import fetch, overview
    from cluster.state import load_state

    state = load_state(name)
    address = metrics or (state.metrics_address if state else None)
    if address is None:
        raise ConfigError(f"no cluster {name!r} is up on this machine; give --metrics host:port")
    before = fetch(address)
    if once:
        time.sleep(interval_s)
        after = fetch(address)
        out.print(_view(overview(before, after), after.silent))
        return
    with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
        while True:
            time.sleep(interval_s)
            after = fetch(address)
            live.update(_view(overview(before, after), after.silent), refresh=True)
            before = after


def _view(o: Overview, silent: tuple[str, ...]) -> Group:
    per_million = "-" if o.usd_per_million_output is None else f"${o.usd_per_million_output:,.2f}"
    lines = [
        f"{o.requests_per_s:.1f} requests/s ({o.failed_per_s:.1f} failed), {o.running} running, "
        f"{o.output_tokens_per_s:,.0f} output tokens/s",
        f"TTFT p50 {_ms(o.ttft_p50_s)} p99 {_ms(o.ttft_p99_s)}   ITL p50 {_ms(o.itl_p50_s)} p99 {_ms(o.itl_p99_s)}   "
        f"${o.usd_per_hour:,.2f}/h, {per_million} per 1M output tokens",
    ]
    table = Table("pool", "role", "state", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in _RIGHT:
        table.add_column(column, justify="right", no_wrap=True)
    for line in o.pools:
        table.add_row(*_cells(line))
    warnings = [Text(f"does not answer: {', '.join(silent)}", style="red")] if silent else []
    return Group(*map(Text, lines), table, *warnings)


def _cells(p: PoolLine) -> list[str]:
    state = "closed" if not p.is_open else "ready" if p.ready >= p.wanted else "short"
    is_prefill = p.role == "prefill"
    kv = "-" if p.kv_used is None else f"{p.kv_used:.0%}"
    queue, wait = (str(p.queued), f"{p.wait_s:.2f} s") if is_prefill else ("", "")
    numbers = (f"{p.ready}/{p.wanted}", str(p.running), queue, wait, kv, f"{p.tokens_per_s:,.0f}", _ms(p.p50_s), _ms(p.p99_s))
    return [p.pool, p.role, state, *numbers, f"{p.usd_per_hour:.2f}"]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
