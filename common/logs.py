"""Logging set up once per process: plain lines on a terminal, JSON elsewhere, each with the pool, group and rank it came from."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


class _JsonFormatter(logging.Formatter):
    def __init__(self, fields: dict[str, Any]):
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name, **self._fields}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(level: str = "INFO", **fields: Any) -> None:
    """Called by a process's entry point alone. `fields`: identity of the process (role, pool, group, rank)."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty():
        where = " ".join(f"{value}" for value in fields.values())
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {where} %(name)s: %(message)s"))
    else:
        handler.setFormatter(_JsonFormatter(fields))
    logging.basicConfig(level=level, handlers=[handler], force=True)
