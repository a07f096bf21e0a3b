"""No forged message is believed; the same forger's honest messages are. `benchmarks/forged_messages.py` makes a hundred thousand."""

from common.auth import verify
from common.keyring import Keyring
from kv_transfer.transports import tcp_wire
from tests.support.forgery import KEY, Forger, forge


def test_no_forgery_is_believed():
    made, believed = forge(3_000, seed=2)
    assert len(made) == 10
    assert min(made.values()) >= 300
    assert sum(believed.values()) == 0, believed


def test_the_messages_that_are_forged_from_are_good_ones():
    forger = Forger(3)
    for _ in range(50):
        verify(forger._message(KEY), Keyring((KEY,)))
        session = forger._session()
        tcp_wire.decode_push(session, 1, *forger._push(session, 1))
        assert tcp_wire.decode_batch(session, tcp_wire.encode_batch(session, 5, 3), 5) == 3
    assert forger._tokens.role_of(f"Bearer {forger._ring.tokens()[1]}") is not None
