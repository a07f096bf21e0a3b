"""NCCL: the prefill rank's end. Headers go over an authenticated tcp connection, payloads over a communicator of this pair alone.

Layers that are ready together travel as one message: packed and digested by one launch, announced by one write to the connection. Checked
by the receiver, which takes payloads into memory of its own and copies from there: after a revoke nothing more lands. What stalls is
aborted, and the next link makes a new communicator. For device memory; other end: nccl_server.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from common.keyring import Key
from common.kv_layout import DTYPE_BYTES
from kernels.digest import MASK
from kernels.kv_copy import Segment, TileShape
from kv_transfer.deadline import Deadline
from kv_transfer.device import WIDE_BYTES, Device, Moment
from kv_transfer.push import Push, Span
from kv_transfer.transports import tcp_wire as wire
from kv_transfer.transports.base import Target
from kv_transfer.transports.tcp import TcpLink

SLOT_BYTES = 64 << 20  # the largest message
SLOTS = 3  # on either side: one is filled, one travels, one is copied to its blocks
_JOIN_TIMEOUT_S = 10.0
_PROBE_MESSAGES = 4
_PROBE_BYTES = 32 << 20


@dataclass
class _Slot:
    memory: Tensor
    sent: Moment | None = None


@dataclass
class _Batch:
    """Spans that become one message, and where each begins in it."""

    parts: list[tuple[Push, Span]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0


class NcclLink:
    """A connection and a communicator to one decode rank. It digests what it packs.

    Units: io_timeout_s: longest wait without progress
    Raises: as `TcpLink`; PeerLost if the communicator does not come about
    """

    transport = "nccl"

    def __init__(self, detail: bytes, target: Target, device: Device, *, key: Key, io_timeout_s: float, deadline: Deadline):
        self._control = TcpLink(detail, target, key=key, io_timeout_s=io_timeout_s, deadline=deadline)
        try:
            pair_id = device.new_pair_id()
            self._control.send_pair(pair_id, deadline)
            self._pair = device.join_pair(pair_id, 0, deadline.part(_JOIN_TIMEOUT_S))
        except BaseException:
            self._control.close()
            raise
        self._geometry = target.geometry
        self._lane = device.lane()
        self._tally = self._lane.tally()  # of everything this link has ever packed
        self._digest_taken = self._digest_read = 0
        self._slots = [_Slot(device.empty(SLOT_BYTES)) for _ in range(SLOTS)]
        self._turn = 0
        self._batch = _Batch()
        self._sources: list[Push] = []  # that may still be read
        self._packed: Moment | None = None  # when the last of them has been

    def write(self, push: Push, deadline: Deadline) -> None:
        assert push.device is not None  # all pushes of a link come from the same pools
        self._sources.append(push)
        block_bytes = 2 * push.num_heads * self._geometry.head_block_bytes
        step = min(wire.MAX_BLOCKS, max(1, SLOT_BYTES // block_bytes))
        for span in push.spans:
            for i in range(0, span.count, step):
                part = Span(span.first_logical + i, min(step, span.count - i), span.begin, span.end)
                nbytes = part.count * block_bytes
                if self._batch.nbytes + nbytes > SLOT_BYTES or len(self._batch.parts) == wire.MAX_BATCH:
                    self._send(deadline)
                self._batch.parts.append((push, part))
                self._batch.offsets.append(self._batch.nbytes)
                self._batch.nbytes += nbytes
        self._deadline = deadline

    def submit(self) -> None:
        if self._batch.parts:
            self._send(self._deadline)

    def flush(self, deadline: Deadline) -> None:
        self.submit()
        self._control.flush(deadline)  # a batch that has arrived was packed
        self._sources.clear()
        self._digest_read = self._tally.value()

    def take_digest(self) -> int:
        part = (self._digest_read - self._digest_taken) & MASK
        self._digest_taken = self._digest_read
        return part

    def is_lost(self) -> bool:
        return self._control.is_lost()

    def settle(self) -> bool:
        self._pair.abort()
        return self._control.settle() and (self._packed is None or self._packed.is_past())

    def close(self) -> None:
        self._pair.abort()
        self._control.close()

    def probe(self, deadline: Deadline) -> int:
        for _ in range(_PROBE_MESSAGES):
            self._control.await_window(SLOTS, deadline)
            self._control.announce_probe(_PROBE_BYTES, deadline)
            self._travel(_PROBE_BYTES, deadline)
        self._control.flush(deadline)
        return _PROBE_MESSAGES * _PROBE_BYTES

    def _send(self, deadline: Deadline) -> None:
        batch, self._batch = self._batch, _Batch()
        self._control.await_window(SLOTS, deadline)
        slot = self._slots[self._turn]
        if slot.sent is not None:
            self._lane.after(slot.sent)
        last = batch.parts[-1][0]
        assert last.device is not None
        self._lane.after(last.device.ready)  # the moments of a batch are of one stream, in order
        address = slot.memory.data_ptr()
        segments = [self._segment(*part, address + offset) for part, offset in zip(batch.parts, batch.offsets, strict=True)]
        wide = batch.nbytes >= WIDE_BYTES and last.device.ready.is_past()
        self._lane.copy(segments, self._shape(last), last.device.key, self._tally, wide=wide)
        self._control.announce_batch(batch.parts, deadline)
        self._packed = self._lane.mark()
        self._pair.after(self._packed)
        self._travel(batch.nbytes, deadline)

    def _travel(self, nbytes: int, deadline: Deadline) -> None:
        slot = self._slots[self._turn]
        self._pair.send([slot.memory[:nbytes]], deadline)
        slot.sent = self._pair.mark()
        self._turn = (self._turn + 1) % SLOTS

    def _shape(self, push: Push) -> TileShape:
        g, heads = self._geometry, push.source.shape[2]
        return TileShape(g.block_size_tokens, g.head_dim * DTYPE_BYTES[g.dtype], heads, push.num_heads, push.num_heads, g.num_kv_heads)

    def _segment(self, push: Push, span: Span, target: int) -> Segment:
        """A span's blocks, packed whole one after the other."""
        part, block_size = push.device, self._geometry.block_size_tokens
        assert part is not None
        first = span.first_logical - push.first_logical
        source, ids = push.source.data_ptr(), None
        if part.source_ids is None:
            source += first * 2 * push.source.shape[2] * self._geometry.head_block_bytes
        else:
            ids = part.source_ids[first : first + span.count]
        origin = span.first_logical * block_size
        tokens = (origin + span.begin, origin + (span.count - 1) * block_size + span.end)
        return Segment(source, target, push.source_head, 0, ids, None, tokens, span.first_logical, push.layer, push.first_head)
