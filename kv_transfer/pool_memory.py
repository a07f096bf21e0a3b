"""Where the pools of a decode rank lie so that peers can write into them, and over what: by device. Called when a rank starts."""

from __future__ import annotations

import torch

from kv_transfer.cuda_device import CudaDevice
from kv_transfer.device import DeviceBuffer
from kv_transfer.memory import SharedBuffer
from kv_transfer.transports import cuda_ipc, nixl, shm


def make_pool_memory(device: str, nbytes: int) -> SharedBuffer | DeviceBuffer:
    """Takes zeroed memory for pools of `nbytes`, and scratch behind them that peers may probe.

    Returns: a buffer; its tensor's first nbytes are for the pools
    Raises: OSError or KernelError if there is no room
    """
    if device == "cpu":
        return SharedBuffer.create(nbytes + shm.SCRATCH_BYTES)
    return CudaDevice(torch.device(device)).allocate(nbytes + cuda_ipc.SCRATCH_BYTES)


def offered_transports(preference: str, device: str) -> tuple[str, ...]:
    """What a rank with this `kv.transport` offers: a preference other than auto offers itself alone."""
    if preference != "auto":
        return (preference,)
    if device == "cpu":
        return ("shm", "tcp")
    return ("cuda_ipc", "nccl", *(("nixl",) if nixl.is_installed() else ()), "tcp")
