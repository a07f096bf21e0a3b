"""Results of a sweep that is under way, in a file beside its target: a broken-off sweep goes on from it. Called by `sweep.py`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from cluster.sweep_bench import Cell, Result
from common.errors import ConfigError


class Journal:
    """Results so far, one JSON object a line; the first line names what was measured."""

    def __init__(self, path: Path, subject: str):
        """Raises: ConfigError if the file belongs to another subject or can't be read"""
        self._path = path
        self.results: dict[str, Result] = {}
        if not path.exists():
            path.write_text(json.dumps({"subject": subject}) + "\n")
            return
        try:
            head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
            found = head["subject"]
            for line in lines:
                handovers = tuple((int(n), float(p), float(t)) for n, p, t in line["handovers"])
                self.results[line["key"]] = Result(line["ms"], line["spread_ms"], handovers)
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(f"journal {path} can't be read ({exc}); delete it to start anew") from exc
        if found != subject:
            raise ConfigError(f"journal {path} is of {found!r}, not of {subject!r}; delete it to start anew")

    def add(self, cell: Cell, result: Result) -> None:
        self.results[cell.key] = result
        with self._path.open("a") as file:
            file.write(json.dumps({"key": cell.key} | asdict(result)) + "\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
