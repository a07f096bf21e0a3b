"""Makes the memory over which the GPU ranks of one group meet: each allocates its own and maps that of all others by CUDA IPC.

Works where every process sees its own GPU only, and with several ranks on one GPU. Called while a rank is built; what is done with
the memory is `kernels/peers.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from common.errors import KernelError, NotSupportedError
from kernels.device_memory import DeviceMemory, MappedMemory
from kernels.peers import PeerLayout, Peers
from model.parallel import ParallelGroup

MEETING_TIMEOUT_S = 5.0  # a rank whose process has died is noticed ten times as fast by `RankWatch`; this is for one that hangs


class OwnMemory(Protocol):
    address: int

    def tensor(self) -> Tensor: ...

    def handle(self) -> bytes: ...


class OthersMemory(Protocol):
    address: int


def open_peers(
    group: ParallelGroup,
    layout: PeerLayout,
    status: Tensor,
    *,
    timeout_s: float = MEETING_TIMEOUT_S,
    exchange: torch.device | str = "cpu",
    allocate: Callable[[torch.device, int], OwnMemory] = DeviceMemory,
    map_handle: Callable[[torch.device, bytes], OthersMemory] = MappedMemory,
) -> Peers:
    """Every rank of the group calls it at the same time; handles travel over the group's own collectives.

    Shapes: status [1] int32 on the rank's device, zero
    Units: exchange: device of the tensors that the group's collectives take
    Effects: the mappings stay until the process ends
    Raises: NotSupportedError on every rank where this host lets one of them not map another's GPU memory; WorkerLost if another rank failed
    """
    memory = allocate(status.device, layout.nbytes(group.rank))
    handle = memory.handle()
    handles = group.all_gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8)[None].to(exchange), dim=0).cpu()
    bases = [memory.address] * group.size
    refused: NotSupportedError | None = None
    for rank in range(group.size):
        if rank != group.rank:
            try:
                bases[rank] = _mapped(map_handle, status.device, bytes(handles[rank].numpy()), rank)
            except NotSupportedError as exc:
                refused = exc
    # nobody writes before all have mapped, and where one can't, none does
    num_refused = float(group.all_reduce(torch.tensor([float(refused is not None)], device=exchange)))
    if refused is not None:
        raise refused
    if num_refused:
        raise NotSupportedError("this host does not let another rank of the group map GPU memory", rank=group.rank)
    return Peers(layout, group.rank, memory.tensor(), bases, status, timeout_s)


def _mapped(map_handle: Callable[[torch.device, bytes], OthersMemory], device: torch.device, handle: bytes, rank: int) -> int:
    try:
        return map_handle(device, handle).address
    except KernelError as exc:
        raise NotSupportedError(f"this host does not let a rank map the GPU memory of rank {rank}: {exc.message}", rank=rank) from exc
