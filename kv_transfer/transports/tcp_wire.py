"""Bytes on a tcp connection: fixed headers and HMACs. Encodes, decodes and authenticates; decides nothing and opens no socket.

    receiver -> sender   HELLO    magic, version, nonce, incarnation
    sender -> receiver   JOIN     magic, version, nonce, MAC
    receiver -> sender   REPLY    to sequence 0
    sender -> receiver   PAIR     magic, id of a communicator, MAC                                 (nccl only; payloads then go over it)
    sender -> receiver   BATCH    number of pushes whose payloads come as one, MAC                  (nccl only; one reply, to the last push)
    sender -> receiver   PUSH     header with sequence 1, 2, ..., block ids, epochs, MAC, payload
    receiver -> sender   REPLY    magic, status, sequence, MAC

MACs are made with the session key, HMAC(one of the cluster's keys, both nonces, incarnation); that of a push covers all but the payload.

A message replayed on another connection fails its MAC, on the same one its sequence number. A payload is covered by the digest at commit.
All integers little-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from common.errors import Corrupted
from common.keyring import Key, ring_of

VERSION = 1
MAC_BYTES = 32
NONCE_BYTES = 16
MAX_BLOCKS = 4096
PROBE_ID = 2**64 - 1  # the transfer id of messages that only measure: their payload goes nowhere
MAX_PAYLOAD_BYTES = 2 << 20  # of one message, unless a single block is larger

HELLO = struct.Struct("<4sI16sQ")
JOIN = struct.Struct("<4sI16s")
PUSH = struct.Struct("<4sIQQQIIIHHHHQ")
REPLY = struct.Struct("<4sIQ")
_BAD_MAC = "bad MAC; do both sides share cluster.key_file?"
PAIR = struct.Struct("<4s128s")
BATCH = struct.Struct("<4sIQ")
MAX_BATCH = 64
_HELLO_MAGIC, _JOIN_MAGIC, _PUSH_MAGIC, _REPLY_MAGIC = b"TKVH", b"TKVJ", b"TKVP", b"TKVR"
_PAIR_MAGIC, _BATCH_MAGIC = b"TKVN", b"TKVB"


class Status(IntEnum):
    OK = 0
    UNKNOWN_TRANSFER = 1
    WRONG_INCARNATION = 2
    BAD_LAYER = 3
    BAD_HEADS = 4
    BAD_RANGE = 5
    BLOCK_NOT_GRANTED = 6
    WRONG_EPOCH = 7
    BAD_LENGTH = 8


class MalformedMessage(Corrupted):
    """Not a message of this protocol, or its MAC or sequence is wrong: the connection is closed without an answer."""


@dataclass(frozen=True)
class PushHeader:
    """Tokens [begin, end) of each of `num_blocks` blocks in a row; heads count the model's.

    Shapes: the payload is [num_blocks, 2, num_heads, end - begin, head_dim]
    """

    transfer_id: int
    incarnation: int
    layer: int
    first_logical: int
    num_blocks: int
    begin: int
    end: int
    first_head: int
    num_heads: int
    payload_bytes: int


def session_key(key: bytes, receiver_nonce: bytes, sender_nonce: bytes, incarnation: int) -> bytes:
    return hmac.digest(key, b"tandem kv tcp 1" + receiver_nonce + sender_nonce + incarnation.to_bytes(8, "little"), hashlib.sha256)


def encode_hello(nonce: bytes, incarnation: int) -> bytes:
    return HELLO.pack(_HELLO_MAGIC, VERSION, nonce, incarnation)


def decode_hello(data: bytes) -> tuple[bytes, int]:
    """Returns: (nonce, incarnation)"""
    magic, version, nonce, incarnation = HELLO.unpack(data)
    _check_magic(magic, _HELLO_MAGIC, version)
    return nonce, incarnation


def encode_join(nonce: bytes, session: bytes) -> bytes:
    head = JOIN.pack(_JOIN_MAGIC, VERSION, nonce)
    return head + _mac(session, head)


def decode_join(data: bytes, key: Key, receiver_nonce: bytes, incarnation: int) -> bytes:
    """Returns: the session key

    Raises: MalformedMessage
    """
    head, mac = data[: JOIN.size], data[JOIN.size :]
    magic, version, nonce = JOIN.unpack(head)
    _check_magic(magic, _JOIN_MAGIC, version)
    for one in ring_of(key).all():
        session = session_key(one, receiver_nonce, nonce, incarnation)
        if hmac.compare_digest(_mac(session, head), mac):
            return session
    raise MalformedMessage(_BAD_MAC)


def encode_push(session: bytes, sequence: int, header: PushHeader, ids: np.ndarray, epochs: np.ndarray) -> bytes:
    h = header
    head = PUSH.pack(
        _PUSH_MAGIC, VERSION, h.transfer_id, h.incarnation, sequence, h.layer, h.first_logical, h.num_blocks,
        h.begin, h.end, h.first_head, h.num_heads, h.payload_bytes,
    )  # fmt: skip
    head += ids.astype("<u4").tobytes() + epochs.astype("<u4").tobytes()
    return head + _mac(session, head)


def push_tail_bytes(head: bytes, max_payload_bytes: int) -> int:
    """Returns: bytes of ids, epochs and MAC that follow the fixed part of a push

    Raises: MalformedMessage if the fixed part claims more than a message may have; nothing else in it is trusted yet
    """
    magic, version, *_ = fields = PUSH.unpack(head)
    _check_magic(magic, _PUSH_MAGIC, version)
    num_blocks, payload_bytes = fields[7], fields[12]
    if not 1 <= num_blocks <= MAX_BLOCKS or payload_bytes > max_payload_bytes:
        raise MalformedMessage(f"a push of {num_blocks} blocks and {payload_bytes} bytes is beyond what one message may hold")
    return 8 * num_blocks + MAC_BYTES


def decode_push(session: bytes, sequence: int, head: bytes, tail: bytes) -> tuple[PushHeader, np.ndarray, np.ndarray]:
    """Returns: header, block ids and epochs (int64)

    Raises: MalformedMessage if the MAC does not fit or it is not message number `sequence`
    """
    table, mac = tail[:-MAC_BYTES], tail[-MAC_BYTES:]
    _check_mac(session, head + table, mac)
    _, _, transfer_id, incarnation, got, *rest = PUSH.unpack(head)
    if got != sequence:
        raise MalformedMessage(f"message {got} where {sequence} was due")
    ids, epochs = np.frombuffer(table, "<u4").astype(np.int64).reshape(2, -1)
    return PushHeader(transfer_id, incarnation, *rest), ids, epochs


def encode_pair(session: bytes, pair_id: bytes) -> bytes:
    head = PAIR.pack(_PAIR_MAGIC, pair_id)
    return head + _mac(session, head)


def decode_pair(session: bytes, data: bytes) -> bytes:
    """Returns: the id of a pair's communicator, which the sender of a connection has made for it

    Raises: MalformedMessage
    """
    head, mac = data[: PAIR.size], data[PAIR.size :]
    _check_mac(session, head, mac)
    magic, pair_id = PAIR.unpack(head)
    _check_magic(magic, _PAIR_MAGIC, VERSION)
    return pair_id


def encode_batch(session: bytes, sequence: int, count: int) -> bytes:
    """`sequence`: of the first push that follows."""
    head = BATCH.pack(_BATCH_MAGIC, count, sequence)
    return head + _mac(session, head)


def decode_batch(session: bytes, data: bytes, sequence: int) -> int:
    """Returns: how many pushes follow

    Raises: MalformedMessage
    """
    head, mac = data[: BATCH.size], data[BATCH.size :]
    _check_mac(session, head, mac)
    magic, count, got = BATCH.unpack(head)
    if magic != _BATCH_MAGIC or got != sequence or not 1 <= count <= MAX_BATCH:
        raise MalformedMessage(f"{count} pushes from message {got} where a batch from {sequence} of at most {MAX_BATCH} was due")
    return count


def encode_reply(session: bytes, status: Status, sequence: int) -> bytes:
    head = REPLY.pack(_REPLY_MAGIC, status, sequence)
    return head + _mac(session, head)


def decode_reply(session: bytes, data: bytes, sequence: int) -> Status:
    """Raises: MalformedMessage"""
    head, mac = data[: REPLY.size], data[REPLY.size :]
    _check_mac(session, head, mac)
    magic, status, got = REPLY.unpack(head)
    if magic != _REPLY_MAGIC or got != sequence:
        raise MalformedMessage(f"reply to message {got} where {sequence} was due")
    return Status(status)


def _mac(session: bytes, data: bytes) -> bytes:
    return hmac.digest(session, data, hashlib.sha256)


def _check_mac(session: bytes, data: bytes, mac: bytes) -> None:
    if not hmac.compare_digest(_mac(session, data), mac):
        raise MalformedMessage(_BAD_MAC)


def _check_magic(magic: bytes, wanted: bytes, version: int) -> None:
    if magic != wanted or version != VERSION:
        raise MalformedMessage(f"expected {wanted!r} of version {VERSION}, got {magic!r} of version {version}")
