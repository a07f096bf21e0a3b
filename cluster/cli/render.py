"""Tables that several commands show."""

from __future__ import annotations

from rich.table import Table

from common.proto import router_pb2


def route_table(decision: router_pb2.RouteDecision, actual: router_pb2.Prediction | None = None) -> Table:
    """Every candidate with its prediction, best first, and below it what the chosen one really took."""
    table = Table("", "prefill", "decode", "queue", "prefill", "transfer", "TTFT", "ITL", "GPU-s", "cost", "score", "why")
    for candidate in sorted(decision.candidates, key=lambda c: (not c.chosen, c.prediction.score or float("inf"))):
        prefill = candidate.prefill_group or candidate.prefill_pool
        decode = candidate.decode_group or candidate.decode_pool
        mark = "*" if candidate.chosen else ""
        table.add_row(mark, prefill, decode, *_cells(candidate.prediction), f"{candidate.prediction.score:.3g}", candidate.reason)
    if actual is not None:
        table.add_section()
        table.add_row("", "it took", "", *_cells(actual), "", "")
    return table


def _cells(p: router_pb2.Prediction) -> list[str]:
    times = [f"{ms:.1f} ms" for ms in (p.queue_ms, p.prefill_ms, p.transfer_ms, p.ttft_ms, p.itl_ms)]
    return [*times, f"{p.gpu_seconds:.3f}", f"${p.cost_usd:.2e}"]
