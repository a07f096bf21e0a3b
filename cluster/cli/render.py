"""Tables that several commands show."""

from __future__ import annotations

from rich import box
from rich.table import Table

from common.proto import router_pb2

_COLUMNS = ("queue", "prefill", "transfer", "TTFT", "ITL", "cost", "score")


def route_table(decision: router_pb2.RouteDecision, actual: router_pb2.Prediction | None = None) -> Table:
    """Every candidate with its prediction and why it won or lost, best first; below what the chosen pair really took. Times in ms."""
    table = Table("pair (times in ms)", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for candidate in sorted(decision.candidates, key=lambda c: (not c.chosen, c.prediction.score or float("inf"))):
        prefill = candidate.prefill_group or candidate.prefill_pool
        decode = candidate.decode_group or candidate.decode_pool
        mark, style = ("*", "bold") if candidate.chosen else (" ", "dim")
        why = f"\n  {candidate.reason}" if candidate.reason else ""
        pair = f"{mark} {prefill} > {decode}{why}"
        table.add_row(pair, *_cells(candidate.prediction), f"{candidate.prediction.score:.3g}", style=style)
    if actual is not None:
        table.add_row("  it took", *_cells(actual), "")
    return table


def _cells(p: router_pb2.Prediction) -> list[str]:
    times = [f"{ms:.1f}" for ms in (p.queue_ms, p.prefill_ms, p.transfer_ms, p.ttft_ms, p.itl_ms)]
    return [*times, f"${p.cost_usd:.1e}"]
