"""The two collectives that a forward pass needs, over nothing or over torch.distributed.

Owns no process group: whoever makes one (the rank's actor) hands it in and destroys it. Called by `model/gpt_oss.py` and the GPU forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

PendingSum = Callable[[], Tensor]  # waits, on the device alone where the ranks are GPUs. Returns: the sum


class ParallelGroup(Protocol):
    """Ranks that hold one model together. Every rank makes the same calls in the same order with equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sum over ranks. Effects: in place. Returns: t"""
        ...

    def start_all_reduce(self, t: Tensor) -> PendingSum:
        """Begins a sum over ranks, in place, beside what is enqueued next; t is not to be touched until it has been waited for."""
        ...

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        """Returns: the ranks' tensors joined along `dim` in rank order, on every rank"""
        ...


class LocalGroup:
    """One rank alone."""

    rank = 0
    size = 1

    def all_reduce(self, t: Tensor) -> Tensor:
        return t

    def start_all_reduce(self, t: Tensor) -> PendingSum:
        return lambda: t

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        return t


class TorchGroup:
    """Ranks of one `torch.distributed` process group (gloo on a CPU, NCCL on GPUs); None is the default group."""

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        self._group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)

    def all_reduce(self, t: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(t, group=self._group)
        return t

    def start_all_reduce(self, t: Tensor) -> PendingSum:
        if self.size == 1:
            return lambda: t
        work = dist.all_reduce(t, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return t

        return wait

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return t
        parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, t.contiguous(), group=self._group)
        return torch.cat(parts, dim)
