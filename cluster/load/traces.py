"""Reads the public trace formats: Mooncake's JSON lines and Azure's CSV.

Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release): `{"timestamp": ms, "input_length", "output_length", "hash_ids": [..]}` a line.
Azure (github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace): columns `TIMESTAMP,ContextTokens,GeneratedTokens`.
"""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from cluster.load.arrivals import Load
from common.errors import ConfigError

Row = tuple[float, int, int, tuple[int, ...]]  # seconds, prompt, output, prefix hashes


def read_trace(path: Path) -> Load:
    """Tells the format by the first line; rows are put in order of arrival and begin at 0.

    Raises: ConfigError naming the file and the line
    """
    try:
        with path.open(newline="") as file:
            first = file.readline()
            file.seek(0)
            rows = sorted((_mooncake if first.lstrip().startswith("{") else _azure)(file, path), key=lambda row: row[0])
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"trace {path}: {exc}") from exc
    if not rows:
        raise ConfigError(f"trace {path}: no requests")
    start_s = rows[0][0]
    return Load(
        np.array([row[0] - start_s for row in rows]),
        np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
        [row[3] for row in rows] if any(row[3] for row in rows) else (),
    )


def _mooncake(lines: Iterable[str], path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            yield _row(item["timestamp"] / 1e3, item["input_length"], item["output_length"], tuple(map(int, item.get("hash_ids", ()))))
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(f"trace {path} line {number}: {_text(exc)}; expected timestamp, input_length, output_length") from exc


def _azure(lines: Iterable[str], path: Path) -> Iterator[Row]:
    reader = csv.DictReader(lines)
    for number, item in enumerate(reader, start=2):
        try:
            yield _row(_seconds(item["TIMESTAMP"]), int(item["ContextTokens"]), int(item["GeneratedTokens"]), ())
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(f"trace {path} line {number}: {_text(exc)}; expected TIMESTAMP,ContextTokens,GeneratedTokens") from exc


def _row(at_s: float, prompt: int, output: int, prefixes: tuple[int, ...]) -> Row:
    if not (np.isfinite(at_s) and prompt >= 1 and output >= 0):
        raise ValueError(f"time {at_s}, {prompt} prompt and {output} output tokens")
    return float(at_s), int(prompt), max(1, int(output)), prefixes


def _seconds(text: str) -> float:
    """Seconds as a number, or a date and time with up to seven digits of a second."""
    try:
        return float(text)
    except ValueError:
        whole, _, fraction = text.partition(".")
        digits = fraction.rstrip("Z").split("+")[0]
        moment = datetime.datetime.fromisoformat(whole.rstrip("Z")).replace(tzinfo=datetime.UTC)
        return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def _text(exc: Exception) -> str:
    return f"{exc} is missing" if isinstance(exc, KeyError) else str(exc)
