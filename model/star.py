"""Length-prefixed messages between rank 0 of a group and each other rank, over TCP: the base of the control channel and of CPU collectives.

Owns the sockets and the handshake in which both sides prove that they hold the cluster's key. All ranks of a group share a host, so what
follows the handshake is neither signed nor encrypted. An end that dies closes its socket, which the other one sees at once; a silent end
never times out, because an idle group is silent. Measured against gloo: docs/decisions/star-instead-of-gloo.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from contextlib import suppress

from common.errors import ConfigError, WorkerLost

_NONCE_BYTES = 16
_MAC_BYTES = 32
_HELLO = struct.Struct("<I16s")  # rank, purpose
_LENGTH = struct.Struct("<Q")
_RETRY_S = 0.02
_HANDSHAKE_S = 10.0


class Link:
    """One connection. Not thread-safe: one thread of each process uses it.

    Every method raises WorkerLost, with the peer's rank, once the peer is gone.
    """

    def __init__(self, sock: socket.socket, peer_rank: int):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self.peer_rank = peer_rank

    def send(self, data: bytes | memoryview) -> None:
        """Sends one message."""
        try:
            if len(data) <= 4096:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            else:
                self._socket.sendall(_LENGTH.pack(len(data)))
                self._socket.sendall(data)
        except OSError as exc:
            raise self._lost() from exc

    def receive(self, timeout_s: float | None = None) -> bytearray:
        """Blocks for the next message, without burning CPU.

        Raises: WorkerLost also if none came within `timeout_s`; the link is of no use then
        """
        self._socket.settimeout(timeout_s)
        data = bytearray(self._receive_length())
        self._fill(memoryview(data))
        self._socket.settimeout(None)
        return data

    def receive_into(self, buffer: memoryview) -> None:
        """Receives a message whose size both sides know.

        Raises: WorkerLost also if the peer sent another size: the ranks no longer agree
        """
        length = self._receive_length()
        if length != len(buffer):
            raise WorkerLost(f"a message of {length} bytes came where {len(buffer)} were expected", rank=self.peer_rank)
        self._fill(buffer)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked in receive
        self._socket.close()

    def _receive_length(self) -> int:
        header = bytearray(_LENGTH.size)
        self._fill(memoryview(header))
        return _LENGTH.unpack(header)[0]

    def _fill(self, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = self._socket.recv_into(buffer[done:])
            except TimeoutError:
                raise WorkerLost("no message came in time", rank=self.peer_rank) from None
            except OSError as exc:
                raise self._lost() from exc
            if count == 0:
                raise self._lost()
            done += count

    def _lost(self) -> WorkerLost:
        return WorkerLost("the connection within the group closed", rank=self.peer_rank)


class StarListener:
    """Rank 0's side of joining: takes one connection per other rank and purpose."""

    def __init__(self, rendezvous: str, key: bytes):
        host, port = split_address(rendezvous)
        try:
            self._server = socket.create_server((host, port))
        except OSError as exc:
            raise ConfigError(f"rendezvous {rendezvous} can't be listened at: {exc.strerror}") from exc
        self._key = key

    def accept(self, size: int, purposes: tuple[str, ...], timeout_s: float) -> dict[str, list[Link]]:
        """Waits until ranks 1 .. size - 1 have joined for every purpose. Returns: per purpose the links in rank order

        Raises: WorkerLost naming the ranks that did not come in time. Strangers are dropped.
        """
        wanted = {(purpose, rank) for purpose in purposes for rank in range(1, size)}
        joined: dict[tuple[str, int], Link] = {}
        deadline = time.monotonic() + timeout_s
        while set(joined) != wanted:
            missing = sorted({rank for _, rank in wanted - set(joined)})
            self._server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sock, _ = self._server.accept()
            except TimeoutError:
                for link in joined.values():
                    link.close()
                raise WorkerLost(f"ranks {missing} did not join within {timeout_s:.0f} s") from None
            place = self._greet(sock)
            if place in wanted and place not in joined:
                joined[place] = Link(sock, place[1])
            else:
                sock.close()
        return {purpose: [joined[purpose, rank] for rank in range(1, size)] for purpose in purposes}

    def close(self) -> None:
        self._server.close()

    def _greet(self, sock: socket.socket) -> tuple[str, int] | None:
        """Returns: (purpose, rank) of a peer that has proved itself, else None"""
        sock.settimeout(_HANDSHAKE_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            sock.sendall(nonce)
            answer = _read(sock, _HELLO.size + _NONCE_BYTES + _MAC_BYTES)
            hello, peer_nonce, mac = answer[: _HELLO.size], answer[_HELLO.size : -_MAC_BYTES], answer[-_MAC_BYTES:]
            if not hmac.compare_digest(mac, _mac(self._key, b"join", nonce, hello, peer_nonce)):
                return None
            sock.sendall(_mac(self._key, b"welcome", peer_nonce))
        except OSError:
            return None
        sock.settimeout(None)
        rank, purpose = _HELLO.unpack(hello)
        return purpose.rstrip(b"\0").decode(errors="replace"), rank


def join_star(rendezvous: str, key: bytes, rank: int, purpose: str, timeout_s: float) -> Link:
    """Another rank's side of joining; tries until rank 0 listens.

    Raises: WorkerLost if rank 0 was not there in time or does not hold the key
    """
    sock = _connect(rendezvous, timeout_s)
    try:
        _prove(sock, key, rank, purpose)
    except BaseException as exc:
        sock.close()
        if isinstance(exc, OSError):
            raise WorkerLost(f"{rendezvous} refused rank {rank}; do all ranks share the cluster's key?", rank=0) from exc
        raise
    sock.settimeout(None)
    return Link(sock, 0)


def split_address(address: str) -> tuple[str, int]:
    """Raises: ConfigError if `address` is not host:port"""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def _connect(rendezvous: str, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection(split_address(rendezvous), timeout=_HANDSHAKE_S)
        except OSError as exc:
            if time.monotonic() > deadline:
                raise WorkerLost(f"no rank 0 at {rendezvous} within {timeout_s:.0f} s: {exc}", rank=0) from exc
            time.sleep(_RETRY_S)


def _prove(sock: socket.socket, key: bytes, rank: int, purpose: str) -> None:
    """Shows that this side holds the key, and has the other side show it too. Raises: OSError, WorkerLost"""
    hello, own_nonce = _HELLO.pack(rank, purpose.encode()), secrets.token_bytes(_NONCE_BYTES)
    nonce = _read(sock, _NONCE_BYTES)
    sock.sendall(hello + own_nonce + _mac(key, b"join", nonce, hello, own_nonce))
    if not hmac.compare_digest(_read(sock, _MAC_BYTES), _mac(key, b"welcome", own_nonce)):
        raise WorkerLost("rank 0 does not hold the cluster's key", rank=0)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"tandem-star\0" + b"".join(parts), hashlib.sha256).digest()


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("closed during the handshake")
        data += piece
    return data
