"""A transport around any other that drops, delays, reorders, repeats, cuts or flips what is pushed through it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from common.proto import worker_pb2
from kv_transfer.push import Push
from kv_transfer.transports.base import Deadline, Link, Target
from tests.support.faults.plan import FaultPlan


class FaultyLink:
    """Takes the shape of `Link`. The digest of what is promised was made before: whatever is spoilt here must be found at the commit."""

    def __init__(self, inner: Link, plan: FaultPlan):
        self.transport = inner.transport
        self._inner = inner
        self._plan = plan
        self._held: Push | None = None

    def write(self, push: Push, deadline: Deadline) -> None:
        kind = self._plan.draw("data")
        match kind:
            case "drop":
                return
            case "delay":
                time.sleep(self._plan.delay_s())
            case "duplicate":
                self._inner.write(push, deadline)
            case "truncate":
                push = _shorter(push)
            case "flip":
                push = _flipped(push, self._plan)
            case "reorder" if self._held is None:
                self._held = push
                return
        self._inner.write(push, deadline)
        self._write_held(deadline)

    def flush(self, deadline: Deadline) -> None:
        self._write_held(deadline)
        self._inner.flush(deadline)

    def _write_held(self, deadline: Deadline) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._inner.write(held, deadline)

    def is_lost(self) -> bool:
        return self._inner.is_lost()

    def settle(self) -> bool:
        return self._inner.settle()

    def close(self) -> None:
        self._held = None
        self._inner.close()


class FaultyOpener:
    """In place of a sender's own `LinkOpener`."""

    def __init__(self, inner: Any, plan: FaultPlan):
        self._inner = inner
        self._plan = plan

    def candidates(self, endpoints: Sequence[worker_pb2.Endpoint], dst_rank: int) -> list[worker_pb2.Endpoint]:
        return self._inner.candidates(endpoints, dst_rank)

    def open(self, endpoints: Sequence[worker_pb2.Endpoint], target: Target, deadline: Deadline) -> Link:
        return FaultyLink(self._inner.open(endpoints, target, deadline), self._plan)

    def forget(self, incarnation: int, rank: int) -> None:
        self._inner.forget(incarnation, rank)

    def close(self) -> None:
        self._inner.close()


def _shorter(push: Push) -> Push:
    """Without its last token; of a push of one token, with half of the heads."""
    start, end = push.tokens
    if end - start == 1:
        return replace(push, num_heads=max(1, push.num_heads // 2))
    blocks = (end - 2) // push.source.shape[3] - push.first_logical + 1
    parts = {"source_ids": push.source_ids, "target_ids": push.target_ids, "target_epochs": push.target_epochs}
    return replace(push, tokens=(start, end - 1), **{name: ids[:blocks] for name, ids in parts.items()})


def _flipped(push: Push, plan: FaultPlan) -> Push:
    """With one bit of one value in a copy of its source turned over, within the tokens and heads that are pushed."""
    source = push.source.index_select(0, torch.from_numpy(push.source_ids)).clone()
    token = push.tokens[0] + plan.below(push.tokens[1] - push.tokens[0])
    block, offset = divmod(token - push.first_logical * source.shape[3], source.shape[3])
    row = source[block, plan.below(2), push.source_head + plan.below(push.num_heads), offset]
    data = row.view(torch.uint8)
    data[plan.below(len(data))] ^= 1 << plan.below(8)
    return replace(push, source=source, source_ids=np.arange(len(push.source_ids)))
