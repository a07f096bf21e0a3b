"""The receiving end of tcp: accepts connections, authenticates every message, and hands payloads to the grant table.

A payload is first received whole into the connection's own buffer, then checked and copied under its grant's lock. So a truncated message
writes nothing, and a revoke never waits for the network: a stalled sender holds a buffer, not blocks. One thread per connection.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections import Counter

import numpy as np

from common.errors import KVTransferError
from common.keyring import Key
from kv_transfer.grants import GrantTable, Received
from kv_transfer.memory import private_memory
from kv_transfer.transports import tcp_wire as wire
from kv_transfer.transports.sockets import wait_in_kernel
from kv_transfer.transports.tcp_wire import MalformedMessage, PushHeader, Status

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512


class TcpServer:
    """Listens from construction until `close`.

    Units: io_timeout_s: longest silence within a message or the handshake; between messages a connection may be idle for ever
    """

    def __init__(self, grants: GrantTable, *, key: Key, incarnation: int, host: str, max_block_bytes: int, io_timeout_s: float = 10.0):
        self._grants = grants
        self._key = key
        self._incarnation = incarnation
        self._max_payload_bytes = max(wire.MAX_PAYLOAD_BYTES, max_block_bytes)
        self._io_timeout_s = io_timeout_s
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._counts: Counter[str] = Counter()
        self._is_closed = False
        self._listener = socket.create_server((host, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name=f"kv-tcp-accept-{self.port}", daemon=True).start()

    @property
    def counts(self) -> dict[str, int]:
        """Messages and connections by outcome: the names of `Status` in lower case, `probes`, `malformed`, `turned_away`, and `bytes`."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """No further byte enters the pools through this server."""
        with self._lock:
            self._is_closed = True
            sockets = [self._listener, *self._connections]
        for sock in sockets:
            _shut(sock)

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                self._listener.close()
                return
            with self._lock:
                is_welcome = not self._is_closed and len(self._connections) < _MAX_CONNECTIONS
                if is_welcome:
                    self._connections.add(sock)
            if not is_welcome:
                self._count("turned_away")
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name=f"kv-tcp-{address[0]}:{address[1]}", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wait_in_kernel(sock, self._io_timeout_s)
            self._serve_messages(sock, self._handshake(sock))
        except MalformedMessage as exc:
            self._count("malformed")
            logger.warning("kv tcp: closed a connection: %s", exc)
        except (OSError, KVTransferError) as exc:
            logger.debug("kv tcp: connection ended: %s", exc)
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()

    def _handshake(self, sock: socket.socket) -> bytes:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        sock.sendall(wire.encode_hello(nonce, self._incarnation))
        join = bytearray(wire.JOIN.size + wire.MAC_BYTES)
        receive(sock, memoryview(join))
        session = wire.decode_join(bytes(join), self._key, nonce, self._incarnation)
        sock.sendall(wire.encode_reply(session, Status.OK, 0))
        return session

    def _serve_messages(self, sock: socket.socket, session: bytes) -> None:
        staging = private_memory(self._max_payload_bytes)
        sequence = 0
        while True:
            sequence += 1
            header, ids, epochs = self._receive_header(sock, session, sequence)
            payload = staging[: header.payload_bytes]
            receive(sock, payload)
            self._answer(sock, session, sequence, [Received(header, ids, epochs, payload)])

    def _receive_header(self, sock: socket.socket, session: bytes, sequence: int) -> tuple[PushHeader, np.ndarray, np.ndarray]:
        head = bytearray(wire.PUSH.size)
        receive(sock, memoryview(head), may_idle=True)
        tail = bytearray(wire.push_tail_bytes(bytes(head), self._max_payload_bytes))
        receive(sock, memoryview(tail))
        return wire.decode_push(session, sequence, bytes(head), bytes(tail))

    def _answer(self, sock: socket.socket, session: bytes, sequence: int, messages: list[Received]) -> None:
        """Has received messages checked and copied, and tells the sender."""
        status = self._grants.write(messages)
        transfer_id = messages[0].header.transfer_id
        self._count("probes" if transfer_id == wire.PROBE_ID else status.name.lower(), len(messages))
        if status is Status.OK and transfer_id != wire.PROBE_ID:
            self._count("bytes", sum(message.num_bytes for message in messages))
        elif status is not Status.OK:
            logger.debug("kv tcp: refused a write of transfer %x: %s", transfer_id, status.name)
        sock.sendall(wire.encode_reply(session, status, sequence))


def receive(sock: socket.socket, into: memoryview, *, may_idle: bool = False) -> None:
    """Fills `into`; before the first byte it waits for ever if `may_idle`.

    Raises: ConnectionError at the end of the stream; TimeoutError after the socket's timeout without a byte
    """
    while into:
        try:
            count = sock.recv_into(into, 0, socket.MSG_WAITALL)
        except BlockingIOError as exc:
            if may_idle:
                continue
            raise TimeoutError("silent within a message") from exc
        if count == 0:
            raise ConnectionError("closed by the peer")
        into, may_idle = into[count:], False


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        sock.close()


def check_host(host: str) -> None:
    """Raises: KVTransferError if `host` is no address that a peer can be told"""
    if host in ("", "0.0.0.0", "::"):
        raise KVTransferError(f"tcp needs an address that peers can reach, not {host!r}")
