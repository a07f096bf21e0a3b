"""CUDA IPC: the prefill rank maps the decode rank's pools and one kernel per batch of layers writes straight into them, over NVLink.

Same host and user only. One-sided: the receiver can't refuse a write, so its blocks may be reused only after the writer has confirmed that
it stopped, or is dead for long enough that its GPU has dropped what was enqueued. Written bytes are acknowledged by the device's own
order: a kernel that has ended has written.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from common import process
from common.errors import KVTransferError, LayoutMismatch, PeerLost, TransferTimeout
from common.keyring import Key
from common.kv_layout import DTYPE_BYTES, head_range
from common.proto import types_pb2
from kernels.digest import MASK, DigestKey
from kernels.kv_copy import MAX_SEGMENTS, Segment, TileShape
from kv_transfer import mappings
from kv_transfer.deadline import Deadline
from kv_transfer.device import WIDE_BYTES, Device, DeviceBuffer, Moment
from kv_transfer.handle_exchange import ask_for_handle
from kv_transfer.pool_view import PoolView
from kv_transfer.push import Push
from kv_transfer.transports.base import Target

SCRATCH_BYTES = 16 << 20  # behind the pools, for probes
# Layers gather as long as the sender has more at hand: each launch costs about ten microseconds of start and end. Enough for the first
# launch, for one behind it, and for any (a launch waits for its last layer, so the last one must end within a millisecond after it).
_ENOUGH_BYTES = (8 << 20, 32 << 20, 128 << 20)
_PROBE_COPIES = 8
_WATCH_S = 0.1
_EAGER_S = 2e-3  # a wait that is over soon does not sleep
_POLL_S = 50e-6


@dataclass(frozen=True)
class _Launch:
    """`batch` keeps the sources until they are read; `ready`: when the device may begin."""

    ready: Moment | None
    over: Moment
    batch: list[Push]


def describe(view: PoolView, buffer: DeviceBuffer, socket_name: str) -> bytes:
    """Returns: the endpoint's detail, for `CudaIpcLink`; the handle itself goes over the socket

    Raises: KVTransferError if a pool does not lie in the buffer
    """
    own = process.identity()
    facts: dict[str, object] = {"socket": socket_name, "owner": {"host": own.host, "pid": own.pid, "start_ticks": own.start_ticks}}
    pools_end = 0
    for name, pool in (("full", view.full), ("sliding", view.sliding)):
        nbytes = pool.numel() * pool.element_size()
        offset = pool.data_ptr() - buffer.address if nbytes else 0
        if not 0 <= offset <= buffer.nbytes - nbytes:
            raise KVTransferError(f"the {name} pool does not lie in the device's buffer")
        facts[name] = {"offset": offset, "num_blocks": pool.shape[1]}
        pools_end = max(pools_end, offset + nbytes)
    facts["scratch"] = {"offset": pools_end, "nbytes": buffer.nbytes - pools_end}
    return json.dumps(facts).encode()


class CudaIpcLink:
    """Mapped pools of one decode rank.

    Units: io_timeout_s: longest wait without progress of the device
    Raises: NotSupportedError with the reason where the host does not allow it; KVTransferError if the endpoint makes no sense or its
        owner refuses; PeerLost if its owner is gone or was replaced
    """

    transport = "cuda_ipc"

    def __init__(
        self, detail: bytes, target: Target, source: PoolView, device: Device, *, key: Key, io_timeout_s: float, deadline: Deadline
    ):
        try:
            facts = json.loads(detail)
            self._owner = types_pb2.ProcessIdentity(**facts["owner"])
            offsets = {slides: int(facts[name]["offset"]) for slides, name in ((False, "full"), (True, "sliding"))}
            self._num_blocks = {slides: int(facts[name]["num_blocks"]) for slides, name in ((False, "full"), (True, "sliding"))}
            scratch, self._scratch_bytes = int(facts["scratch"]["offset"]), int(facts["scratch"]["nbytes"])
            socket_name = str(facts["socket"])
        except (ValueError, KeyError, TypeError) as exc:
            raise KVTransferError(f"cuda_ipc endpoint of decode rank {target.rank} makes no sense: {exc}") from exc
        g = target.geometry
        self._target = target
        self._source = source
        self._io_timeout_s = io_timeout_s
        self._row_bytes = g.head_dim * DTYPE_BYTES[g.dtype]
        self._heads = head_range(g.num_kv_heads, target.tp_size, target.rank).count
        if self._owner.host != process.host_id():
            raise KVTransferError("the decode rank's GPU memory is on another host")
        self._check_owner()
        timeout_s = max(0.05, min(2.0, deadline.left_s()))
        handle = ask_for_handle(socket_name, owner_pid=self._owner.pid, key=key, incarnation=target.incarnation, timeout_s=timeout_s)
        self._mapping = mappings.OF_THIS_PROCESS.open(device, handle, deadline)
        self._bases = {slides: self._mapping.address + offset for slides, offset in offsets.items()}
        self._scratch = self._mapping.address + scratch
        self._lane = device.lane()
        self._tally = self._lane.tally()  # of everything this link has ever written
        self._digest_taken = self._digest_read = 0
        self._batch: list[Push] = []
        self._batch_bytes = 0
        self._in_flight: deque[_Launch] = deque()
        block_bytes = 2 * self._heads * g.head_block_bytes
        self._layers = {
            layer: self._bases[slides] + place * self._num_blocks[slides] * block_bytes
            for slides, layers in ((False, g.full_layers), (True, g.sliding_layers))
            for place, layer in enumerate(layers)
        }
        self._checked: dict[bool, np.ndarray | None] = {False: None, True: None}

    def write(self, push: Push, deadline: Deadline) -> None:
        deadline.check("writing over CUDA IPC")
        if time.monotonic() > self._look_at:  # not each time: it reads a file
            self._check_owner()
        self._check_ids(push)
        self._batch.append(push)
        self._batch_bytes += push.nbytes
        if len(self._batch) == MAX_SEGMENTS or self._is_enough():
            self.submit()

    def submit(self) -> None:
        batch, nbytes, self._batch, self._batch_bytes = self._batch, self._batch_bytes, [], 0
        if not batch:
            return
        last = batch[-1]
        if last.device is None:
            raise LayoutMismatch("cuda_ipc copies from pools on a GPU only")
        self._lane.after(last.device.ready)  # the moments of a batch are of one stream, in order
        shape = self._shape(last.source.shape[2], last.num_heads)
        wide = nbytes >= WIDE_BYTES and last.device.ready.is_past()
        self._lane.copy([self._segment(push) for push in batch], shape, last.device.key, self._tally, wide=wide)
        self._in_flight.append(_Launch(last.device.ready, self._lane.mark(), batch))

    def flush(self, deadline: Deadline) -> None:
        self.submit()
        self._check_owner()  # nobody would ever read what was written for a dead one
        if self._in_flight:
            self._await(self._in_flight[-1], deadline)
        self._in_flight.clear()
        self._digest_read = self._tally.value()

    def take_digest(self) -> int:
        part = (self._digest_read - self._digest_taken) & MASK
        self._digest_taken = self._digest_read
        return part

    def is_lost(self) -> bool:
        return process.is_known_dead(self._owner)

    def settle(self) -> bool:
        """What was not launched never is; what was launched ends by itself, once the layers that it waits for are computed."""
        self._batch, self._batch_bytes = [], 0
        return self._num_launched() == 0

    def close(self) -> None:
        """What the device may still use stays: only the end of the process takes it away."""
        if self.settle():
            self._mapping.close()
        else:
            mappings.OF_THIS_PROCESS.keep(self)

    def probe(self, deadline: Deadline) -> int:
        """Copies the first full layer of this rank's pool, whatever it holds, into the scratch behind the decode rank's pools."""
        if not self._source.full.shape[0]:
            return 0
        pool = self._source.full[0]
        heads, head_bytes = pool.shape[2], self._target.geometry.head_block_bytes
        count = self._scratch_bytes // (2 * heads * head_bytes)
        if not count:
            return 0
        shape = TileShape(self._target.geometry.block_size_tokens, self._row_bytes, heads, heads, heads, heads)
        tokens = count * shape.block_size
        parts = (np.zeros(self._row_bytes // 4, np.int64), np.zeros((tokens, 2), np.int64), np.zeros((1, 2, heads), np.int64))
        key = DigestKey(*map(self._lane.upload, parts))
        source_ids = self._lane.upload((np.arange(count) % pool.shape[0]).astype(np.int32))
        target_ids = self._lane.upload(np.arange(count, dtype=np.int32))
        segment = Segment(pool.data_ptr(), self._scratch, 0, 0, source_ids, target_ids, (0, tokens), 0, 0, 0)
        for _ in range(_PROBE_COPIES):
            self._lane.copy([segment], shape, key, self._tally, wide=True)
        self._in_flight.append(_Launch(None, self._lane.mark(), []))
        self._await(self._in_flight[-1], deadline)
        return _PROBE_COPIES * count * 2 * heads * head_bytes

    def _shape(self, source_heads: int, num_heads: int) -> TileShape:
        g = self._target.geometry
        return TileShape(g.block_size_tokens, self._row_bytes, source_heads, self._heads, num_heads, g.num_kv_heads)

    def _segment(self, push: Push) -> Segment:
        part = push.device
        assert part is not None  # all pushes of a link come from the same pools
        return Segment(
            push.source.data_ptr(),
            self._layers[push.layer],
            push.source_head,
            push.target_head,
            part.source_ids,
            part.target_ids,
            push.tokens,
            push.first_logical,
            push.layer,
            push.first_head,
        )

    def _is_enough(self) -> bool:
        if self._batch_bytes < _ENOUGH_BYTES[0]:
            return False
        return self._batch_bytes >= _ENOUGH_BYTES[min(self._num_launched(), len(_ENOUGH_BYTES) - 1)]

    def _num_launched(self) -> int:
        """Returns: how many launches may be under way still"""
        while self._in_flight and self._in_flight[0].over.is_past():
            self._in_flight.popleft()
        return len(self._in_flight)

    def _check_ids(self, push: Push) -> None:
        slides = self._target.geometry.sliding[push.layer]
        if push.target_ids is self._checked[slides]:  # all layers of a chunk share them
            return
        num_blocks = self._num_blocks[slides]
        if int(push.target_ids.min()) < 0 or int(push.target_ids.max()) >= num_blocks:
            raise KVTransferError(f"reserved block {int(push.target_ids.max())} is not in a pool of {num_blocks} blocks")
        self._checked[slides] = push.target_ids

    def _await(self, launch: _Launch, deadline: Deadline) -> None:
        """Sleeps while layers are computed, and looks all the time once the device only has to copy."""
        began, copies_since = time.monotonic(), None
        while not launch.over.is_past():
            now = time.monotonic()
            if copies_since is None and (launch.ready is None or launch.ready.is_past()):
                copies_since = now
            deadline.check("waiting for the GPU to write over CUDA IPC")
            if now - began > self._io_timeout_s:
                raise TransferTimeout(f"the GPU has not written for {self._io_timeout_s} s")
            is_soon = copies_since is not None and now - copies_since < _EAGER_S
            time.sleep(0 if is_soon else _POLL_S)

    def _check_owner(self) -> None:
        self._look_at = time.monotonic() + _WATCH_S
        if self.is_lost():
            raise PeerLost(f"the owner of the mapped pools, process {self._owner.pid}, is gone")
