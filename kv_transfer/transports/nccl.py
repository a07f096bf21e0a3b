"""NCCL: the prefill rank's end. Headers go over an authenticated tcp connection, payloads over a communicator of this pair alone.

Checked by the receiver, which takes payloads into memory of its own and copies from there: after a revoke nothing more lands. What
stalls is aborted, and the next link makes a new communicator. For device memory; other end: nccl_server.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from common.keyring import Key
from kv_transfer.deadline import Deadline
from kv_transfer.device import Device, Moment
from kv_transfer.push import Push, Span
from kv_transfer.transports import tcp_wire as wire
from kv_transfer.transports.base import Target
from kv_transfer.transports.tcp import TcpLink

SLOT_BYTES = 64 << 20  # the largest message
_SLOTS = 2  # one is filled while the other one travels
_JOIN_TIMEOUT_S = 10.0
_PROBE_MESSAGES = 4
_PROBE_BYTES = 8 << 20


@dataclass
class _Slot:
    memory: Tensor
    sent: Moment | None = None


class NcclLink:
    """A connection and a communicator to one decode rank.

    Units: io_timeout_s: longest wait without progress
    Raises: as `TcpLink`; PeerLost if the communicator does not come about
    """

    transport = "nccl"

    def __init__(self, detail: bytes, target: Target, device: Device, *, key: Key, io_timeout_s: float, deadline: Deadline):
        self._control = TcpLink(detail, target, key=key, io_timeout_s=io_timeout_s, deadline=deadline)
        try:
            pair_id = device.new_pair_id()
            self._control.send_pair(pair_id, deadline)
            self._pair = device.join_pair(pair_id, 0, Deadline(min(_JOIN_TIMEOUT_S, deadline.left_s())))
        except BaseException:
            self._control.close()
            raise
        self._lane = device.lane()
        self._slots = [_Slot(device.empty(SLOT_BYTES)) for _ in range(_SLOTS)]
        self._turn = 0
        self._sources: list[Push] = []  # that may still be read

    def write(self, push: Push, deadline: Deadline) -> None:
        assert push.device is not None  # all pushes of a link come from the same pools
        self._sources.append(push)
        self._lane.after(push.device.ready)
        for span in push.spans:
            per_block = push.token_bytes * (span.end - span.begin)
            step = min(wire.MAX_BLOCKS, max(1, SLOT_BYTES // per_block))
            for i in range(0, span.count, step):
                self._send(push, Span(span.first_logical + i, min(step, span.count - i), span.begin, span.end), per_block, deadline)

    def flush(self, deadline: Deadline) -> None:
        self._control.flush(deadline)
        self._sources.clear()

    def is_lost(self) -> bool:
        return self._control.is_lost()

    def settle(self) -> bool:
        self._pair.abort()
        return self._control.settle()

    def close(self) -> None:
        self._pair.abort()
        self._control.close()

    def probe(self, deadline: Deadline) -> int:
        for _ in range(_PROBE_MESSAGES):
            self._control.await_window(_SLOTS, deadline)
            self._control.announce_probe(_PROBE_BYTES, [], deadline)
            slot = self._slots[self._turn]
            self._pair.send([slot.memory[:_PROBE_BYTES]], deadline)
            self._take_turn()
        self._control.flush(deadline)
        return _PROBE_MESSAGES * _PROBE_BYTES

    def _send(self, push: Push, span: Span, per_block: int, deadline: Deadline) -> None:
        part, nbytes = push.device, span.count * per_block
        assert part is not None
        self._control.await_window(_SLOTS, deadline)
        slot = self._slots[self._turn]
        if slot.sent is not None:
            self._lane.after(slot.sent)
        first = span.first_logical - push.first_logical
        heads = push.source[:, :, push.source_head : push.source_head + push.num_heads, span.begin : span.end]
        if part.source_ids is None:
            heads, ids = heads[first : first + span.count], None
        else:
            ids = part.source_ids[first : first + span.count]
        packed = slot.memory[:nbytes].view(push.source.dtype).view(span.count, *heads.shape[1:])
        self._lane.pack(heads, ids, packed)
        self._control.announce(push, span, nbytes, [], deadline)
        self._pair.after(self._lane.mark())
        self._pair.send([slot.memory[:nbytes]], deadline)
        self._take_turn()

    def _take_turn(self) -> None:
        self._slots[self._turn].sent = self._pair.mark()
        self._turn = (self._turn + 1) % _SLOTS
