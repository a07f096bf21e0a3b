"""Ranks of one process that have each other's memory, for the emulation of CUDA kernels."""

from __future__ import annotations

import torch

from kernels.peers import PeerLayout, Peers


def emulated_peers(layout: PeerLayout, timeout_s: float = 60.0) -> list[Peers]:
    """All ranks' memory is one allocation, so that whoever keeps one rank may still write to the others.

    Returns: one `Peers` a rank; the parts of their memory that meetings fill hold NaN at first
    """
    sizes = [layout.nbytes(rank) for rank in range(layout.ranks)]
    memories = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
    for memory in memories:
        memory[layout.best :] = 0xFF
    bases = [memory.data_ptr() for memory in memories]
    return [Peers(layout, rank, memory, bases, torch.zeros(1, dtype=torch.int32), timeout_s) for rank, memory in enumerate(memories)]
