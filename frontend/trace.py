"""The frontend's span of one HTTP request, and the trace context that its generation takes along to the router.

The context is a context variable: it is set where a request is admitted and read where its generation starts, in the same task or in one
made from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextvars import ContextVar

from common.tracing import Tracing, parent_in

TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")


def begin(tracing: Tracing | None, headers: Mapping[str, str], path: str, request_id: str, cleanup: contextlib.AsyncExitStack) -> None:
    """Goes on with the client's trace, or starts one. The span ends with `cleanup`: when the last byte is sent or given up."""
    parent = parent_in(tuple(headers.items()))
    if tracing is not None:
        span = tracing.start("http", parent, {"http.route": path, "tandem.request_id": request_id})
        cleanup.callback(span.end)
        parent = span.traceparent
    TRACEPARENT.set(parent)
