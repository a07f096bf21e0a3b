"""A parallel group over a star of TCP links: the collectives of CPU ranks on one host.

Sums in rank order on rank 0, so results do not depend on timing. Used instead of gloo on CPUs; GPUs use `TorchGroup` over NCCL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.parallel import PendingSum
from model.star import Link


class StarGroup:
    """`ParallelGroup` whose rank 0 holds a link to every other rank, and the others one to rank 0."""

    def __init__(self, rank: int, size: int, links: list[Link]):
        self.rank = rank
        self.size = size
        self._links = links

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sum over ranks, added in fp32. Effects: in place. Returns: t

        Raises: WorkerLost if a rank is gone
        """
        if self.size == 1:
            return t
        if self.rank == 0:
            total = t.float()
            part = torch.empty_like(t, memory_format=torch.contiguous_format)
            for link in self._links:
                link.receive_into(_bytes(part))
                total = total + part
            t.copy_(total)
            self._spread(t.contiguous())
        else:
            result = t.contiguous()
            self._links[0].send(_bytes(result))
            self._links[0].receive_into(_bytes(result))
            if result.data_ptr() != t.data_ptr():
                t.copy_(result)
        return t

    def start_all_reduce(self, t: Tensor) -> PendingSum:
        """The sum itself: there is nothing on a CPU to do meanwhile."""
        self.all_reduce(t)
        return lambda: t

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        """Returns: the ranks' tensors joined along `dim` in rank order, on every rank

        Raises: WorkerLost if a rank is gone
        """
        if self.size == 1:
            return t
        shape = list(t.shape)
        shape[dim] *= self.size
        if self.rank == 0:
            parts = [t, *(torch.empty_like(t, memory_format=torch.contiguous_format) for _ in self._links)]
            for link, part in zip(self._links, parts[1:], strict=True):
                link.receive_into(_bytes(part))
            whole = torch.cat(parts, dim)
            self._spread(whole)
        else:
            whole = torch.empty(shape, dtype=t.dtype)
            self._links[0].send(_bytes(t.contiguous()))
            self._links[0].receive_into(_bytes(whole))
        return whole

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _spread(self, t: Tensor) -> None:
        for link in self._links:
            link.send(_bytes(t))


def _bytes(t: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return t.detach().view(-1).view(torch.uint8).numpy().data
