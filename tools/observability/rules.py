"""The alert rules: each with the query, how long it must hold, how bad it is, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Alert:
    """`summary` may use Prometheus' templates; `action`: the first thing to look at."""

    name: str
    expr: str
    hold: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    action: str


_KV_USE = (
    'tandem_kv_blocks{role="decode", kind="full", state="used"} / ignoring (state) '
    '(tandem_kv_blocks{role="decode", kind="full", state="used"} + ignoring (state) '
    'tandem_kv_blocks{role="decode", kind="full", state="free"})'
)

ALERTS = (
    Alert(
        "TandemPoolDown", 'sum by (pool) (tandem_groups{state="ready"}) == 0 and sum by (pool) (tandem_groups_wanted) > 0', "2m",
        "critical", "Pool {{ $labels.pool }} has no ready group", "tandem status; the logs of the group's ranks say why it ended.",
    ),
    Alert(
        "TandemControllerAway", "absent(tandem_groups_wanted)", "5m", "critical", "No controller is scraped",
        "Running requests go on, dead groups are not replaced. Look at the Ray head and at the actor tandem-controller.",
    ),
    Alert(
        "TandemRequestsFail",
        'sum(rate(tandem_requests_total{outcome="failed"}[5m])) / sum(rate(tandem_requests_total[5m])) > 0.01', "5m", "critical",
        "{{ $value | humanizePercentage }} of requests fail", "The reason label tells the status; routers log one line per failure.",
    ),
    Alert(
        "TandemRefusing",
        'sum(rate(tandem_requests_total{outcome="refused", reason="resource_exhausted"}[5m])) '
        "/ sum(rate(tandem_requests_total[5m])) > 0.05", "10m", "warning",
        "{{ $value | humanizePercentage }} of requests are refused for lack of room",
        "tandem top; raise a pool's replicas.max or autoscale.gpu_budget.",
    ),
    Alert(
        "TandemFirstTokenSlow", "histogram_quantile(0.99, sum by (le) (rate(tandem_ttft_seconds_bucket[10m]))) > 10", "10m", "warning",
        "1% of first tokens take more than 10 s", "Compare queue wait and prefill time on the dashboard.",
    ),
    Alert(
        "TandemQueueLong", "max by (pool) (tandem_queue_predicted_wait_seconds) > 10", "5m", "warning",
        "Requests wait {{ $value | humanizeDuration }} for pool {{ $labels.pool }}", "tandem scale, or let the autoscaler have more GPUs.",
    ),
    Alert(
        "TandemKVFull", f"max by (pool) ({_KV_USE}) > 0.95", "10m", "warning", "KV of a group of {{ $labels.pool }} is nearly full",
        "New requests wait for room. Raise kv_blocks or replicas.",
    ),
    Alert(
        "TandemGroupsFail", "sum by (pool) (increase(tandem_group_failures_total[15m])) > 2", "0m", "warning",
        "Groups of {{ $labels.pool }} keep ending by themselves", "tandem status shows the last error; tandem doctor checks the machine.",
    ),
    Alert(
        "TandemTransfersFail",
        'sum(rate(tandem_transfers_total{outcome="failed"}[5m])) / sum(rate(tandem_transfers_total[5m])) > 0.01', "5m", "warning",
        "{{ $value | humanizePercentage }} of KV hand-overs are refused", "The prefill leader's log names the rank whose digest differs.",
    ),
    Alert(
        "TandemForgedTransfer", 'sum by (pool) (increase(tandem_transfer_messages_total{verdict="malformed"}[10m])) > 0', "0m", "critical",
        "Pool {{ $labels.pool }} got transfer messages without a valid signature",
        "Somebody else reaches the transfer ports, or the cluster key differs between hosts: docs/security.md.",
    ),
    Alert(
        "TandemLeasesStuck",
        'sum by (pool) (tandem_leases) > 0 and sum by (pool) (rate(tandem_reservations_total{outcome="granted"}[10m])) == 0', "10m",
        "warning", "Reservations of {{ $labels.pool }} are never freed", "A writer neither stops nor dies: look for a hung prefill rank.",
    ),
    Alert(
        "TandemPredictionOff",
        "abs(log2(histogram_quantile(0.5, sum by (le, pool, quantity) (rate(tandem_prediction_ratio_bucket[30m]))))) > 1", "30m", "info",
        "{{ $labels.quantity }} of {{ $labels.pool }} is predicted wrong by more than a factor of 2",
        "Measure this hardware: tandem sweep, then router.profile.",
    ),
    Alert(
        "TandemMoneyIdle",
        "sum by (pool) (rate(tandem_cost_usd_total[1h])) * 3600 / sum by (pool) (tandem_pool_usd_per_hour) < 0.05", "6h", "info",
        "Pool {{ $labels.pool }} earns less than 5% of its price", "Lower its replicas.min.",
    ),
)  # fmt: skip


def to_prometheus() -> dict[str, Any]:
    """A rule file; a PrometheusRule's `spec` is the same."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "action": alert.action},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "tandem", "rules": rules}]}
