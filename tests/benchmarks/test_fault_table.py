"""docs/operations.md shows what the last recorded fault runs found, and has a runbook for the alerts that page somebody."""

from __future__ import annotations

import json
import re

import yaml

from benchmarks.faults.table import PAGE, RESULTS, ROOT, table, write
from common.config import Config

RULES = ROOT / "helm" / "tandem" / "rules" / "tandem.yaml"


def test_the_table_in_the_page_is_that_of_the_recorded_results():
    page = PAGE.read_text()
    results = json.loads(RESULTS.read_text())
    assert table(results) in page, "python -m benchmarks.faults.table"
    assert write(page, results) == page


def test_a_run_that_missed_something_says_so():
    figures = {"size": 5000, "load_average": 1.5, "lost": 0, "success_percent": 98.0, "reject_p99_ms": 4.0, "ends": {"ok": 1}}
    rows = table({"kill": {**figures, "missed": ["success_percent is 98.000, at least 99.5 is wanted"]}}).splitlines()
    assert rows[2] == (
        "| kill | 5,000 | 1.5 | lost 0, success 98 %, reject p99 4 ms | success_percent is 98.000, at least 99.5 is wanted |"
    )


def test_runbooks_are_for_alerts_that_exist_and_every_critical_alert_has_one():
    alerts = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    runbooks = set(re.findall(r"^### (\w+)$", PAGE.read_text(), re.M))
    assert runbooks <= set(alerts)
    assert len(runbooks) >= 10
    assert {name for name, rule in alerts.items() if rule["labels"]["severity"] == "critical"} <= runbooks


def test_every_configuration_key_that_the_page_names_exists():
    for path in re.findall(r"`((?:router|cluster|kv|autoscale)\.[a-z_.]+)`", PAGE.read_text()):
        node = Config
        for part in path.split("."):
            assert part in node.model_fields, path
            node = node.model_fields[part].annotation
