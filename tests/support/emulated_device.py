"""A GPU of CPU memory: buffers that other processes map, lanes that are threads, and moments that tests can hold back."""

from __future__ import annotations

import contextlib
import ctypes
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from common.errors import NotSupportedError, PeerLost
from kernels.digest import DigestKey
from kernels.kv_copy import Segment, Tally, TileShape, kv_copy_ref
from kv_transfer.deadline import Deadline
from kv_transfer.memory import SharedBuffer


class EmulatedMoment:
    def __init__(self) -> None:
        self.event = threading.Event()

    def is_past(self) -> bool:
        return self.event.is_set()


class EmulatedBuffer:
    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.buffer = SharedBuffer.create(nbytes)
        self.address = self.buffer.tensor().data_ptr()

    def tensor(self) -> Tensor:
        return self.buffer.tensor()

    def handle(self) -> bytes:
        return self.buffer.describe()


class EmulatedMapping:
    """As on a GPU, a process can't map a handle that it has mapped. `history`: of the process, in order."""

    mapped: ClassVar[set[bytes]] = set()
    history: ClassVar[list[tuple[str, bytes]]] = []

    def __init__(self, handle: bytes):
        if handle in self.mapped:
            raise NotSupportedError("emulated: CUDA error 208, resource already mapped")
        self.mapped.add(handle)
        self.history.append(("mapped", handle))
        self._handle = handle
        self._buffer: SharedBuffer | None = SharedBuffer.attach(handle)
        self.address = self._buffer.tensor().data_ptr()

    def close(self) -> None:
        self.mapped.remove(self._handle)
        self.history.append(("unmapped", self._handle))
        self._buffer, self.address = None, 0


class EmulatedLane:
    """Carries out its work in a thread; a copy calls `device.before_copy` first."""

    def __init__(self, device: EmulatedDevice):
        self._device = device
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="emulated-lane").start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def after(self, moment: EmulatedMoment) -> None:
        self._work.put(moment.event.wait)

    def tally(self) -> Tally:
        return Tally(torch.device("cpu"))

    def copy(self, segments: Sequence[Segment], shape: TileShape, key: DigestKey, tally: Tally, *, wide: bool = False) -> None:
        self._device.copies.append((len(segments), wide))
        self._work.put(self._device.before_copy)
        self._work.put(lambda: self._device.copy(segments, shape, key, tally))

    def upload(self, data: np.ndarray) -> Tensor:
        return torch.from_numpy(data.copy())

    def gather(self, pool: Tensor, ids: Tensor) -> Tensor:
        host = torch.empty(len(ids), *pool.shape[1:], dtype=pool.dtype)
        self._work.put(lambda: host.copy_(pool.index_select(0, ids)))
        return host

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor)
        self._work.put(lambda: host.copy_(tensor))
        return host

    def mark(self) -> EmulatedMoment:
        moment = EmulatedMoment()
        self._work.put(moment.event.set)
        return moment


class EmulatedPair:
    """A unix socket in place of a communicator; each end works in a thread."""

    def __init__(self, name: str, rank: int, deadline: Deadline):
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._broken = False
        self._socket = _listen(name, deadline) if rank == 0 else _connect(name, deadline)
        threading.Thread(target=self._run, daemon=True, name="emulated-pair").start()

    def _run(self) -> None:
        while True:
            try:
                self._work.get()()
            except OSError:
                self._broken = True

    def after(self, moment: EmulatedMoment) -> None:
        self._work.put(moment.event.wait)

    def send(self, tensors: Sequence[Tensor], deadline: Deadline) -> None:
        for tensor in tensors:
            self._work.put(lambda t=tensor: self._socket.sendall(t.numpy().data))

    def receive(self, tensors: Sequence[Tensor], deadline: Deadline) -> None:
        for tensor in tensors:
            self._work.put(lambda t=tensor: self._fill(memoryview(t.numpy())))

    def _fill(self, into: memoryview) -> None:
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionError("closed")
            into = into[count:]

    def mark(self) -> EmulatedMoment:
        moment = EmulatedMoment()
        self._work.put(lambda: self._broken or moment.event.set())
        return moment

    def check(self) -> None:
        if self._broken:
            raise PeerLost("nccl: emulated")

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _listen(name: str, deadline: Deadline) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0pair" + name[:80])
        listener.listen(1)
        listener.settimeout(max(0.01, deadline.left_s()))
        try:
            connection, _ = listener.accept()
        except TimeoutError as exc:
            raise PeerLost("nccl: the other end did not come") from exc
    connection.settimeout(None)
    return connection


def _connect(name: str, deadline: Deadline) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect("\0pair" + name[:80])
            return connection
        except ConnectionRefusedError:
            connection.close()
            deadline.check("joining")
            time.sleep(0.002)


class EmulatedDevice:
    """`computed` tells when a layer is ready: tests replace it by a moment of their own. `before_copy` runs before each copy."""

    def __init__(self, *, before_copy: Callable[[], object] = lambda: None, allows_mapping: bool = True):
        self.before_copy = before_copy
        self.computed: Callable[[], EmulatedMoment] = _past
        self.copies: list[tuple[int, bool]] = []  # segments of each launch, and whether it was a wide one
        self.index = 0
        self._allows_mapping = allows_mapping
        self._mappings: list[EmulatedMapping] = []  # those that were not closed stay, as on a GPU

    def allocate(self, nbytes: int) -> EmulatedBuffer:
        return EmulatedBuffer(nbytes)

    def map(self, handle: bytes) -> EmulatedMapping:
        if not self._allows_mapping:
            raise NotSupportedError("this host does not let one process map another's GPU memory: emulated")
        json.loads(handle)
        self._mappings.append(EmulatedMapping(handle))
        return self._mappings[-1]

    def mark(self) -> EmulatedMoment:
        return self.computed()

    def upload(self, data: np.ndarray) -> Tensor:
        return torch.from_numpy(data.copy())

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def new_pair_id(self) -> bytes:
        return secrets.token_hex(64).encode()

    def join_pair(self, pair_id: bytes, rank: int, deadline: Deadline) -> EmulatedPair:
        return EmulatedPair(pair_id.decode(), rank, deadline)

    def lane(self) -> EmulatedLane:
        return EmulatedLane(self)

    def copy(self, segments: Sequence[Segment], shape: TileShape, key: DigestKey, tally: Tally) -> None:
        """What `kv_copy` does, by its plain twin."""
        for segment in segments:
            count = -(-segment.tokens[1] // shape.block_size) - segment.first_logical
            source = _pool(segment.source, segment.source_ids, count, shape.source_heads, shape)
            target = _pool(segment.target, segment.target_ids, count, shape.target_heads, shape) if segment.target else None
            part = kv_copy_ref(source, target, segment, shape, key)
            tally.on_device[0] += part - 2**64 if part >= 2**63 else part
        tally.on_host[0] = tally.on_device[0]


def _past() -> EmulatedMoment:
    moment = EmulatedMoment()
    moment.event.set()
    return moment


def _pool(address: int, ids: Tensor | None, count: int, heads: int, shape: TileShape) -> Tensor:
    num_blocks = count if ids is None else int(ids[:count].max()) + 1
    nbytes = num_blocks * 2 * heads * shape.head_bytes
    values = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.int32)
    return values.view(num_blocks, 2, heads, shape.block_size, shape.row_bytes // 4)
