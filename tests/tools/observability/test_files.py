"""The dashboard, the alerts and the reference speak of metrics that exist, and the files in the tree are what their definitions give."""

import re
from pathlib import Path

import pytest

from common.metric_catalog import BY_PROCESS
from tools.observability.__main__ import write
from tools.observability.dashboard import ROWS, to_grafana
from tools.observability.rules import ALERTS

ROOT = Path(__file__).resolve().parents[3]
FILES = ("helm/tandem/dashboards/tandem.json", "helm/tandem/rules/tandem.yaml", "docs/metrics.md")
EXPORTED = {d.name: d for definitions in BY_PROCESS.values() for d in definitions}
QUERIES = {f"{row.title}: {panel.title}": [q.expr for q in panel.queries] for row in ROWS for panel in row.panels}
QUERIES |= {alert.name: [alert.expr] for alert in ALERTS}
KNOWN_LABELS = {"process", "group", "instance", "job", "le"}


@pytest.mark.parametrize("name", FILES)
def test_the_files_in_the_tree_are_what_the_definitions_give(name: str, tmp_path: Path):
    write(tmp_path)
    assert (ROOT / name).read_text() == (tmp_path / name).read_text(), "run python -m tools.observability"


@pytest.mark.parametrize("title", QUERIES)
def test_queries_use_metrics_and_labels_that_are_exported(title: str):
    for expr in QUERIES[title]:
        used = re.findall(r"tandem_[a-z0-9_]+", expr)
        assert used, expr
        labels = set()
        for name in used:
            bare = re.sub(r"_(bucket|sum|count)$", "", name)
            definition = EXPORTED.get(name) or EXPORTED.get(bare)
            assert definition is not None, f"{name} is exported by nobody"
            assert name == definition.name or definition.kind == "histogram"
            labels |= set(definition.labels)
        named = re.findall(r"(\w+)\s*!?=~?\s*\"", expr)
        named += [label.strip() for group in re.findall(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)", expr) for label in group.split(",")]
        assert set(named) <= labels | KNOWN_LABELS, f"{expr} names labels that do not exist"


def test_every_metric_of_router_groups_and_controller_is_on_the_dashboard_or_in_an_alert():
    used = " ".join(expr for exprs in QUERIES.values() for expr in exprs)
    missing = {d.name for p in ("router", "prefill", "decode", "controller") for d in BY_PROCESS[p] if d.name not in used}
    assert missing <= {"tandem_queue_prompt_tokens", "tandem_pool_open", "tandem_prefill_tokens_total", "tandem_group_draining"}


def test_the_dashboard_has_the_five_rows_and_no_panel_overlaps():
    panels = to_grafana()["panels"]
    assert [p["title"] for p in panels if p["type"] == "row"] == ["Service", "Pools", "Transfer", "Cost", "Autoscaler"]
    cells = [
        (p["gridPos"]["x"] + dx, p["gridPos"]["y"] + dy)
        for p in panels
        for dx in range(p["gridPos"]["w"])
        for dy in range(p["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({p["id"] for p in panels}) == len(panels)
