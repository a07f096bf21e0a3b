"""TCP: the prefill rank's end. Sends pushes as authenticated messages of up to 2 MiB with a window of unacknowledged ones.

Checked by the receiver: after a revoke nothing more lands, whatever this side still sends. Wire format: tcp_wire.py; other end:
tcp_server.py.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import time
from collections import deque

import numpy as np

from common.errors import KVTransferError, LayoutMismatch, PeerLost, TransferGivenUp, TransferTimeout
from common.keyring import Key, ring_of
from kv_transfer.deadline import Deadline
from kv_transfer.pool_view import row_buffers, row_index, rows
from kv_transfer.push import Push, Span
from kv_transfer.transports import tcp_wire as wire
from kv_transfer.transports.base import Target
from kv_transfer.transports.sockets import wait_in_kernel
from kv_transfer.transports.tcp_wire import PushHeader, Status

_WINDOW_MESSAGES = 8
_MOST_PIECES = 1000  # Linux takes 1024 per call
_WORTH_NO_COPY_BYTES = 4096  # rows this long are sent from where they lie; shorter ones are gathered first
_SLICE_S = 0.1  # how often a wait looks at its deadline
_CONNECT_TIMEOUT_S = 5.0
_PROBE_MESSAGES, _PROBE_BYTES = 4, 256 << 10

_Message = tuple[PushHeader, np.ndarray, np.ndarray]  # with block ids and epochs
_REFUSALS: dict[Status, tuple[type[KVTransferError], str]] = {
    Status.UNKNOWN_TRANSFER: (TransferGivenUp, "the transfer was revoked or never granted"),
    Status.WRONG_INCARNATION: (PeerLost, "the decode group was replaced"),
    Status.BAD_LAYER: (LayoutMismatch, "no such layer there"),
    Status.BAD_HEADS: (LayoutMismatch, "those heads are not held there"),
    Status.BAD_RANGE: (LayoutMismatch, "tokens outside of the prompt that was granted"),
    Status.BLOCK_NOT_GRANTED: (KVTransferError, "a block was not granted to this transfer"),
    Status.WRONG_EPOCH: (KVTransferError, "a block has been handed out again since"),
    Status.BAD_LENGTH: (LayoutMismatch, "the payload has not the length that its header implies"),
}


def describe(host: str, port: int) -> bytes:
    return json.dumps({"host": host, "port": port}).encode()


class TcpLink:
    """One connection to one decode rank.

    Units: io_timeout_s: longest wait without progress
    Raises: PeerLost if it can't be reached, was replaced or has another key; TransferTimeout
    """

    transport = "tcp"

    def __init__(self, detail: bytes, target: Target, *, key: Key, io_timeout_s: float, deadline: Deadline):
        try:
            facts = json.loads(detail)
            address = (str(facts["host"]), int(facts["port"]))
        except (ValueError, KeyError, TypeError) as exc:
            raise KVTransferError(f"tcp endpoint of decode rank {target.rank} makes no sense: {exc}") from exc
        self._name = f"decode rank {target.rank} at {address[0]}:{address[1]}"
        self._io_timeout_s = io_timeout_s
        self._unacknowledged: deque[int] = deque()
        self._sequence = 0
        self._target = target
        self._sock = self._connect(address, deadline)
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wait_in_kernel(self._sock, _SLICE_S)
            self._session = self._handshake(key, target, deadline)
        except BaseException:
            self._sock.close()
            raise

    def write(self, push: Push, deadline: Deadline) -> None:
        for span in push.spans:
            per_block = push.token_bytes * (span.end - span.begin)
            step = min(wire.MAX_BLOCKS, max(1, wire.MAX_PAYLOAD_BYTES // per_block))
            for i in range(0, span.count, step):
                part = Span(span.first_logical + i, min(step, span.count - i), span.begin, span.end)
                self.await_window(_WINDOW_MESSAGES, deadline)
                self._send_span(push, part, deadline)

    def flush(self, deadline: Deadline) -> None:
        while self._unacknowledged:
            self._take_reply(deadline)

    def is_lost(self) -> bool:
        try:
            return not self._unacknowledged and self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def settle(self) -> bool:
        return True  # what is still on its way is refused by the receiver once the grant is revoked

    def close(self) -> None:
        self._sock.close()

    def probe(self, deadline: Deadline) -> int:
        for _ in range(_PROBE_MESSAGES):
            self._send_message(self._probe_message(_PROBE_BYTES), [memoryview(bytes(_PROBE_BYTES))], deadline)
        self.flush(deadline)
        return _PROBE_MESSAGES * _PROBE_BYTES

    def announce_batch(self, parts: list[tuple[Push, Span]], deadline: Deadline) -> None:
        """Sends the headers of spans whose payloads travel otherwise, as one; the receiver answers once."""
        self._announce([_header(push, span) for push, span in parts], deadline)

    def announce_probe(self, nbytes: int, deadline: Deadline) -> None:
        """The same for a message that only measures."""
        self._announce([self._probe_message(nbytes)], deadline)

    def await_window(self, messages: int, deadline: Deadline) -> None:
        """Returns once fewer than `messages` are unacknowledged. Raises: as `flush`"""
        while len(self._unacknowledged) >= messages or self._has_reply():
            self._take_reply(deadline)

    def send_pair(self, pair_id: bytes, deadline: Deadline) -> None:
        self._send([memoryview(wire.encode_pair(self._session, pair_id))], deadline)

    def _connect(self, address: tuple[str, int], deadline: Deadline) -> socket.socket:
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except OSError as exc:
            raise PeerLost(f"can't connect to {self._name}: {exc}") from exc
        try:
            sock.setblocking(False)
            code = sock.connect_ex(place)
            writable = select.poll()
            writable.register(sock, select.POLLOUT)
            give_up = Deadline(_CONNECT_TIMEOUT_S)
            while code == errno.EINPROGRESS:
                deadline.check(f"connecting to {self._name}")
                give_up.check(f"connecting to {self._name}")
                if writable.poll(1000 * _SLICE_S):
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    break
            if code:
                raise PeerLost(f"can't connect to {self._name}: {os.strerror(code)}")
        except BaseException:
            sock.close()
            raise
        return sock

    def _handshake(self, key: Key, target: Target, deadline: Deadline) -> bytes:
        nonce, incarnation = wire.decode_hello(self._receive(wire.HELLO.size, deadline))
        if incarnation != target.incarnation:
            raise PeerLost(f"{self._name} was replaced: incarnation {incarnation:x}, expected {target.incarnation:x}")
        own_nonce = secrets.token_bytes(wire.NONCE_BYTES)
        session = wire.session_key(ring_of(key).current(), nonce, own_nonce, incarnation)
        self._send([memoryview(wire.encode_join(own_nonce, session))], deadline)
        try:
            answer = self._receive(wire.REPLY.size + wire.MAC_BYTES, deadline)
        except PeerLost as exc:
            raise PeerLost(f"{self._name} hung up on the handshake: it is gone, or does not share cluster.key_file") from exc
        wire.decode_reply(session, answer, 0)
        return session

    def _send_span(self, push: Push, span: Span, deadline: Deadline) -> None:
        payload = _payload(push, span, push.source_ids[_blocks(push, span)])
        self._send_message(_header(push, span), payload, deadline)

    def _send_message(self, message: _Message, payload: list[memoryview], deadline: Deadline) -> None:
        self._send([memoryview(self._encode(message)), *payload], deadline)
        self._unacknowledged.append(self._sequence)

    def _announce(self, messages: list[_Message], deadline: Deadline) -> None:
        batch = wire.encode_batch(self._session, self._sequence + 1, len(messages))
        self._send([memoryview(batch + b"".join(map(self._encode, messages)))], deadline)
        self._unacknowledged.append(self._sequence)

    def _encode(self, message: _Message) -> bytes:
        self._sequence += 1
        return wire.encode_push(self._session, self._sequence, *message)

    def _probe_message(self, nbytes: int) -> _Message:
        block = np.zeros(1, np.int64)
        return PushHeader(wire.PROBE_ID, self._target.incarnation, 0, 0, 1, 0, 1, 0, 1, nbytes), block, block

    def _has_reply(self) -> bool:
        """A refusal that is here already should be noticed now, not when the window is full."""
        try:
            return bool(self._unacknowledged) and bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _take_reply(self, deadline: Deadline) -> None:
        sequence = self._unacknowledged.popleft()
        status = wire.decode_reply(self._session, self._receive(wire.REPLY.size + wire.MAC_BYTES, deadline), sequence)
        if status is not Status.OK:
            error, reason = _REFUSALS[status]
            raise error(f"{self._name} refused a write: {reason} ({status.name})")

    def _send(self, pieces: list[memoryview], deadline: Deadline) -> None:
        done = 0
        while done < len(pieces):
            batch = pieces[done : done + _MOST_PIECES]
            sent = self._progress(lambda batch=batch: self._sock.sendmsg(batch), deadline)
            while done < len(pieces) and sent >= len(pieces[done]):
                sent -= len(pieces[done])
                done += 1
            if sent:
                pieces[done] = pieces[done][sent:]

    def _receive(self, nbytes: int, deadline: Deadline) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            missing = nbytes - len(data)
            piece = self._progress(lambda n=missing: self._sock.recv(n), deadline)
            if not piece:
                raise PeerLost(f"{self._name} closed the connection")
            data += piece
        return bytes(data)

    def _progress(self, operation, deadline: Deadline):
        """Repeats a socket call that may time out until it moves a byte or the time is up."""
        stalled_at = time.monotonic() + self._io_timeout_s
        while True:
            deadline.check(f"waiting for {self._name}")
            try:
                return operation()
            except BlockingIOError:
                if time.monotonic() > stalled_at:
                    raise TransferTimeout(f"{self._name} has taken nothing for {self._io_timeout_s} s") from None
            except OSError as exc:
                raise PeerLost(f"lost {self._name}: {exc}") from exc


def _blocks(push: Push, span: Span) -> slice:
    """A span's blocks among its push's."""
    first = span.first_logical - push.first_logical
    return slice(first, first + span.count)


def _header(push: Push, span: Span) -> _Message:
    part, nbytes = _blocks(push, span), span.count * push.token_bytes * (span.end - span.begin)
    header = PushHeader(
        push.transfer_id, push.incarnation, push.layer, span.first_logical, span.count,
        span.begin, span.end, push.first_head, push.num_heads, nbytes,
    )  # fmt: skip
    return header, push.target_ids[part], push.target_epochs[part]


def _payload(push: Push, span: Span, ids: np.ndarray) -> list[memoryview]:
    source = rows(push.source, push.source_head, push.num_heads, span.begin, span.end)
    index = row_index(ids)
    is_contiguous = isinstance(index, slice) and source[index].flags.c_contiguous
    if source.ndim == 2 and not is_contiguous and source.dtype.itemsize >= _WORTH_NO_COPY_BYTES:
        return row_buffers(push.source, source, ids)
    return [np.ascontiguousarray(source[index]).reshape(-1).view(np.uint8).data]
