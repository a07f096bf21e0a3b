"""The Grafana dashboard: rows of panels, each a few Prometheus queries, and their JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, PER_ROW = 24, 8, 3
RATE = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """`unit`: Grafana's name of it; `help`: what to read from the panel."""

    title: str
    unit: str
    help: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}[{RATE}]))"


def _quantiles(metric: str, by: str, legend: str, *quantiles: float) -> tuple[Query, ...]:
    le = f"le, {by}" if by else "le"
    return tuple(
        Query(f"histogram_quantile({q}, sum by ({le}) (rate({metric}_bucket[{RATE}])))", f"p{round(q * 100)} {legend}".strip())
        for q in quantiles or (0.5, 0.99)
    )


def _one(expr: str, legend: str) -> tuple[Query, ...]:
    return (Query(expr, legend),)


SERVICE = Row(
    "Service",
    (
        Panel("Requests", "reqps", "Ends per second. Refused is load shedding; failed is ours.",
              _one(_rate("tandem_requests_total", "outcome, reason"), "{{outcome}} {{reason}}")),
        Panel("Time to first token", "s", "From arrival at the router, queue included.",
              _quantiles("tandem_ttft_seconds", "", "", 0.5, 0.95, 0.99)),
        Panel("Gap between tokens", "s", "At the decode group: one step, or more if a step was held up.",
              _quantiles("tandem_itl_seconds", "pool", "{{pool}}")),
        Panel("Time per output token", "s", "Mean of a whole request after its first token, as the router saw it.",
              _quantiles("tandem_tpot_seconds", "decode_pool", "{{decode_pool}}")),
        Panel("End to end", "s", "From arrival to the last token.", _quantiles("tandem_e2e_seconds", "", "", 0.5, 0.95, 0.99)),
        Panel("Queue wait", "s", "Until a prefill group started on the request.",
              _quantiles("tandem_queue_wait_seconds", "prefill_pool", "{{prefill_pool}}")),
        Panel("Tokens", "short", "Per second, over all routers.", (
            Query(f"sum(rate(tandem_prompt_tokens_total[{RATE}]))", "prompt"),
            Query(f"sum(rate(tandem_output_tokens_total[{RATE}]))", "output"))),
        Panel("In progress", "short", "Calls at routers, and what waits in their queues.", (
            Query("sum(tandem_running_requests)", "running"),
            Query("sum by (pool) (tandem_queue_requests)", "queued for {{pool}}"))),
        Panel("Prediction", "short", "What it took over what was predicted; 1 is exact, the router corrects itself towards it.",
              _quantiles("tandem_prediction_ratio", "pool, quantity", "{{pool}} {{quantity}}", 0.5)),
        Panel("Retries", "short", "Attempts per finished choice beyond the first.",
              _one(f"sum(rate(tandem_attempts_total[{RATE}])) / sum(rate(tandem_choices_total[{RATE}])) - 1", "retries")),
        Panel("HTTP requests", "reqps", "At the frontends.",
              _one(_rate("tandem_frontend_requests_total", "path, status"), "{{path}} {{status}}")),
        Panel("HTTP clients", "short", "Replies being generated, clients that left early, output that was mended.", (
            Query("sum(tandem_frontend_running_requests)", "running"),
            Query(f"sum(rate(tandem_frontend_client_disconnects_total[{RATE}]))", "disconnects/s"),
            Query(f"sum(rate(tandem_frontend_content_missing_total[{RATE}]))", "empty replies/s"))),
    ),
)  # fmt: skip

POOLS = Row(
    "Pools",
    (
        Panel("Groups by state", "short", "As the controller sees them.",
              _one("sum by (pool, state) (tandem_groups)", "{{pool}} {{state}}")),
        Panel("Groups at the routers", "short", "Least over all routers: a router that can't reach a group lowers it.",
              _one("min by (pool, state) (tandem_router_groups)", "{{pool}} {{state}}")),
        Panel("Failures", "short", "Groups that ended by themselves, per hour, by the state they were in.",
              _one(f"sum by (pool, state) (rate(tandem_group_failures_total[{RATE}])) * 3600", "{{pool}} {{state}}")),
        Panel("Requests in groups", "short", "Computed now, and waiting inside the group.", (
            Query("sum by (pool) (tandem_group_running_requests)", "{{pool}} running"),
            Query("sum by (pool) (tandem_group_waiting_requests)", "{{pool}} waiting"))),
        Panel("KV use", "percentunit", "Used share of the blocks of full layers, fullest group of each pool.",
              _one('max by (pool) (tandem_kv_blocks{kind="full", state="used"} / ignoring (state) '
                   '(tandem_kv_blocks{kind="full", state="used"} + ignoring (state) tandem_kv_blocks{kind="full", state="free"}))',
                   "{{pool}}")),
        Panel("Context", "short", "Tokens of context that running requests hold.",
              _one("sum by (pool) (tandem_context_tokens)", "{{pool}}")),
        Panel("Prefill time", "s", "One prompt, first chunk to sampled token.", _quantiles("tandem_prefill_seconds", "pool", "{{pool}}")),
        Panel("Decode step", "s", "One step of the whole batch.", _quantiles("tandem_step_seconds", "pool", "{{pool}}")),
        Panel(
            "Admission", "s", "What one turn's grants and checks took while sequences ran.",
            _quantiles("tandem_operations_seconds", "pool", "{{pool}}"),
        ),
        Panel("Decode tokens", "short", "Sampled per second.", _one(_rate("tandem_decode_tokens_total", "pool"), "{{pool}}")),
        Panel("Ended early", "short", "Requests that decode groups ended before their last token, per second.",
              _one(_rate("tandem_aborts_total", "pool, reason"), "{{pool}} {{reason}}")),
    ),
)  # fmt: skip

TRANSFER = Row(
    "Transfer",
    (
        Panel("Bytes", "Bps", "KV written per second.", _one(_rate("tandem_transfer_bytes_total", "transport"), "{{transport}}")),
        Panel("Speed while writing", "Bps", "Per rank and transfer, by transport.",
              _quantiles("tandem_transfer_bytes_per_second", "transport", "{{transport}}", 0.1, 0.5)),
        Panel("Writing threads", "short", "Share of a thread's time per transport; near the number of ranks the link is the limit.",
              _one(_rate("tandem_transfer_write_seconds_total", "transport"), "{{transport}}")),
        Panel("Hand-over", "s", "What of the transfer was not hidden behind the prefill.",
              _quantiles("tandem_handover_seconds", "pool", "{{pool}}")),
        Panel("Hand-overs", "short", "Per second by outcome. Abandoned: ended first, or a push failed. Failed: the commit was refused.",
              _one(_rate("tandem_transfers_total", "outcome"), "{{outcome}}")),
        Panel("Leases", "short", "Reservations neither committed nor freed.", _one("sum by (pool) (tandem_leases)", "{{pool}}")),
        Panel("Reservations", "short", "Per second by what became of them. Fenced: a writer had to be stopped.",
              _one(_rate("tandem_reservations_total", "pool, outcome"), "{{pool}} {{outcome}}")),
    ),
)  # fmt: skip

_EARNED = f"sum by (pool) (rate(tandem_cost_usd_total[{RATE}])) * 3600"
COST = Row(
    "Cost",
    (
        Panel("Price of the pools", "currencyUSD", "Dollars per hour for the GPUs that groups hold.",
              _one("sum by (pool) (tandem_pool_usd_per_hour)", "{{pool}}")),
        Panel("Earned by requests", "currencyUSD", "Dollars per hour that finished requests account for.", _one(_EARNED, "{{pool}}")),
        Panel("Use of the money", "percentunit", "Earned over price: what is missing to 100% is idle or overhead.",
              _one(f"({_EARNED}) / sum by (pool) (tandem_pool_usd_per_hour)", "{{pool}}")),
        Panel("Dollars per million output tokens", "currencyUSD", "All pools' price over all output.",
              _one(f"sum(tandem_pool_usd_per_hour) / 3600 / sum(rate(tandem_output_tokens_total[{RATE}])) * 1e6", "price"),),
    ),
)  # fmt: skip

AUTOSCALER = Row(
    "Autoscaler",
    (
        Panel("Groups wanted", "short", "And ready.", (
            Query("sum by (pool) (tandem_groups_wanted)", "{{pool}} wanted"),
            Query('sum by (pool) (tandem_groups{state="ready"})', "{{pool}} ready"))),
        Panel("Decisions", "short", "Changes of the wanted groups per hour, by direction and reason.",
              _one(f"sum by (pool, direction, reason) (rate(tandem_autoscaler_decisions_total[{RATE}])) * 3600",
                   "{{pool}} {{direction}}: {{reason}}")),
        Panel("GPUs held", "short", "Ranks of groups that load, run or stop.", _one("sum by (pool) (tandem_pool_gpus)", "{{pool}}")),
        Panel("Predicted wait", "s", "What prefill pools are scaled by.",
              _one("max by (pool) (tandem_queue_predicted_wait_seconds)", "{{pool}}")),
        Panel("Launches", "short", "Groups started per hour.",
              _one(f"sum by (pool) (rate(tandem_group_starts_total[{RATE}])) * 3600", "{{pool}}")),
    ),
)  # fmt: skip

ROWS = (SERVICE, POOLS, TRANSFER, COST, AUTOSCALER)


def to_grafana() -> dict[str, Any]:
    """The dashboard as Grafana imports it (schema 39: Grafana 10 and newer)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in ROWS:
        panels.append(_header(row.title, len(panels) + 1, y))
        y += 1
        for i, panel in enumerate(row.panels):
            panels.append(_panel(panel, len(panels) + 1, i % PER_ROW, y + i // PER_ROW * HEIGHT))
        y += -(-len(row.panels) // PER_ROW) * HEIGHT
    return {
        "title": "Tandem",
        "uid": "tandem",
        "tags": ["tandem"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


def _header(title: str, number: int, y: int) -> dict[str, Any]:
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}, "panels": []}


def _panel(panel: Panel, number: int, column: int, y: int) -> dict[str, Any]:
    width = WIDTH // PER_ROW
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": {"h": HEIGHT, "w": width, "x": column * width, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8, "showPoints": "never"}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": query.expr, "legendFormat": query.legend}
            for i, query in enumerate(panel.queries)
        ],
    }
