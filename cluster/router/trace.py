"""The router's spans of one call: `generate` from arrival to the end, `queue` for each choice that got a prefill group.

Made by `generate.py` for every call; without tracing it only carries the client's own context on to the groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.router.job import Job
from common.tracing import Attributes, Tracing, parent_in


class CallTrace:
    """`traceparent`: what groups are told; "" = no trace."""

    def __init__(self, tracing: Tracing | None, metadata):
        self._tracing = tracing
        parent = parent_in(metadata)
        self._span = tracing.start("generate", parent) if tracing is not None else None
        self.traceparent = self._span.traceparent if self._span is not None else parent
        self.jobs: Sequence[Job] = ()

    def end(self, error: BaseException | None = None) -> None:
        """Once, however the call has ended."""
        if self._tracing is None or self._span is None:
            return
        for job in self.jobs:
            stamps = job.stamps
            until_s = stamps.granted_s or asyncio.get_running_loop().time()
            self._tracing.record("queue", self.traceparent, stamps.arrived_s, until_s, {"tandem.choice": job.index})
        if self.jobs:
            request = self.jobs[0].request
            attributes: Attributes = {
                "tandem.request_id": request.label,
                "tandem.prompt_tokens": len(request.prompt_ids),
                "tandem.output_tokens": sum(len(job.tokens) for job in self.jobs),
                "tandem.attempts": sum(job.attempts for job in self.jobs),
            }
            self._span.set(attributes)
        self._span.end(error)
