"""Keys rotate: what was signed before, during and after, and which key both ends of a transfer make digests with."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from common.auth import sign, verify
from common.errors import ConfigError, KVTransferError
from common.keyring import Keyring, digest_secret, id_of
from common.proto import worker_pb2
from kv_transfer.transports import tcp_wire
from kv_transfer.transports.tcp_wire import MalformedMessage

OLD, NEW = b"o" * 32, b"n" * 32


def signed(key) -> worker_pb2.AbandonRequest:
    message = worker_pb2.AbandonRequest(transfer_id=7, incarnation=9, reason="x")
    sign(message, key)
    return message


def test_a_rotation_in_three_steps_refuses_nothing_on_the_way_and_the_old_key_at_the_end():
    steps = [Keyring((OLD,)), Keyring((OLD, NEW)), Keyring((NEW, OLD)), Keyring((NEW,))]
    for one, other in pairwise(steps):  # hosts take each step at different times
        verify(signed(one), other)
        verify(signed(other), one)
        nonce, own = b"a" * 16, b"b" * 16
        session = tcp_wire.session_key(one.current(), nonce, own, 5)
        assert tcp_wire.decode_join(tcp_wire.encode_join(own, session), other, nonce, 5) == session
        assert digest_secret(other, id_of(one.current())) == one.current()
    with pytest.raises(KVTransferError, match="bad signature"):
        verify(signed(OLD), steps[-1])
    with pytest.raises(MalformedMessage):
        tcp_wire.decode_join(tcp_wire.encode_join(b"b" * 16, tcp_wire.session_key(OLD, b"a" * 16, b"b" * 16, 5)), NEW, b"a" * 16, 5)
    with pytest.raises(KVTransferError, match="no key"):
        digest_secret(steps[-1], id_of(OLD))


def test_a_signature_covers_the_key_id():
    reservation = worker_pb2.Reservation(transfer_id=1, key_id=id_of(OLD))
    sign(reservation, OLD)
    reservation.key_id = id_of(NEW)
    with pytest.raises(KVTransferError):
        verify(reservation, Keyring((OLD, NEW)))


def test_a_key_file_is_followed_and_a_broken_one_is_not(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_bytes(OLD + b"\n")
    ring = Keyring.of_file(file)
    assert ring.all() == (OLD,)
    file.write_bytes(NEW + b"\n\n" + OLD + b"\n")
    ring._keys._next_look_s = 0.0
    assert ring.all() == (NEW, OLD)
    file.write_bytes(b"short\n")
    ring._keys._next_look_s = 0.0
    assert ring.all() == (NEW, OLD)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"short", b"long enough for a key\nshort"])
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match="16 bytes"):
        Keyring.of_file(tmp_path / "keys")
