"""One OpenTelemetry trace per request across processes: frontend, router, prefill, transfer, decode.

A process that traces has a `Tracing`, any other has None and pays one test per request. Context travels as W3C `traceparent`: in HTTP
headers, in gRPC metadata, and in `Work` between router and groups. Needs the extra `traces`; OpenTelemetry is imported when a `Tracing`
is made.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from common.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan

TRACEPARENT = "traceparent"
_W3C = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class TracingSpec:
    """`exporter` otlp: `target` is the collector's URL; file: a folder, one file of JSON lines per process. `sample_ratio`: of requests
    that come without a context of their own."""

    exporter: Literal["otlp", "file"]
    target: str
    sample_ratio: float = 1.0


def parent_in(metadata: Sequence[tuple[str, Any]] | None) -> str:
    """The valid `traceparent` in gRPC metadata or HTTP headers, "" if there is none."""
    found = next((value for key, value in metadata or () if key.lower() == TRACEPARENT), "")
    text = found.decode("latin-1") if isinstance(found, bytes) else found
    return text if _W3C.fullmatch(text) else ""


class Span:
    """One piece of work. `traceparent`: the context for what happens inside of it, elsewhere. `end` counts once."""

    def __init__(self, span: OtelSpan):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._span = span
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, _context_of(span))
        self.traceparent = carrier.get(TRACEPARENT, "")

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, str(error)[:500]))
        self._span.end()


class Tracing:
    """Raises: ConfigError if OpenTelemetry or the exporter is not installed"""

    def __init__(self, spec: TracingSpec, service: str):
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError as exc:
            raise ConfigError(f"tracing: {exc}; pip install 'tandem[traces]'") from exc
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": f"tandem-{service}", "process.pid": os.getpid()}),
            sampler=ParentBased(TraceIdRatioBased(spec.sample_ratio)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(spec, service), schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("tandem")
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def start(self, name: str, traceparent: str, attributes: Attributes | None = None) -> Span:
        """`traceparent` "": the start of a trace."""
        return Span(self._tracer.start_span(name, _extracted(traceparent), attributes=dict(attributes or {})))

    def record(self, name: str, traceparent: str, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
        """A span that is over. Times on the monotonic clock, which the event loop's is too."""
        start_ns, end_ns = (self._epoch_ns + round(seconds * 1e9) for seconds in (start_s, end_s))
        span = self._tracer.start_span(name, _extracted(traceparent), attributes=dict(attributes or {}), start_time=start_ns)
        span.end(end_ns)

    def close(self) -> None:
        """Sends what is left; a few seconds at most."""
        self._provider.force_flush(3000)
        self._provider.shutdown()


def make_tracing(spec: TracingSpec | None, service: str) -> Tracing | None:
    return Tracing(spec, service) if spec is not None else None


def _extracted(traceparent: str):
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}) if traceparent else None


def _context_of(span: OtelSpan):
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _exporter(spec: TracingSpec, service: str):
    if spec.exporter == "file":
        return _file_exporter(Path(spec.target) / f"{service}-{os.getpid()}.jsonl")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as exc:
        raise ConfigError("tracing.exporter otlp needs its exporter: pip install 'tandem[traces]'") from exc
    return OTLPSpanExporter(endpoint=f"{spec.target.rstrip('/')}/v1/traces")


def _file_exporter(path: Path):
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        out = path.open("a")
    except OSError as exc:
        raise ConfigError(f"tracing.target {path.parent} can't be written: {exc.strerror}") from exc

    class FileExporter(SpanExporter):
        """One span per line. Called from the exporting thread alone."""

        def export(self, spans):
            out.writelines(span.to_json(indent=None) + "\n" for span in spans)
            out.flush()
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            out.close()

    return FileExporter()
