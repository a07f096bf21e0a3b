"""All metrics of one frontend, in a registry of its own; base units in the names. Made by the app, never global."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60)
_FAST_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2)


class FrontendMetrics:
    """Counters and histograms; each attribute is one metric."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("frontend_requests", "HTTP requests by path and status", ["path", "status"], registry=self.registry)
        self.running = Gauge("frontend_running_requests", "requests being generated", registry=self.registry)
        self.ttft = Histogram("frontend_ttft_seconds", "accepted to first token", buckets=_LATENCY_BUCKETS_S, registry=self.registry)
        self.render = Histogram("frontend_render_seconds", "rendering one prompt to ids", buckets=_FAST_BUCKETS_S, registry=self.registry)
        self.prompt_tokens = Counter("frontend_prompt_tokens", "rendered prompt tokens", registry=self.registry)
        self.output_tokens = Counter("frontend_output_tokens", "tokens received from the router", registry=self.registry)
        self.repairs = Counter("harmony_repair", "malformed output that was mended, by kind", ["kind"], registry=self.registry)
        self.content_missing = Counter(
            "frontend_content_missing", "replies with tokens but neither content nor a call", registry=self.registry
        )
        self.disconnects = Counter("frontend_client_disconnects", "clients gone before the end", registry=self.registry)
