"""The receiving end of nccl: headers as over tcp, payloads into the connection's own memory, then checked and copied under a grant's lock.

One message is received while the one before is copied. A stalled sender holds that memory, not blocks; after `io_timeout_s` its
communicator is aborted and the connection closed.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.keyring import Key
from kv_transfer.deadline import Deadline
from kv_transfer.device import Device, Moment, Pair
from kv_transfer.grants import GrantTable
from kv_transfer.transports import tcp_wire as wire
from kv_transfer.transports.nccl import SLOT_BYTES
from kv_transfer.transports.tcp_server import TcpServer, receive
from kv_transfer.transports.tcp_wire import PushHeader

_SLOTS = 2
_POLL_S = 50e-6


@dataclass(frozen=True)
class _Arriving:
    sequence: int
    header: PushHeader
    ids: np.ndarray
    epochs: np.ndarray
    payload: Tensor
    here: Moment


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
        slots = [self._device.empty(SLOT_BYTES) for _ in range(_SLOTS)]
        arriving: deque[_Arriving] = deque()
        readable = select.poll()
        readable.register(sock, select.POLLIN)
        sequence = 0
        while True:
            if arriving and (len(arriving) == _SLOTS or not readable.poll(0)):
                self._finish(sock, session, pair, arriving.popleft())
                continue
            sequence += 1
            header, ids, epochs = self._receive_header(sock, session, sequence)
            payload = slots[sequence % _SLOTS][: header.payload_bytes]
            pair.receive([payload], Deadline(self._io_timeout_s))
            arriving.append(_Arriving(sequence, header, ids, epochs, payload, pair.mark()))

    def _finish(self, sock: socket.socket, session: bytes, pair: Pair, message: _Arriving) -> None:
        deadline = Deadline(self._io_timeout_s)
        while not message.here.is_past():
            pair.check()
            deadline.check("receiving over nccl")
            time.sleep(_POLL_S)
        self._answer(sock, session, message.sequence, message.header, message.ids, message.epochs, message.payload)
