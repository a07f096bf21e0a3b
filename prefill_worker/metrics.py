"""What a prefill group exports. Lives on the leader's event loop; the service, calls and hand-overs tell it what happened."""

from __future__ import annotations

from collections.abc import Iterable

from common import metric_catalog as catalog
from common.group_metrics import GroupGauges
from common.metrics import Metrics
from common.proto import types_pb2, worker_pb2


class PrefillMetrics:
    def __init__(self, pool: str):
        self.metrics = m = Metrics(catalog.PREFILL)
        self._pool = pool
        self._gauges = GroupGauges(m, pool, "prefill")
        self._seconds = m.histogram(catalog.PREFILL_SECONDS).labels(pool)
        self._tokens = m.counter(catalog.PREFILL_TOKENS).labels(pool)
        self._transfers = m.counter(catalog.TRANSFERS)
        self._handover = m.histogram(catalog.HANDOVER_SECONDS).labels(pool)
        self._bytes = m.counter(catalog.TRANSFER_BYTES)
        self._write_seconds = m.counter(catalog.TRANSFER_SECONDS)
        self._rate = m.histogram(catalog.TRANSFER_RATE)
        for outcome in ("committed", "abandoned", "failed"):
            self._transfers.labels(pool, outcome)

    def refresh(self, load: types_pb2.GroupLoad) -> None:
        self._gauges.set(load)

    def computed(self, seconds: float, tokens: int) -> None:
        """One prompt, up to its first token."""
        self._seconds.observe(seconds)
        self._tokens.inc(tokens)

    def handed_over(self, seconds: float) -> None:
        self._handover.observe(seconds)
        self._transfers.labels(self._pool, "committed").inc()

    def abandoned(self) -> None:
        self._transfers.labels(self._pool, "abandoned").inc()

    def failed(self) -> None:
        self._transfers.labels(self._pool, "failed").inc()

    def wrote(self, uses: Iterable[worker_pb2.TransportUse]) -> None:
        """One rank's part of one transfer."""
        for use in uses:
            self._bytes.labels(self._pool, use.transport).inc(use.bytes)
            self._write_seconds.labels(self._pool, use.transport).inc(use.seconds)
            if use.seconds > 0:
                self._rate.labels(self._pool, use.transport).observe(use.bytes / use.seconds)
