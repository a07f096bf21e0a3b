"""Reads the spans that `tracing.exporter: file` wrote."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReadSpan:
    name: str
    trace: str
    id: str
    parent: str
    raw: dict

    @property
    def seconds(self) -> float:
        begin, end = (datetime.datetime.fromisoformat(self.raw[key]) for key in ("start_time", "end_time"))
        return (end - begin).total_seconds()


def read_spans(folder: Path, trace: str | None = None) -> dict[str, ReadSpan]:
    """By name; of one trace if it is given. A later span of a name takes the place of an earlier one."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            if not line.endswith("}"):
                continue  # being written
            raw = json.loads(line)
            span = ReadSpan(
                raw["name"],
                raw["context"]["trace_id"].removeprefix("0x"),
                raw["context"]["span_id"].removeprefix("0x"),
                (raw["parent_id"] or "").removeprefix("0x"),
                raw,
            )
            if trace in (None, span.trace):
                found[span.name] = span
    return found
