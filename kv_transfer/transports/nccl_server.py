"""The receiving end of nccl: headers as over tcp, payloads into the connection's own memory, then checked and copied under a grant's lock.

Batches are received while the one before is copied. A stalled sender holds that memory, not blocks; after `io_timeout_s`, or once it has
closed its end of the socket, its communicator is aborted and the connection closed.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from common.errors import PeerLost
from common.keyring import Key
from kv_transfer.deadline import Deadline
from kv_transfer.device import Device, Moment, Pair
from kv_transfer.grants import GrantTable, Received
from kv_transfer.transports import tcp_wire as wire
from kv_transfer.transports.nccl import SLOT_BYTES, SLOTS
from kv_transfer.transports.tcp_server import TcpServer, receive
from kv_transfer.transports.tcp_wire import MalformedMessage, PushHeader

_EAGER_S = 2e-3  # a wait that is over soon does not sleep
_POLL_S = 50e-6


@dataclass(frozen=True)
class _Arriving:
    """`sequence`: of its last push."""

    sequence: int
    messages: list[Received]
    here: Moment
    since_s: float


class NcclServer(TcpServer):
    """Listens from construction until `close`. Units: as `TcpServer`"""

    def __init__(self, grants: GrantTable, device: Device, *, key: Key, incarnation: int, host: str, io_timeout_s: float = 10.0):
        self._device = device
        super().__init__(grants, key=key, incarnation=incarnation, host=host, max_block_bytes=SLOT_BYTES, io_timeout_s=io_timeout_s)

    def _serve_messages(self, sock: socket.socket, session: bytes) -> None:
        data = bytearray(wire.PAIR.size + wire.MAC_BYTES)
        receive(sock, memoryview(data))
        pair = self._device.join_pair(wire.decode_pair(session, bytes(data)), 1, Deadline(self._io_timeout_s))
        try:
            self._serve_pair(sock, session, pair)
        finally:
            pair.abort()

    def _serve_pair(self, sock: socket.socket, session: bytes, pair: Pair) -> None:
        slots = [self._device.empty(SLOT_BYTES) for _ in range(SLOTS)]
        arriving: deque[_Arriving] = deque()
        readable, hung_up = select.poll(), select.poll()
        readable.register(sock, select.POLLIN)
        hung_up.register(sock, select.POLLRDHUP)
        sequence = turn = 0
        while True:
            if arriving and arriving[0].here.is_past():
                batch = arriving.popleft()
                self._answer(sock, session, batch.sequence, batch.messages)
            elif not arriving or (len(arriving) < SLOTS and readable.poll(0)):
                batch = self._receive_batch(sock, session, sequence, slots[turn], pair)
                sequence, turn = batch.sequence, (turn + 1) % SLOTS
                arriving.append(batch)
            elif hung_up.poll(0):  # a communicator does not tell
                raise PeerLost("the sender hung up; a batch was announced and does not come over nccl")
            else:
                self._wait(pair, arriving[0])

    def _receive_batch(self, sock: socket.socket, session: bytes, sequence: int, slot: Tensor, pair: Pair) -> _Arriving:
        """Takes the headers of a batch and enqueues the arrival of its payload in `slot`. `sequence`: of the push before"""
        head = bytearray(wire.BATCH.size + wire.MAC_BYTES)
        receive(sock, memoryview(head), may_idle=True)
        messages, used = [], 0
        for _ in range(wire.decode_batch(session, bytes(head), sequence + 1)):
            sequence += 1
            header, ids, epochs = self._receive_header(sock, session, sequence)
            nbytes = header.payload_bytes if header.transfer_id == wire.PROBE_ID else self._packed_bytes(header)
            if used + nbytes > SLOT_BYTES:
                raise MalformedMessage(f"a batch of more than {SLOT_BYTES} bytes")
            messages.append(Received(header, ids, epochs, slot[used : used + nbytes]))
            used += nbytes
        pair.receive([slot[:used]], Deadline(self._io_timeout_s))
        return _Arriving(sequence, messages, pair.mark(), time.monotonic())

    def _answer(self, sock: socket.socket, session: bytes, sequence: int, messages: list[Received]) -> None:
        super()._answer(sock, session, sequence, [self._unpacked(message) for message in messages])

    def _packed_bytes(self, header: PushHeader) -> int:
        """Payloads are whole blocks, whatever of them is meant."""
        return header.num_blocks * 2 * header.num_heads * self._grants.head_block_bytes

    def _unpacked(self, message: Received) -> Received:
        """Only what is meant of the whole blocks that came, as a view: a copy here would be work of another stream than the grants'."""
        header, block_size = message.header, self._grants.block_size_tokens
        is_partial = 0 <= header.begin < header.end <= block_size and (header.begin, header.end) != (0, block_size)
        if header.transfer_id == wire.PROBE_ID or not is_partial:
            return message
        assert isinstance(message.payload, Tensor)
        tiles = message.payload.view(header.num_blocks * 2 * header.num_heads, block_size, -1)
        return message._replace(payload=tiles[:, header.begin : header.end])

    def _wait(self, pair: Pair, batch: _Arriving) -> None:
        """Raises: TimeoutError, which ends the connection, after `io_timeout_s` without the batch; PeerLost"""
        pair.check()
        waited = time.monotonic() - batch.since_s
        if waited > self._io_timeout_s:
            raise TimeoutError("a batch was announced and did not come over nccl")
        time.sleep(0 if waited < _EAGER_S else _POLL_S)
