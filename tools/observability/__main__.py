"""Writes the dashboard, the alert rules and the metrics reference: `python -m tools.observability [ROOT]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from tools.observability.dashboard import to_grafana
from tools.observability.reference import to_markdown
from tools.observability.rules import to_prometheus


def write(root: Path) -> None:
    for name, text in (
        ("helm/tandem/dashboards/tandem.json", json.dumps(to_grafana(), indent=1) + "\n"),
        ("helm/tandem/rules/tandem.yaml", yaml.safe_dump(to_prometheus(), sort_keys=False, width=1000)),
        ("docs/metrics.md", to_markdown()),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])
