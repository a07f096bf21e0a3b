"""What transfers need of a GPU: memory that peers can map, moments in the order of device work, and lanes that carry out copies.

The GPU itself is behind `Device`, so that planning, ordering and faults run in tests on a CPU. Implementation: cuda_device.py. Owns
nothing. Used by sender, receiver and the transports for device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.digest import DigestKey
from kernels.kv_copy import Segment, Tally, TileShape
from kv_transfer.deadline import Deadline

WIDE_BYTES = 32 << 20  # of layers that are all there: they did not come from a prefill that computes beside the copy
_ALIGNMENT = 16
_TORCH_DTYPE = {"int32": torch.int32, "int64": torch.int64}


class Moment(Protocol):
    """A point in the order of device work."""

    def is_past(self) -> bool:
        """True once everything before it has been carried out; never blocks."""


class Mapping(Protocol):
    """Memory of another process, as long as it is open."""

    address: int

    def close(self) -> None: ...


class DeviceBuffer(Protocol):
    """Memory on a device that peers of this host can map."""

    nbytes: int
    address: int

    def tensor(self) -> Tensor:
        """Returns: [nbytes] uint8; keeps the memory alive"""

    def handle(self) -> bytes:
        """Returns: what `Device.map` needs; for processes of this host and user only"""


class Lane(Protocol):
    """Work of one thread on a device, in order, beside other lanes."""

    def after(self, moment: Moment) -> None:
        """What follows starts when `moment` is past. Returns at once."""

    def tally(self) -> Tally:
        """Returns: what digests of this lane's copies add up in"""

    def copy(self, segments: Sequence[Segment], shape: TileShape, key: DigestKey, tally: Tally, *, wide: bool = False) -> None:
        """Enqueues `kernels.kv_copy.kv_copy`; what the tally says is valid when a later `mark` is past.

        Units: wide: it may take as many multiprocessors as make it fastest, not only those that a prefill does not miss
        """

    def upload(self, data: np.ndarray) -> Tensor:
        """Enqueues a copy to the device; `data` may be changed after the return."""

    def gather(self, pool: Tensor, ids: Tensor) -> Tensor:
        """Enqueues a copy of blocks `ids` of a pool (or of some of its heads) to the host. Returns: as `fetch`"""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Enqueues a copy to the host. Returns: a CPU tensor, valid when a later `mark` is past"""

    def mark(self) -> Moment:
        """Returns: the moment behind everything enqueued so far"""


class Pair(Protocol):
    """One end of a communicator of two processes. Every call returns at once or by its deadline; see `nccl_pair.py`."""

    def after(self, moment: Moment) -> None: ...

    def send(self, tensors: Sequence[Tensor], deadline: Deadline) -> None: ...

    def receive(self, tensors: Sequence[Tensor], deadline: Deadline) -> None: ...

    def mark(self) -> Moment: ...

    def check(self) -> None: ...

    def abort(self) -> None: ...


class Device(Protocol):
    """One GPU, or what stands for it. Units: index: among those that this process sees"""

    index: int

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Raises: KernelError if there is no room"""

    def map(self, handle: bytes) -> Mapping:
        """Not twice at a time for one handle: see `mappings.py`.

        Raises: NotSupportedError with the reason where this host does not allow it
        """

    def mark(self) -> Moment:
        """Returns: the moment behind everything that the calling thread has enqueued on its current stream"""

    def upload(self, data: np.ndarray) -> Tensor:
        """Enqueues a copy to the device on the current stream; `data` may be changed after the return."""

    def empty(self, nbytes: int) -> Tensor:
        """Returns: [nbytes] uint8 for this process's own use, in any stream's work from now on"""

    def new_pair_id(self) -> bytes:
        """Returns: 128 bytes that both ends of a new pair must have"""

    def join_pair(self, pair_id: bytes, rank: int, deadline: Deadline) -> Pair:
        """Units: rank: 0 sends, 1 receives. Raises: as `NcclPair`"""

    def lane(self) -> Lane:
        """To be called by the thread that will use it."""


def upload_together(to: Device | Lane, parts: Sequence[np.ndarray]) -> list[Tensor]:
    """Several arrays in one copy. Returns: their tensors, of the same shapes and dtypes"""
    ends = np.cumsum([-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts])
    packed = np.zeros(ends[-1], np.uint8)
    starts = [0, *ends[:-1].tolist()]
    for start, part in zip(starts, parts, strict=True):
        packed[start : start + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    on_device = to.upload(packed)
    return [
        on_device[start : start + part.nbytes].view(_TORCH_DTYPE[part.dtype.name]).view(part.shape)
        for start, part in zip(starts, parts, strict=True)
    ]
