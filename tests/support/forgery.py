"""Forged messages of every signed kind: flipped bits, borrowed signatures, replays, other keys. Says how many were believed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
from google.protobuf.message import DecodeError

from common.access import Tokens
from common.auth import sign, verify
from common.errors import KVTransferError
from common.keyring import Keyring
from common.proto import worker_pb2
from kv_transfer.transports import tcp_wire
from kv_transfer.transports.tcp_wire import MalformedMessage, PushHeader, Status

KEY, OTHER_KEY = b"k" * 32, b"x" * 32
SIGNED = (
    worker_pb2.Reservation, worker_pb2.CommitRequest, worker_pb2.AbandonRequest, worker_pb2.FenceRequest, worker_pb2.WritersDiedRequest,
)  # fmt: skip


class Forger:
    """Seeded. Each method makes one forgery and returns whether it was believed."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._ring = Keyring((KEY, b"second" * 6))
        self._tokens = Tokens(None, self._ring)

    def kinds(self) -> dict[str, Callable[[], bool]]:
        return {
            "protobuf, bits flipped": self.flipped_message,
            "protobuf, another message's signature": self.borrowed_signature,
            "protobuf, random or no signature": self.random_signature,
            "protobuf, another key": self.foreign_message,
            "tcp join": self.join,
            "tcp push, bits flipped": self.flipped_push,
            "tcp push, replayed or of another session": self.replayed_push,
            "tcp batch": self.batch,
            "tcp reply": self.reply,
            "token": self.token,
        }

    def flipped_message(self) -> bool:
        message = self._message(KEY)
        data = self._flip(message.SerializeToString())
        try:
            forged = type(message).FromString(data)
        except DecodeError:
            return False
        return forged != message and self._believes(forged)

    def borrowed_signature(self) -> bool:
        message, other = self._message(KEY), self._message(KEY)
        if message == other:
            return False
        message.mac = other.mac
        return self._believes(message)

    def random_signature(self) -> bool:
        message = self._message(KEY)
        message.mac = self._random.choice((b"", message.mac[:-1], message.mac + b"\0", self._random.randbytes(32)))
        return self._believes(message)

    def foreign_message(self) -> bool:
        return self._believes(self._message(OTHER_KEY))

    def join(self) -> bool:
        nonce, own, incarnation = self._random.randbytes(16), self._random.randbytes(16), self._random.getrandbits(64)
        good = tcp_wire.encode_join(own, tcp_wire.session_key(KEY, nonce, own, incarnation))
        if self._random.random() < 0.5:
            forged, seen_nonce = self._flip(good), nonce
        else:  # what another connection was joined with
            forged, seen_nonce = good, self._random.randbytes(16)
        return self._passes(lambda: tcp_wire.decode_join(forged, self._ring, seen_nonce, incarnation))

    def flipped_push(self) -> bool:
        session = self._session()
        head, tail = self._push(session, 1)
        data = self._flip(head + tail)
        forged_head, forged_tail = data[: len(head)], data[len(head) :]
        try:
            if tcp_wire.push_tail_bytes(forged_head, 1 << 30) != len(forged_tail):
                return False
        except MalformedMessage:
            return False
        return self._passes(lambda: tcp_wire.decode_push(session, 1, forged_head, forged_tail))

    def replayed_push(self) -> bool:
        session = self._session()
        head, tail = self._push(session, 1)
        if self._random.random() < 0.5:
            return self._passes(lambda: tcp_wire.decode_push(session, 2, head, tail))
        return self._passes(lambda: tcp_wire.decode_push(self._session(), 1, head, tail))

    def batch(self) -> bool:
        session = self._session()
        good = tcp_wire.encode_batch(session, 5, self._random.randint(1, tcp_wire.MAX_BATCH))
        if self._random.random() < 0.5:
            return self._passes(lambda: tcp_wire.decode_batch(session, self._flip(good), 5))
        return self._passes(lambda: tcp_wire.decode_batch(*self._random.choice(((session, good, 6), (self._session(), good, 5)))))

    def reply(self) -> bool:
        session = self._session()
        good = tcp_wire.encode_reply(session, Status.OK, 5)
        if self._random.random() < 0.5:
            return self._passes(lambda: tcp_wire.decode_reply(session, self._flip(good), 5))
        return self._passes(lambda: tcp_wire.decode_reply(session, good, 6))

    def token(self) -> bool:
        good = self._ring.tokens()[0]
        text = self._random.choice((self._random.randbytes(32).hex(), self._flip(good.encode()).decode("latin-1"), good[:-1], ""))
        return text != good and self._tokens.role_of(f"Bearer {text}") is not None

    def _message(self, key: bytes):
        r = self._random
        kind = r.choice(SIGNED)
        message = kind()
        if kind is worker_pb2.WritersDiedRequest:
            message.incarnations.append(r.getrandbits(64))
        else:
            message.transfer_id, message.incarnation = r.getrandbits(64), r.getrandbits(64)
        if kind is worker_pb2.Reservation:
            message.blocks.add(block_ids=[r.randrange(1000) for _ in range(4)], epochs=[r.randrange(9) for _ in range(4)])
        if kind is worker_pb2.CommitRequest:
            message.bytes_per_rank.append(r.getrandbits(40))
        sign(message, key)
        return message

    def _push(self, session: bytes, sequence: int) -> tuple[bytes, bytes]:
        r = self._random
        ids = np.array([r.randrange(1000) for _ in range(4)])
        header = PushHeader(r.getrandbits(64), r.getrandbits(64), r.randrange(36), 0, 4, 0, 16, 0, 2, 1 << 16)
        data = tcp_wire.encode_push(session, sequence, header, ids, ids)
        return data[: tcp_wire.PUSH.size], data[tcp_wire.PUSH.size :]

    def _session(self) -> bytes:
        r = self._random
        return tcp_wire.session_key(KEY, r.randbytes(16), r.randbytes(16), 7)

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for bit in self._random.sample(range(8 * len(changed)), self._random.randint(1, 4)):
            changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    def _believes(self, message) -> bool:
        return self._passes(lambda: verify(message, self._ring))

    @staticmethod
    def _passes(check: Callable[[], object]) -> bool:
        try:
            check()
        except KVTransferError:
            return False
        return True


def forge(count: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Returns: (forgeries made, forgeries believed), by kind"""
    kinds = Forger(seed).kinds()
    made: Counter[str] = Counter()
    believed: Counter[str] = Counter()
    for number in range(count):
        name = list(kinds)[number % len(kinds)]
        made[name] += 1
        believed[name] += kinds[name]()
    return made, believed
