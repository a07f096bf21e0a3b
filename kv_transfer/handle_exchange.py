"""Passes the handle of a decode rank's memory to prefill ranks of the same host and user, over a unix socket.

Whoever has a handle can write into the memory, so it is told only to a process whose user the kernel vouches for and which knows the
cluster's key; and the asker checks that it talks to the very process that the reservation names. The socket is abstract: it has no
name in a file system and ends with its process. One connection per handle, closed afterwards.

    owner -> asker   nonce
    asker -> owner   incarnation it was told, HMAC(key, nonce, incarnation)
    owner -> asker   verdict, length, handle or reason
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading

from common.errors import KVTransferError, PeerLost, TransferTimeout
from common.keyring import Key, ring_of

logger = logging.getLogger(__name__)

_NONCE_BYTES = 16
_ASK = struct.Struct("<Q32s")
_VERDICT = struct.Struct("<BI")
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_TIMEOUT_S = 2.0
_MAX_BYTES = 1 << 16
_GRANTED, _REFUSED, _REPLACED = 0, 1, 2


class HandleServer:
    """The owner's end; listens from construction until `close`."""

    def __init__(self, handle: bytes, *, key: Key, incarnation: int):
        self.name = f"tandem-kv-{secrets.token_hex(16)}"
        self._handle = handle
        self._key = key
        self._incarnation = incarnation
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.name)
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="kv-handles", daemon=True).start()

    def close(self) -> None:
        """No further process gets the handle; those that have it keep their mapping."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._socket.close()
                return
            threading.Thread(target=self._serve, args=(connection,), name="kv-handle", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_TIMEOUT_S)
                pid, uid = peer_of(connection)
                if uid != os.geteuid():
                    logger.warning("process %d of user %d asked for the handle of KV memory and got none", pid, uid)
                    return
                nonce = secrets.token_bytes(_NONCE_BYTES)
                connection.sendall(nonce)
                incarnation, mac = _ASK.unpack(_receive(connection, _ASK.size))
                verdict, answer = self._judge(nonce, incarnation, mac)
                connection.sendall(_VERDICT.pack(verdict, len(answer)) + answer)
            except OSError as exc:
                logger.debug("a process that asked for the handle of KV memory went away: %s", exc)

    def _judge(self, nonce: bytes, incarnation: int, mac: bytes) -> tuple[int, bytes]:
        if not any(hmac.compare_digest(mac, _mac(key, nonce, incarnation)) for key in ring_of(self._key).all()):
            return _REFUSED, b"another cluster key"
        if incarnation != self._incarnation:
            return _REPLACED, b"the decode group was replaced"
        return _GRANTED, self._handle


def ask_for_handle(name: str, *, owner_pid: int, key: Key, incarnation: int, timeout_s: float = _TIMEOUT_S) -> bytes:
    """Returns: the handle

    Raises: PeerLost if the owner is gone or was replaced; TransferTimeout if it stalls; KVTransferError if it refuses or is another
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect("\0" + name)
            pid, uid = peer_of(connection)
            if uid != os.geteuid() or pid != owner_pid:
                raise KVTransferError(f"the owner of KV memory should be process {owner_pid} of this user, not {pid} of user {uid}")
            nonce = _receive(connection, _NONCE_BYTES)
            connection.sendall(_ASK.pack(incarnation, _mac(ring_of(key).current(), nonce, incarnation)))
            verdict, length = _VERDICT.unpack(_receive(connection, _VERDICT.size))
            answer = _receive(connection, min(length, _MAX_BYTES))
        except TimeoutError as exc:
            raise TransferTimeout(f"process {owner_pid} did not tell the handle of its KV memory within {timeout_s} s") from exc
        except OSError as exc:
            raise PeerLost(f"the owner of KV memory, process {owner_pid}, is gone: {exc}; same host and network namespace?") from exc
    if verdict == _REPLACED:
        raise PeerLost(answer.decode())
    if verdict != _GRANTED:
        raise KVTransferError(f"process {owner_pid} refused the handle of its KV memory: {answer.decode()}")
    return answer


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns: (pid, uid) of the process at the other end when it connected, as the kernel knows them"""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _mac(key: bytes, nonce: bytes, incarnation: int) -> bytes:
    return hmac.digest(key, b"tandem kv handle 1" + nonce + incarnation.to_bytes(8, "little"), hashlib.sha256)


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError("closed by the peer")
        data += piece
    return bytes(data)
