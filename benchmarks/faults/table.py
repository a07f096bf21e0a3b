"""Writes what the fault runs measured into docs/operations.md, between its two marks.

python -m benchmarks.faults.table
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "operations.md"
BEGIN, END = "<!-- fault runs: begin -->\n", "<!-- fault runs: end -->\n"
UNITS = {"_per_s": "/s", "_s": " s", "_ms": " ms", "_percent": " %", "_mb": " MB"}
LEFT_OUT = {"size", "took_s", "load_average", "missed", "faults", "errors", "ends", "requests", "double", "p50_s", "p99_s"}


def table(results: dict[str, dict]) -> str:
    """One row per run: its size, what was found, and what of it is not as it must be."""
    rows = ["| run | size | load of the machine | found | not reached |", "|---|---|---|---|---|"]
    for name, figures in sorted(results.items()):
        found = ", ".join(
            _figure(key, value) for key, value in figures.items() if key not in LEFT_OUT and not isinstance(value, dict | str)
        )
        missed = "; ".join(figures["missed"]) or "-"
        rows.append(f"| {name} | {figures['size']:,} | {figures['load_average']} | {found} | {missed} |")
    return "\n".join(rows) + "\n"


def write(page: str, results: dict[str, dict]) -> str:
    """Returns: the page with the table of these results"""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + table(results) + END + rest.partition(END)[2]


def _figure(key: str, value: float) -> str:
    for suffix, unit in UNITS.items():
        if key.endswith(suffix):
            return f"{key.removesuffix(suffix).replace('_', ' ')} {value:g}{unit}"
    return f"{key.replace('_', ' ')} {value:g}"


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text(), json.loads(RESULTS.read_text())))
