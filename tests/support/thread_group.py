"""Ranks as threads of one process, so that every layout runs inside one test. Satisfies `model.parallel.ParallelGroup`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from model.parallel import PendingSum

WAIT_S = 60.0
T = TypeVar("T")


class _Meeting:
    """Where the ranks put their tensors down and wait for each other. Sums run in rank order, so they are the same every time.

    `turn`: a lock that a rank holds whenever it does not wait here, or None: ranks run at the same time.
    """

    def __init__(self, size: int, turn: threading.Lock | None):
        self.size = size
        self.turn = turn
        self.barrier = threading.Barrier(size)
        self.parts: list[Tensor] = [torch.empty(0)] * size

    def swap(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part.clone()
        self._wait()
        parts = list(self.parts)
        self._wait()  # nobody overwrites a part before all have read it
        return parts

    def _wait(self) -> None:
        if self.turn is None:
            self.barrier.wait(WAIT_S)
            return
        self.turn.release()
        try:
            self.barrier.wait(WAIT_S)
        finally:
            self.turn.acquire()


class ThreadGroup:
    """One rank's side of a meeting. `calls` lists the collectives it joined, with their shapes."""

    def __init__(self, meeting: _Meeting, rank: int):
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, t: Tensor) -> Tensor:
        self.calls.append(("all_reduce", tuple(t.shape)))
        parts = self._meeting.swap(self.rank, t)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return t.copy_(total)

    def start_all_reduce(self, t: Tensor) -> PendingSum:
        """Sums at once into a copy; `t` is spoilt until the sum is waited for, so that an early reader is found."""
        total = self.all_reduce(t.clone())
        t.fill_(float("nan"))
        return lambda: t.copy_(total)

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        self.calls.append(("all_gather", tuple(t.shape)))
        return torch.cat(self._meeting.swap(self.rank, t), dim)


def run_ranks(size: int, rank_main: Callable[[ThreadGroup], T], *, in_turns: bool = False) -> list[T]:
    """Runs `rank_main` once per rank at the same time. Returns: results by rank. The first rank that fails ends the others.

    Units: in_turns: a rank runs only while the others wait for it, so that compilers of kernels never meet another thread
    """
    meeting = _Meeting(size, threading.Lock() if in_turns else None)

    def run(rank: int) -> T:
        torch.set_num_threads(1)  # counts per thread
        try:
            with meeting.turn or contextlib.nullcontext():
                return rank_main(ThreadGroup(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
