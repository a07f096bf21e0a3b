"""What a decode group exports. Updated by the engine's thread alone, a constant number of times per step whatever the batch."""

from __future__ import annotations

from collections.abc import Mapping

from common import metric_catalog as catalog
from common.errors import ServingError
from common.group_metrics import GroupGauges
from common.metrics import Metrics
from common.proto import types_pb2


class DecodeMetrics:
    def __init__(self, pool: str):
        self.metrics = m = Metrics(catalog.DECODE)
        self._pool = pool
        self._gauges = GroupGauges(m, pool, "decode")
        self._leases = m.counter(catalog.LEASES).labels(pool)
        self._step = m.histogram(catalog.STEP_SECONDS).labels(pool)
        self._operations = m.histogram(catalog.OPERATIONS_SECONDS).labels(pool)
        self._itl = m.histogram(catalog.ITL).labels(pool)
        self._tokens = m.counter(catalog.DECODE_TOKENS).labels(pool)
        self._reservations = m.counter(catalog.RESERVATIONS)
        self._aborts = m.counter(catalog.ABORTS)
        self._messages = m.counter(catalog.TRANSFER_MESSAGES)
        self._last_sampled_s: float | None = None
        for outcome in ("granted", "refused", "committed", "failed", "released", "fenced"):
            self._reservations.labels(pool, outcome)
        for reason in ("cancelled", "deadline_exceeded"):
            self._aborts.labels(pool, reason)

    def refresh(self, load: types_pb2.GroupLoad, messages: Mapping[str, int]) -> None:
        """`messages`: what `Receiver.counts` says."""
        self._gauges.set(load)
        self._leases.set(load.transfers)
        for verdict, count in messages.items():
            if verdict != "bytes":
                self._messages.labels(self._pool, verdict).set(count)

    def stepped(self, seconds: float, sequences: int, now_s: float) -> None:
        """One step has sampled a token for each of so many sequences. The gap is to the step before, unless the group was idle between."""
        self._step.observe(seconds)
        self._tokens.inc(sequences)
        if self._last_sampled_s is not None:
            self._itl.observe(now_s - self._last_sampled_s, times=sequences)
        self._last_sampled_s = now_s

    def operated(self, seconds: float) -> None:
        """The operations of a plan have taken so long while sequences were running."""
        self._operations.observe(seconds)

    def idle(self) -> None:
        self._last_sampled_s = None

    def reservation(self, outcome: str) -> None:
        """granted, refused, committed, failed, released or fenced."""
        self._reservations.labels(self._pool, outcome).inc()

    def aborted(self, error: ServingError) -> None:
        self._aborts.labels(self._pool, error.grpc_status.lower()).inc()
