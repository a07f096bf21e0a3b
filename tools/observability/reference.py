"""`docs/metrics.md` from the catalog of metrics and the alert rules."""

from __future__ import annotations

from common.metric_catalog import BY_PROCESS
from common.metrics import Definition
from tools.observability.rules import ALERTS

_WHO = {
    "router": "Router",
    "prefill": "Leader of a prefill group",
    "decode": "Leader of a decode group",
    "controller": "Controller",
    "frontend": "Frontend",
}

_HEAD = """# Metrics

Made by `python -m tools.observability` from `common/metric_catalog.py`.

Every process serves `GET /metrics` in Prometheus' text format, on 127.0.0.1 unless `metrics.host` says otherwise (frontends:
`--metrics-listen`). The ports are `metrics.controller_port`, `metrics.router_port` and `metrics.group_port`; 0, the default, is any
free one. There is no authentication on them: bind them where only the scraper reaches them.

The controller's `GET /targets` lists all processes that it knows of, so one job finds them, groups that come and go included:

```yaml
scrape_configs:
  - job_name: tandem
    http_sd_configs: [{url: "http://127.0.0.1:9400/targets", refresh_interval: 5s}]   # metrics.controller_port; `tandem status` shows it
  - job_name: tandem-frontend
    static_configs: [{targets: ["127.0.0.1:9404"]}]                                   # --metrics-listen
```

Discovery adds the labels `process` (controller, router, prefill, decode) and `group`. Every process also exports
`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds` and the other standard process metrics.

`helm/tandem/dashboards/tandem.json` is a Grafana dashboard over these metrics, `helm/tandem/rules/tandem.yaml` the alerts below.
"""


def to_markdown() -> str:
    parts = [_HEAD]
    for process, definitions in BY_PROCESS.items():
        parts.append(
            f"## {_WHO[process]}\n\n| metric | type | labels | what it is |\n|---|---|---|---|\n"
            + "\n".join(map(_line, definitions))
            + "\n"
        )
    alerts = "\n".join(f"| `{a.name}` | {a.severity} | {a.hold} | `{a.expr.replace('|', chr(92) + '|')}` | {a.action} |" for a in ALERTS)
    parts.append(f"## Alerts\n\n| alert | severity | after | when | what to do |\n|---|---|---|---|---|\n{alerts}\n")
    return "\n".join(parts)


def _line(d: Definition) -> str:
    labels = ", ".join(f"`{label}`" for label in d.labels) or "-"
    return f"| `{d.name}` | {d.kind} | {labels} | {d.help} |"
