"""What reaches a tcp receiver from strangers, liars and broken peers: nothing is written, nothing crashes, good peers go on."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.proto import worker_pb2
from kv_transfer.grants import GrantTable, Received
from kv_transfer.receiver import Receiver
from kv_transfer.transports import tcp_wire as wire
from kv_transfer.transports.tcp_wire import MalformedMessage, PushHeader, Status
from tests.support.kv_groups import KEY, geometry, poisoned_view
from tests.support.pace import within

INCARNATION, TRANSFER, PROMPT = 0xABCDEF, 77, 40
GEOMETRY = geometry(2)
TOKEN_BYTES = GEOMETRY.head_dim * 2
BLOCKS = [
    worker_pb2.BlockList(sliding=False, first_logical=0, block_ids=[5, 2, 9], epochs=[3, 1, 4]),
    worker_pb2.BlockList(sliding=True, first_logical=0, block_ids=[1, 0, 3], epochs=[2, 2, 2]),
]


@dataclass(frozen=True)
class Message:
    """A push of whole blocks 0 and 1 of full layer 1, both heads; changed field by field to make bad ones."""

    transfer_id: int = TRANSFER
    incarnation: int = INCARNATION
    layer: int = 1
    first_logical: int = 0
    begin: int = 0
    end: int = 16
    first_head: int = 0
    num_heads: int = 2
    ids: tuple[int, ...] = (5, 2)
    epochs: tuple[int, ...] = (3, 1)
    payload_bytes: int | None = None

    @property
    def payload(self) -> bytes:
        real = len(self.ids) * 2 * self.num_heads * max(0, self.end - self.begin) * TOKEN_BYTES
        return b"\x55" * (real if self.payload_bytes is None else self.payload_bytes)

    @property
    def header(self) -> PushHeader:
        return PushHeader(
            self.transfer_id, self.incarnation, self.layer, self.first_logical, len(self.ids), self.begin, self.end,
            self.first_head, self.num_heads, len(self.payload),
        )  # fmt: skip

    def encode(self, session: bytes, sequence: int) -> bytes:
        return wire.encode_push(session, sequence, self.header, np.array(self.ids), np.array(self.epochs))


GOOD = Message()


def received(message: Message) -> Received:
    return Received(message.header, np.array(message.ids), np.array(message.epochs), memoryview(message.payload))


LIES = {
    "unknown transfer": (replace(GOOD, transfer_id=78), Status.UNKNOWN_TRANSFER),
    "other incarnation": (replace(GOOD, incarnation=INCARNATION - 1), Status.WRONG_INCARNATION),
    "layer beyond the model": (replace(GOOD, layer=4), Status.BAD_LAYER),
    "no heads": (replace(GOOD, num_heads=0), Status.BAD_HEADS),
    "heads of another rank": (replace(GOOD, first_head=1), Status.BAD_HEADS),
    "empty token range": (replace(GOOD, begin=16), Status.BAD_RANGE),
    "tokens beyond the block": (replace(GOOD, end=17), Status.BAD_RANGE),
    "tokens beyond the prompt": (replace(GOOD, first_logical=2, ids=(9,), epochs=(4,), end=9), Status.BAD_RANGE),
    "logical index beyond the grant": (replace(GOOD, first_logical=3, ids=(9,), epochs=(4,)), Status.BAD_RANGE),
    "a huge logical index": (replace(GOOD, first_logical=2**32 - 1), Status.BAD_RANGE),
    "someone else's block": (replace(GOOD, ids=(5, 7)), Status.BLOCK_NOT_GRANTED),
    "granted blocks in the wrong order": (replace(GOOD, ids=(2, 5), epochs=(1, 3)), Status.BLOCK_NOT_GRANTED),
    "a block outside of the pool": (replace(GOOD, ids=(5, 2**32 - 1)), Status.BLOCK_NOT_GRANTED),
    "blocks of the other layer kind": (replace(GOOD, layer=0), Status.BLOCK_NOT_GRANTED),
    "an old epoch": (replace(GOOD, epochs=(2, 1)), Status.WRONG_EPOCH),
    "a future epoch": (replace(GOOD, epochs=(4, 1)), Status.WRONG_EPOCH),
    "short payload": (replace(GOOD, payload_bytes=2 * 2 * 2 * 16 * TOKEN_BYTES - 1), Status.BAD_LENGTH),
    "long payload": (replace(GOOD, payload_bytes=2 * 2 * 2 * 16 * TOKEN_BYTES + 1), Status.BAD_LENGTH),
    "no payload": (replace(GOOD, payload_bytes=0), Status.BAD_LENGTH),
}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    view, _ = poisoned_view(GEOMETRY, 1, 0, (12, 6), shared=False)
    receiver = Receiver(view, key=KEY, incarnation=INCARNATION, listen_host="127.0.0.1", transports=("tcp",), buffer=None)
    receiver.grant(TRANSFER, BLOCKS, PROMPT)
    receiver.view, receiver.clients = view, []
    yield receiver
    for client in receiver.clients:
        client.close()
    receiver.close()


class Client:
    """A hand-made sender."""

    def __init__(self, receiver: Receiver, key: bytes = KEY):
        self.sock = socket.create_connection(("127.0.0.1", receiver._server.port), timeout=within(5))
        receiver.clients.append(self)
        nonce, incarnation = wire.decode_hello(self.read(wire.HELLO.size))
        own = bytes(16)
        self.session = wire.session_key(key, nonce, own, incarnation)
        self.sock.sendall(wire.encode_join(own, self.session))

    def joined(self) -> Client:
        wire.decode_reply(self.session, self.read(wire.REPLY.size + wire.MAC_BYTES), 0)
        return self

    def read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = self.sock.recv(nbytes - len(data))
            if not piece:
                raise ConnectionError("closed")
            data += piece
        return data

    def push(self, message: Message, sequence: int) -> Status:
        self.sock.sendall(message.encode(self.session, sequence) + message.payload)
        return wire.decode_reply(self.session, self.read(wire.REPLY.size + wire.MAC_BYTES), sequence)

    def is_hung_up(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.sock.close()


def is_untouched(receiver: Receiver) -> bool:
    return bool(receiver.view.full.isnan().all()) and bool(receiver.view.sliding.isnan().all())


def written_elements(receiver: Receiver) -> int:
    return int((~receiver.view.full.isnan()).sum()) + int((~receiver.view.sliding.isnan()).sum())


def test_a_good_message_is_written_where_granted_and_nowhere_else(receiver: Receiver) -> None:
    client = Client(receiver).joined()
    assert client.push(GOOD, 1) is Status.OK
    place = receiver.view.layer(1)
    assert not place[[5, 2]].isnan().any()
    assert written_elements(receiver) == place[[5, 2]].numel()
    assert receiver.counts() == {"ok": 1, "bytes": len(GOOD.payload)}


@pytest.mark.parametrize("name", LIES)
def test_a_signed_lie_is_refused_by_name_and_the_connection_goes_on(receiver: Receiver, name: str) -> None:
    message, status = LIES[name]
    client = Client(receiver).joined()
    assert client.push(message, 1) is status
    assert is_untouched(receiver)
    assert client.push(GOOD, 2) is Status.OK
    assert receiver.counts()[status.name.lower()] == 1


def test_a_revoked_grant_is_refused_even_when_blocks_are_granted_again(receiver: Receiver) -> None:
    client = Client(receiver).joined()
    receiver.revoke(TRANSFER)
    assert client.push(GOOD, 1) is Status.UNKNOWN_TRANSFER
    again = [worker_pb2.BlockList(sliding=b.sliding, block_ids=b.block_ids, epochs=[e + 1 for e in b.epochs]) for b in BLOCKS]
    receiver.grant(TRANSFER + 1, again, PROMPT)
    assert client.push(replace(GOOD, transfer_id=TRANSFER + 1), 2) is Status.WRONG_EPOCH
    assert is_untouched(receiver)


def test_a_revoke_between_check_and_copy_is_heeded() -> None:
    view, _ = poisoned_view(GEOMETRY, 1, 0, (12, 6), shared=False)
    table = GrantTable(view, INCARNATION)
    table.add(TRANSFER, BLOCKS, PROMPT)

    class RevokedWhileWaiting:
        is_first = True

        def __enter__(self) -> None:
            if self.is_first:
                self.is_first = False
                table.revoke(TRANSFER)

        def __exit__(self, *exc: object) -> None:
            pass

    table.get(TRANSFER).lock = RevokedWhileWaiting()
    assert table.write([received(GOOD)]) is Status.UNKNOWN_TRANSFER
    assert view.full.isnan().all()


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (replace(GOOD, epochs=(3, 2)), Status.WRONG_EPOCH),
        (replace(GOOD, transfer_id=TRANSFER + 1), Status.UNKNOWN_TRANSFER),
        (replace(GOOD, layer=99), Status.BAD_LAYER),
    ],
)
def test_of_messages_that_came_together_none_is_written_if_one_is_bad(bad: Message, status: Status) -> None:
    view, _ = poisoned_view(GEOMETRY, 1, 0, (12, 6), shared=False)
    table = GrantTable(view, INCARNATION)
    table.add(TRANSFER, BLOCKS, PROMPT)
    assert table.write([received(GOOD), received(bad)]) is status
    assert view.full.isnan().all()
    assert table.get(TRANSFER).head_bytes == [0, 0]
    assert table.write([received(GOOD), received(GOOD)]) is Status.OK
    assert not view.full.isnan().all()


def test_strangers_without_the_key_are_hung_up_on(receiver: Receiver) -> None:
    rng = random.Random(1)
    for i in range(100):
        with socket.create_connection(("127.0.0.1", receiver._server.port), timeout=within(5)) as sock:
            sock.sendall(rng.randbytes(rng.randrange(84, 300)) if i % 2 else b"GET / HTTP/1.1\r\n" * 20)
    client = Client(receiver, key=b"another key")
    assert client.is_hung_up()
    assert is_untouched(receiver)
    assert Client(receiver).joined().push(GOOD, 1) is Status.OK


def test_replays_are_refused_on_the_same_and_on_another_connection(receiver: Receiver) -> None:
    first = Client(receiver).joined()
    data = GOOD.encode(first.session, 1) + GOOD.payload
    first.sock.sendall(data)
    assert wire.decode_reply(first.session, first.read(48), 1) is Status.OK
    receiver.view.full.fill_(float("nan"))
    first.sock.sendall(data)
    assert first.is_hung_up()
    for _ in range(50):
        other = Client(receiver).joined()
        other.sock.sendall(data)
        assert other.is_hung_up()
        other.close()
    assert is_untouched(receiver)
    assert receiver.counts()["malformed"] == 51


def test_a_skipped_sequence_number_is_refused(receiver: Receiver) -> None:
    client = Client(receiver).joined()
    client.sock.sendall(GOOD.encode(client.session, 2) + GOOD.payload)
    assert client.is_hung_up()
    assert is_untouched(receiver)


def test_truncated_messages_write_nothing(receiver: Receiver) -> None:
    rng = random.Random(2)
    for _ in range(150):
        client = Client(receiver).joined()
        data = GOOD.encode(client.session, 1) + GOOD.payload
        client.sock.sendall(data[: rng.randrange(len(data))])
        client.close()
    assert Client(receiver).joined().push(GOOD, 1) is Status.OK
    assert receiver.counts()["ok"] == 1
    assert written_elements(receiver) == receiver.view.layer(1)[[5, 2]].numel()


def test_messages_with_a_flipped_bit_are_refused(receiver: Receiver) -> None:
    rng = random.Random(3)
    for _ in range(300):
        client = Client(receiver).joined()
        head = bytearray(GOOD.encode(client.session, 1))
        bit = rng.randrange(8 * len(head))
        head[bit // 8] ^= 1 << bit % 8
        client.sock.sendall(bytes(head) + GOOD.payload + bytes(4096 * 8))
        assert client.is_hung_up()
        client.close()
    assert is_untouched(receiver)
    assert receiver.counts()["malformed"] == 300


def test_lengths_beyond_a_message_are_refused_before_memory_is_taken(receiver: Receiver) -> None:
    for num_blocks, payload_bytes in ((0, 0), (4097, 0), (2**32 - 1, 0), (1, wire.MAX_PAYLOAD_BYTES + 1), (1, 2**63), (1, 2**64 - 1)):
        client = Client(receiver).joined()
        h = GOOD.header
        head = wire.PUSH.pack(b"TKVP", wire.VERSION, h.transfer_id, h.incarnation, 1, 1, 0, num_blocks, 0, 16, 0, 2, payload_bytes)
        client.sock.sendall(head)
        assert client.is_hung_up()
        client.close()
    assert is_untouched(receiver)


def test_thousands_of_forged_messages_never_pass_the_decoder() -> None:
    """All that a forger can vary short of the key: any bits, any lengths, other sessions, other sequence numbers."""
    rng, session = random.Random(4), bytes(range(32))
    good = GOOD.encode(session, 1)
    size = wire.PUSH.size
    header, ids, epochs = wire.decode_push(session, 1, good[:size], good[size:])
    assert (header, ids.tolist(), epochs.tolist()) == (GOOD.header, list(GOOD.ids), list(GOOD.epochs))
    accepted = 0
    for i in range(5000):
        data = bytearray(good)
        kind = i % 5
        if kind == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data = bytearray(rng.randbytes(len(data)))
        elif kind == 2:
            data[rng.randrange(size) :] = rng.randbytes(len(data))[: rng.randrange(1, 60)]
        elif kind == 3:
            data = bytearray(GOOD.encode(rng.randbytes(32), 1))
        else:
            data = bytearray(GOOD.encode(session, rng.randrange(2, 2**64)))
        head, tail = bytes(data[:size]), bytes(data[size:])
        try:
            if len(tail) < wire.push_tail_bytes(head.ljust(size, b"\0"), wire.MAX_PAYLOAD_BYTES):
                continue  # the receiver would wait for the rest
            wire.decode_push(session, 1, head, tail)
            accepted += 1
        except MalformedMessage:
            continue
    assert accepted == 0


def test_thousands_of_lying_headers_are_refused_or_stay_within_the_grant() -> None:
    """A peer that has the key but is wrong about everything else: whatever is written is what was granted to that very transfer."""
    rng = random.Random(5)
    view, _ = poisoned_view(GEOMETRY, 1, 0, (12, 6), shared=False)
    table = GrantTable(view, INCARNATION)
    table.add(TRANSFER, BLOCKS, PROMPT)
    wild = (0, 1, 2, 15, 16, 17, 255)
    accepted = 0
    for _ in range(3000):
        field = rng.choice(("layer", "first_logical", "begin", "end", "first_head", "num_heads", "transfer_id", "incarnation"))
        message = replace(GOOD, **{field: rng.choice(wild)})
        if rng.random() < 0.5:
            message = replace(message, ids=tuple(rng.randrange(14) for _ in message.ids))
        if rng.random() < 0.5:
            message = replace(message, payload_bytes=rng.randrange(0, 20_000))
        status = table.write([received(message)])
        accepted += status is Status.OK
    granted = torch.zeros(12, dtype=torch.bool)
    granted[[5, 2, 9]] = True
    assert view.full[:, ~granted].isnan().all()
    assert view.sliding[:, [2, 4, 5]].isnan().all()
    assert accepted < 1500


def test_a_connection_that_stalls_within_a_message_does_not_delay_a_revoke(receiver: Receiver) -> None:
    client = Client(receiver).joined()
    data = GOOD.encode(client.session, 1) + GOOD.payload
    client.sock.sendall(data[:-1])
    time.sleep(0.05)
    start = time.monotonic()
    receiver.revoke(TRANSFER)
    assert time.monotonic() - start < within(0.05)
    client.sock.sendall(data[-1:])
    assert wire.decode_reply(client.session, client.read(48), 1) is Status.UNKNOWN_TRANSFER
    assert is_untouched(receiver)


def test_buffers_of_closed_connections_are_given_back_to_the_system(receiver: Receiver) -> None:
    def anonymous_bytes() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    def num_threads() -> int:
        return sum(thread.name.startswith("kv-tcp-127.0.0.1") for thread in threading.enumerate())

    kept = []
    for _ in range(3):  # heaps learn to keep such blocks once one of them was freed
        clients = [Client(receiver).joined() for _ in range(12)]
        assert all(client.push(GOOD, 1) is Status.OK for client in clients)
        for client in clients:
            client.close()
        deadline = time.monotonic() + within(10)
        while num_threads():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        kept.append(anonymous_bytes())
    assert kept[-1] - kept[0] < 2 * wire.MAX_PAYLOAD_BYTES


def test_after_close_nobody_is_let_in(receiver: Receiver) -> None:
    client = Client(receiver).joined()
    receiver.close()
    assert client.is_hung_up()
    with pytest.raises(OSError, match=r".*"):
        Client(receiver)
