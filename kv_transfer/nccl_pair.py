"""A NCCL communicator of two processes, by NCCL's C interface: calls return at once, waits have deadlines, abort always works.

Not torch's process groups: their watchdog ends the process when a peer stalls. Owns the communicator and its stream. One thread per pair.
Source: NCCL's nccl.h (2.18 and later); non-blocking communicators, ncclCommAbort.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from common.errors import NotSupportedError, PeerLost
from kv_transfer.deadline import Deadline
from kv_transfer.device import Moment

ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_POLL_S = 50e-6
_EAGER_S = 1e-3  # a call of a pair that is connected is enqueued within microseconds: no sleep, which takes several times as long


@dataclass(frozen=True)
class CudaMoment:
    """A `Moment` of a CUDA stream."""

    event: torch.cuda.Event

    def is_past(self) -> bool:
        return self.event.query()


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.18; later versions take a shorter one by its size."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")  # torch has it loaded
    except OSError as exc:
        raise NotSupportedError(f"transport nccl: {exc}") from exc
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def new_id() -> bytes:
    """Returns: what both processes of a pair must have; made by one of them"""
    unique = _UniqueId()
    if _library().ncclGetUniqueId(ctypes.byref(unique)) != _SUCCESS:
        raise NotSupportedError("transport nccl: no unique id; see NCCL_DEBUG=INFO")
    return bytes(unique)


class NcclPair:
    """One end. Units: rank: 0 sends, 1 receives

    Raises: PeerLost if the other end does not come before the deadline, or NCCL fails
    """

    def __init__(self, unique_id: bytes, rank: int, device: torch.device, deadline: Deadline):
        torch.cuda.set_device(device)
        self._comm = ctypes.c_void_p()
        self._stream = torch.cuda.Stream(device)
        self._peer = 1 - rank
        none = -(2**31)
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21800, 0, none, none, none, None, none)
        unique = _UniqueId.from_buffer_copy(unique_id)
        status = _library().ncclCommInitRankConfig(ctypes.byref(self._comm), 2, unique, rank, ctypes.byref(config))
        try:
            self._finish(status, deadline, "join")
        except BaseException:
            self.abort()
            raise

    def after(self, moment: Moment) -> None:
        assert isinstance(moment, CudaMoment)
        self._stream.wait_event(moment.event)

    def send(self, tensors: Sequence[Tensor], deadline: Deadline) -> None:
        """Enqueues all as one group. Shapes: uint8, contiguous, on the device; they must stay until a later `mark` is past"""
        self._group(_library().ncclSend, tensors, deadline, "send")

    def receive(self, tensors: Sequence[Tensor], deadline: Deadline) -> None:
        """The other end of a `send` of equal sizes."""
        self._group(_library().ncclRecv, tensors, deadline, "receive")

    def mark(self) -> CudaMoment:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaMoment(event)

    def check(self) -> None:
        """Raises: PeerLost if NCCL has noticed that something broke"""
        state = ctypes.c_int()
        _library().ncclCommGetAsyncError(self._comm, ctypes.byref(state))
        if state.value not in (_SUCCESS, _IN_PROGRESS):
            raise PeerLost(f"nccl: {_name(state.value)}")

    def abort(self) -> None:
        """Ends what is under way, whatever the other end does. Idempotent."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm.value:
            _library().ncclCommAbort(comm)

    def _group(self, call: Callable, tensors: Sequence[Tensor], deadline: Deadline, what: str) -> None:
        library, stream = _library(), ctypes.c_void_p(self._stream.cuda_stream)
        library.ncclGroupStart()
        statuses = [
            call(ctypes.c_void_p(t.data_ptr()), ctypes.c_size_t(t.numel()), _UINT8, self._peer, self._comm, stream) for t in tensors
        ]
        statuses.append(library.ncclGroupEnd())
        broken = [status for status in statuses if status not in (_SUCCESS, _IN_PROGRESS)]
        self._finish(broken[0] if broken else _IN_PROGRESS, deadline, what)

    def _finish(self, status: int, deadline: Deadline, what: str) -> None:
        """Waits until the call is enqueued on the device: the first ones of a pair set up its connection, which takes both ends."""
        state, began = ctypes.c_int(status), time.monotonic()
        while state.value == _IN_PROGRESS:
            if self._comm.value is None:
                raise PeerLost(f"nccl: can't {what}")
            _library().ncclCommGetAsyncError(self._comm, ctypes.byref(state))
            if state.value == _IN_PROGRESS:
                deadline.check(f"waiting for NCCL to {what}")
                time.sleep(0 if time.monotonic() - began < _EAGER_S else _POLL_S)
        if state.value != _SUCCESS:
            raise PeerLost(f"nccl: can't {what}: {_name(state.value)}")


def _name(status: int) -> str:
    return _library().ncclGetErrorString(status).decode()
