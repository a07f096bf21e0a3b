"""Each alert fires on what it is for and not on its absence, as promtool computes it."""

import shutil
import subprocess
from dataclasses import dataclass

import pytest
import yaml

from tools.observability.rules import ALERTS, to_prometheus

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")

WANTED = {"tandem_groups_wanted{pool='d'}": "2x600"}  # keeps TandemControllerAway quiet


@dataclass(frozen=True)
class Case:
    """Series per minute in promtool's notation, bad and good; `at`: when the alert must fire or must not."""

    alert: str
    bad: dict[str, str]
    good: dict[str, str]
    at: str = "40m"


def _kv(used: str, free: str) -> dict[str, str]:
    labels = "pool='d',role='decode',kind='full',instance='i'"
    return {f"tandem_kv_blocks{{{labels},state='used'}}": used, f"tandem_kv_blocks{{{labels},state='free'}}": free}


def _buckets(metric: str, labels: str, below: str, all_: str, bound: str) -> dict[str, str]:
    return {f"{metric}_bucket{{{labels}le='{bound}'}}": below, f"{metric}_bucket{{{labels}le='+Inf'}}": all_}


def _requests(ok: str, **others: str) -> dict[str, str]:
    series = {"tandem_requests_total{outcome='ok',reason='stop'}": ok}
    reasons = {"failed": "unavailable", "refused": "resource_exhausted"}
    return series | {f"tandem_requests_total{{outcome='{o}',reason='{reasons[o]}'}}": v for o, v in others.items()}


def _ratio(median: float) -> dict[str, str]:
    labels = "pool='d',quantity='itl',"
    bounds = (0.1, 0.2, 1.0, 2.0, 3.0, 5.0)
    series = {f"tandem_prediction_ratio_bucket{{{labels}le='{b}'}}": "0+10x600" if b >= median else "0x600" for b in bounds}
    return series | {f"tandem_prediction_ratio_bucket{{{labels}le='+Inf'}}": "0+10x600"}


def _cost(per_minute: str) -> dict[str, str]:
    return {"tandem_cost_usd_total{pool='d',role='decode'}": per_minute, "tandem_pool_usd_per_hour{pool='d',role='decode'}": "12x600"}


READY = "tandem_groups{pool='d',role='decode',state='ready'}"
FAILURES = "tandem_group_failures_total{pool='d',state='ready'}"
FORGED = "tandem_transfer_messages_total{pool='d',verdict='malformed'}"
GRANTED = "tandem_reservations_total{pool='d',outcome='granted'}"
CASES = [
    Case("TandemPoolDown", {READY: "0x600"}, {READY: "1x600"}),
    Case("TandemControllerAway", {"tandem_groups_wanted{pool='d'}": "2x5 stale"}, {}),
    Case("TandemRequestsFail", _requests("0+100x600", failed="0+2x600"), _requests("0+1000x600", failed="0+2x600")),
    Case("TandemRefusing", _requests("0+100x600", refused="0+10x600"), _requests("0+100x600", refused="0+1x600")),
    Case(
        "TandemFirstTokenSlow",
        _buckets("tandem_ttft_seconds", "", "0+90x600", "0+100x600", "15"),
        _buckets("tandem_ttft_seconds", "", "0+100x600", "0+100x600", "7"),
    ),
    Case(
        "TandemQueueLong",
        {"tandem_queue_predicted_wait_seconds{pool='p'}": "20x600"},
        {"tandem_queue_predicted_wait_seconds{pool='p'}": "1x600"},
    ),
    Case("TandemKVFull", _kv("98x600", "2x600"), _kv("60x600", "40x600")),
    Case("TandemGroupsFail", {FAILURES: "0x30 1 2 3 4 4x600"}, {FAILURES: "0x30 1 1x600"}),
    Case(
        "TandemTransfersFail",
        {"tandem_transfers_total{outcome='committed'}": "0+10x600", "tandem_transfers_total{outcome='failed'}": "0+1x600"},
        {"tandem_transfers_total{outcome='committed'}": "0+10x600", "tandem_transfers_total{outcome='failed'}": "0x600"},
    ),
    Case("TandemForgedTransfer", {FORGED: "0x35 1 1x600"}, {FORGED: "1x600"}),
    Case(
        "TandemLeasesStuck",
        {"tandem_leases{pool='d'}": "1x600", GRANTED: "5x600"},
        {"tandem_leases{pool='d'}": "1x600", GRANTED: "0+5x600"},
    ),
    Case("TandemPredictionOff", _ratio(5.0), _ratio(1.0), "90m"),
    Case("TandemMoneyIdle", _cost("0+0.0001x600"), _cost("0+0.1x600"), "500m"),
]


def test_every_alert_has_a_case():
    assert [case.alert for case in CASES] == [alert.name for alert in ALERTS]


def test_alerts_fire_on_what_they_are_for_and_not_else(tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(to_prometheus()))
    tests = []
    for case in CASES:
        for series, fires in ((case.bad, True), (case.good, False)):
            given = series if case.alert == "TandemControllerAway" and fires else WANTED | series
            tests.append(
                {
                    "name": f"{case.alert} {'fires' if fires else 'stays quiet'}",
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in given.items()],
                    "promql_expr_test": [
                        {
                            "expr": f'count(ALERTS{{alertname="{case.alert}", alertstate="firing"}})',
                            "eval_time": case.at,
                            "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                        }
                    ],
                }
            )
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
