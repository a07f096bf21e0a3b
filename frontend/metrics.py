"""The instruments of one frontend. Made by the app, never global."""

from __future__ import annotations

from common import metric_catalog as catalog
from common.metrics import Metrics


class FrontendMetrics:
    """Each attribute is one metric."""

    def __init__(self) -> None:
        self.metrics = m = Metrics(catalog.FRONTEND)
        self.requests = m.counter(catalog.HTTP_REQUESTS)
        self.running = m.counter(catalog.HTTP_RUNNING)
        self.ttft = m.histogram(catalog.HTTP_TTFT)
        self.render = m.histogram(catalog.HTTP_RENDER)
        self.prompt_tokens = m.counter(catalog.HTTP_PROMPT_TOKENS)
        self.output_tokens = m.counter(catalog.HTTP_OUTPUT_TOKENS)
        self.repairs = m.counter(catalog.HARMONY_REPAIRS)
        self.content_missing = m.counter(catalog.CONTENT_MISSING)
        self.disconnects = m.counter(catalog.DISCONNECTS)
