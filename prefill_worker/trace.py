"""The spans of one Prefill call, from the events of its stream: `prefill` to the first token, `transfer` to the acknowledged commit."""

from __future__ import annotations

import time

from common.proto import worker_pb2
from common.tracing import Tracing


class PrefillTrace:
    """`group` stands on the spans. Does nothing without `tracing` or without a trace."""

    def __init__(self, tracing: Tracing | None, work: worker_pb2.Work, group: str):
        self._tracing = tracing if work.traceparent else None
        self._work = work
        self._group = group
        self._started_s = 0.0
        self._first_s = 0.0

    def saw(self, event: worker_pb2.PrefillEvent) -> None:
        if self._tracing is None:
            return
        now_s, kind = time.monotonic(), event.WhichOneof("event")
        if kind == "started":
            self._started_s = now_s
        elif kind == "first_token":
            self._first_s = now_s
            tokens = len(self._work.prompt_ids) + len(self._work.output_ids)
            self._record("prefill", now_s, {"tandem.tokens": tokens, "tandem.prefill_ms": event.first_token.prefill_ms})
        elif kind == "handed_over":
            late_ms = (now_s - self._first_s) * 1e3
            self._record("transfer", now_s, {"tandem.bytes": event.handed_over.bytes, "tandem.after_first_token_ms": late_ms})

    def _record(self, name: str, end_s: float, attributes: dict) -> None:
        assert self._tracing is not None
        self._tracing.record(name, self._work.traceparent, self._started_s, end_s, {"tandem.group": self._group, **attributes})
