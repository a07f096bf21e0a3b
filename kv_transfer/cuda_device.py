"""A GPU through CUDA: what `device.py` asks for. Waits for the device in `allocate` and `empty` alone; owns streams and events, no KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.errors import KernelError, NotSupportedError
from kernels.device_memory import DeviceMemory, MappedMemory
from kernels.digest import DigestKey
from kernels.kv_copy import COPY_BLOCKS, WIDE_COPY_BLOCKS, Segment, Tally, TileShape, kv_copy
from kv_transfer.deadline import Deadline
from kv_transfer.device import Moment
from kv_transfer.nccl_pair import CudaMoment, NcclPair, new_id


class CudaLane:
    """A CUDA stream."""

    def __init__(self, device: torch.device):
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        self._handle: int = self._stream.cuda_stream

    def after(self, moment: Moment) -> None:
        assert isinstance(moment, CudaMoment)
        self._stream.wait_event(moment.event)

    def tally(self) -> Tally:
        with torch.cuda.stream(self._stream):
            return Tally(self._stream.device)

    def copy(self, segments: Sequence[Segment], shape: TileShape, key: DigestKey, tally: Tally, *, wide: bool = False) -> None:
        kv_copy(segments, shape, key, tally, stream=self._handle, blocks=WIDE_COPY_BLOCKS if wide else COPY_BLOCKS)

    def upload(self, data: np.ndarray) -> Tensor:
        with torch.cuda.stream(self._stream):
            return _upload(data, self._stream.device)

    def gather(self, pool: Tensor, ids: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            return self.fetch(pool.index_select(0, ids))

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        return host

    def mark(self) -> CudaMoment:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaMoment(event)


class CudaDevice:
    def __init__(self, device: torch.device):
        self.index = device.index or 0
        self._device = torch.device("cuda", self.index)

    def allocate(self, nbytes: int) -> DeviceMemory:
        return DeviceMemory(self._device, nbytes)

    def map(self, handle: bytes) -> MappedMemory:
        try:
            return MappedMemory(self._device, handle)
        except KernelError as exc:
            raise NotSupportedError(f"this host does not let one process map another's GPU memory: {exc.message}") from exc

    def mark(self) -> CudaMoment:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return CudaMoment(event)

    def upload(self, data: np.ndarray) -> Tensor:
        return _upload(data, self._device)

    def empty(self, nbytes: int) -> Tensor:
        return self.allocate(nbytes).tensor()  # torch's own would be memory that work of the current stream may still be about to touch

    def new_pair_id(self) -> bytes:
        return new_id()

    def join_pair(self, pair_id: bytes, rank: int, deadline: Deadline) -> NcclPair:
        return NcclPair(pair_id, rank, self._device, deadline)

    def lane(self) -> CudaLane:
        return CudaLane(self._device)


def _upload(data: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(data).pin_memory().to(device, non_blocking=True)


def device_of(tensor: Tensor) -> CudaDevice | None:
    """Returns: the GPU that a pool lies on, None on the CPU"""
    return CudaDevice(tensor.device) if tensor.is_cuda else None
