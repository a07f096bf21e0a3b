"""The gauges that leaders of both roles export, set from the load that the group tells anyway."""

from __future__ import annotations

from common import metric_catalog as catalog
from common.metrics import Metrics
from common.proto import types_pb2


class GroupGauges:
    def __init__(self, metrics: Metrics, pool: str, role: str):
        self._running = metrics.counter(catalog.GROUP_RUNNING).labels(pool, role)
        self._waiting = metrics.counter(catalog.GROUP_WAITING).labels(pool, role)
        self._context = metrics.counter(catalog.CONTEXT_TOKENS).labels(pool, role)
        self._draining = metrics.counter(catalog.DRAINING).labels(pool, role)
        blocks = metrics.counter(catalog.KV_BLOCKS)
        self._blocks = {(kind, state): blocks.labels(pool, role, kind, state) for kind in ("full", "sliding") for state in ("free", "used")}

    def set(self, load: types_pb2.GroupLoad) -> None:
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._context.set(load.context_tokens)
        self._draining.set(load.draining)
        for kind, free, total in (
            ("full", load.free_full_blocks, load.total_full_blocks),
            ("sliding", load.free_sliding_blocks, load.total_sliding_blocks),
        ):
            self._blocks[kind, "free"].set(free)
            self._blocks[kind, "used"].set(total - free)
