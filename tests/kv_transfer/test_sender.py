"""The sender's edges: what is refused at once, how failures end, what may be reused when, and how a transport is chosen."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace

import pytest
import torch

from common import auth
from common.errors import ConfigError, KVTransferError, LayoutMismatch, NotSupportedError
from common.proto import worker_pb2
from kv_transfer.pool_view import PoolView
from kv_transfer.sender import PushResult, Sender
from kv_transfer.transports import nixl
from kv_transfer.transports.choose import LinkOpener
from tests.support.kv_groups import KEY, DecodeGroup, PrefillGroup, assert_handed_over, geometry, joined
from tests.support.pace import within

TOKENS = 50


def change(reservation: worker_pb2.Reservation, **kv) -> worker_pb2.Reservation:
    for name, value in kv.items():
        if name == "sliding":
            del reservation.kv.sliding[:]
            reservation.kv.sliding.extend(value)
        else:
            setattr(reservation.kv, name, value)
    auth.sign(reservation, KEY)
    return reservation


@pytest.fixture
def pair():
    prefill, decode = PrefillGroup(geometry(2), 1, TOKENS), DecodeGroup(geometry(2), 1, ("tcp",))
    with joined(prefill, decode):
        yield prefill, decode


@pytest.mark.parametrize(
    "difference",
    [
        {"num_layers": 5}, {"num_kv_heads": 4}, {"head_dim": 32}, {"block_size_tokens": 32}, {"dtype": "float32"},
        {"window_tokens": 64}, {"sliding": (False, True, False, True)},
    ],
    ids=lambda d: next(iter(d)),
)  # fmt: skip
def test_groups_that_can_not_be_joined_are_refused_at_begin_with_the_reason(pair, difference: dict) -> None:
    prefill, decode = pair
    reservation = change(decode.reserve(1, TOKENS), **difference)
    with pytest.raises(LayoutMismatch, match=next(iter(difference))):
        prefill.begin(reservation)


def test_heads_that_no_rank_could_hold_are_refused(pair) -> None:
    prefill, decode = pair
    reservation = decode.reserve(1, TOKENS)
    reservation.layout.tp = 3
    auth.sign(reservation, KEY)
    with pytest.raises(LayoutMismatch, match="one must divide the other"):
        prefill.begin(reservation)


def test_a_pool_of_the_wrong_shape_is_refused_when_the_worker_starts() -> None:
    g = geometry(8)
    full = torch.zeros(2, 3, 2, 8, 16, 16, dtype=torch.bfloat16)
    PoolView(full, full, g, 1, 0)
    with pytest.raises(LayoutMismatch, match="full pool"):
        PoolView(full, full, g, 2, 0)
    with pytest.raises(LayoutMismatch, match="float32"):
        PoolView(full.float(), full, g, 1, 0)
    with pytest.raises(LayoutMismatch, match="one must divide"):
        PoolView(full, full, replace(g, num_kv_heads=6), 4, 0)


def test_a_reservation_with_a_bad_signature_is_refused(pair) -> None:
    prefill, decode = pair
    reservation = decode.reserve(1, TOKENS)
    reservation.blocks[0].block_ids[0] ^= 1
    with pytest.raises(KVTransferError, match="bad signature"):
        prefill.begin(reservation)


def test_a_reservation_that_does_not_hold_the_prompt_is_refused(pair) -> None:
    prefill, decode = pair
    reservation = decode.reserve(1, TOKENS - 16)
    with pytest.raises(KVTransferError, match="hands over 0 to 4"):
        prefill.begin(reservation)
    del reservation.blocks[0].epochs[0]
    auth.sign(reservation, KEY)
    with pytest.raises(KVTransferError, match="epochs"):
        prefill.begin(reservation)


def test_source_blocks_that_do_not_cover_the_prompt_are_refused(pair) -> None:
    prefill, decode = pair
    reservation = decode.reserve(1, TOKENS)
    for blocks in ([0, 1, 2], [0, 1, 2, 99], [0, 1, 2, -1]):
        with pytest.raises(KVTransferError, match="source blocks"):
            prefill.senders[0].begin(reservation, blocks, TOKENS)


def test_the_same_transfer_can_not_begin_twice(pair) -> None:
    prefill, decode = pair
    reservation = decode.reserve(1, TOKENS)
    prefill.begin(reservation)
    with pytest.raises(KVTransferError, match="open already"):
        prefill.begin(reservation)


def test_tokens_that_are_left_out_are_noticed(pair) -> None:
    prefill, decode = pair
    prefill.begin(decode.reserve(1, TOKENS))
    prefill.push_chunk(1, 0, 16)
    with pytest.raises(KVTransferError, match="16 to 50 were due"):
        prefill.push_chunk(1, 32, TOKENS)
    error = prefill.finish(1)[0].error
    assert "pushed up to token 16 of 50" in error.message


def test_a_failed_transfer_is_reported_once_and_pushes_after_it_do_nothing(pair) -> None:
    prefill, decode = pair
    prefill.begin(decode.reserve(1, TOKENS))
    decode.receivers[0].revoke(1)
    for start in range(0, TOKENS, 10):
        prefill.push_chunk(1, start, start + 10)
    results = prefill.finish(1)
    assert "revoked" in results[0].error.message
    with pytest.raises(KVTransferError, match="not open"):
        prefill.senders[0].finish(1, lambda result: None)
    prefill.push_chunk(1, 0, 10)
    assert prefill.senders[0].error(1) is None
    assert 1 <= decode.receivers[0].counts()["unknown_transfer"] <= 8  # those that were sent before the first refusal arrived


def test_an_abort_before_begin_and_after_the_end_answers_at_once(pair) -> None:
    prefill, decode = pair
    stopped: list[str] = []
    prefill.senders[0].abort(1, lambda: stopped.append("before"))
    prefill.begin(decode.reserve(1, TOKENS))
    prefill.push_chunk(1, 0, TOKENS)
    assert prefill.finish(1)[0].error is None
    prefill.senders[0].abort(1, lambda: stopped.append("after"))
    assert stopped == ["before", "after"]


def test_abort_and_finish_each_call_back_once(pair) -> None:
    prefill, decode = pair
    prefill.begin(decode.reserve(1, TOKENS))
    prefill.push_chunk(1, 0, 20)
    calls: list[object] = []
    over = threading.Event()
    prefill.senders[0].finish(1, calls.append)
    prefill.senders[0].abort(1, lambda: (calls.append("stopped"), over.set()))
    assert over.wait(within(5.0))
    done = next(call for call in calls if isinstance(call, PushResult))
    assert done.error is not None
    assert len(calls) == 2


def test_a_callback_that_fails_does_not_harm_the_next_transfer(pair) -> None:
    prefill, decode = pair

    def explode(result: PushResult) -> None:
        raise RuntimeError("a fault of the worker")

    prefill.begin(decode.reserve(1, TOKENS))
    prefill.push_chunk(1, 0, TOKENS)
    prefill.senders[0].finish(1, explode)
    prefill.begin(decode.reserve(2, TOKENS))
    prefill.push_chunk(2, 0, TOKENS)
    assert prefill.finish(2)[0].error is None
    assert_handed_over(prefill, decode, 2)


def test_a_rank_that_writes_nothing_finishes_at_once() -> None:
    prefill, decode = PrefillGroup(geometry(2), 4, TOKENS), DecodeGroup(geometry(2), 2, ("tcp",))
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        results = prefill.finish(1)
        assert [sum(result.bytes_per_rank) for result in sorted(results, key=sum_bytes)][:2] == [0, 0]
        assert all(result.error is None for result in results)


def sum_bytes(result: PushResult) -> int:
    return sum(result.bytes_per_rank)


def test_a_link_that_was_idle_for_long_is_closed_and_opened_again() -> None:
    prefill = PrefillGroup(geometry(2), 1, TOKENS, "tcp", sender_options={"idle_s": 0.1})
    decode = DecodeGroup(geometry(2), 1, ("tcp",))
    with joined(prefill, decode):
        for transfer_id in (1, 2):
            prefill.begin(decode.reserve(transfer_id, TOKENS))
            prefill.push_chunk(transfer_id, 0, TOKENS)
            assert prefill.finish(transfer_id)[0].error is None
            assert_handed_over(prefill, decode, transfer_id)
            peers = list(prefill.senders[0]._peers.values())
            for peer in peers:
                peer.join(timeout_s=5.0)
            assert prefill.senders[0]._peers == {}


@pytest.mark.parametrize(
    ("gb_per_s", "expected"),
    [
        ({"shm": 9.0, "tcp": 2.0}, "goes over shm at 9.00 GB/s; not tcp: 2.00 GB/s"),
        ({"shm": 1.0, "tcp": 2.0}, "goes over tcp at 2.00 GB/s; not shm: 1.00 GB/s"),
        ({"tcp": 2.0}, "goes over tcp at 2.00 GB/s\n"),
    ],
    ids=["memory is faster", "the socket is faster", "tcp only"],
)
def test_auto_takes_what_was_measured_fastest_and_says_so(caplog, monkeypatch, gb_per_s: dict[str, float], expected: str) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(LinkOpener, "_measure", lambda _self, link, _deadline: gb_per_s[link.transport])
    prefill, decode = PrefillGroup(geometry(2), 1, TOKENS), DecodeGroup(geometry(2), 1, tuple(sorted(gb_per_s, reverse=True)))
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        assert prefill.finish(1)[0].error is None
        assert_handed_over(prefill, decode, 1)
    assert expected in caplog.text


def test_auto_goes_on_to_tcp_when_memory_can_not_be_mapped_and_says_why(caplog) -> None:
    caplog.set_level(logging.INFO)
    prefill, decode = PrefillGroup(geometry(2), 1, TOKENS), DecodeGroup(geometry(2), 1, ("shm", "tcp"))
    with joined(prefill, decode):
        reservation = decode.reserve(1, TOKENS)
        facts = json.loads(reservation.ranks[0].endpoints[0].detail)
        facts["buffer"]["host"] = "another"
        reservation.ranks[0].endpoints[0].detail = json.dumps(facts).encode()
        auth.sign(reservation, KEY)
        prefill.begin(reservation)
        prefill.push_chunk(1, 0, TOKENS)
        assert prefill.finish(1)[0].error is None
        assert_handed_over(prefill, decode, 1)
    assert "goes over tcp at " in caplog.text
    assert "; not shm: the shared buffer is on another host" in caplog.text


def test_no_transport_in_common_is_refused_at_begin() -> None:
    prefill, decode = PrefillGroup(geometry(2), 1, TOKENS, "shm"), DecodeGroup(geometry(2), 1, ("tcp",))
    with joined(prefill, decode), pytest.raises(KVTransferError, match=r"offers \['tcp'\], this rank wants shm"):
        prefill.begin(decode.reserve(1, TOKENS))


def test_another_cluster_key_fails_the_transfer() -> None:
    decode = DecodeGroup(geometry(2), 1, ("tcp",))
    prefill = PrefillGroup(geometry(2), 1, TOKENS, "tcp")
    prefill.senders = [Sender(prefill.views[0], key=b"other", rank=0, preference="tcp")]
    with joined(prefill, decode):
        reservation = decode.reserve(1, TOKENS)
        auth.sign(reservation, b"other")
        prefill.begin(reservation)
        prefill.push_chunk(1, 0, TOKENS)
        assert "share cluster.key_file" in prefill.finish(1)[0].error.message


def test_unknown_and_missing_transports_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    view = PrefillGroup(geometry(2), 1, TOKENS).views[0]
    with pytest.raises(ConfigError, match="shm, nixl, tcp exist"):
        Sender(view, key=KEY, rank=0, preference="carrier pigeon")
    with pytest.raises(KVTransferError, match="rank 1"):
        Sender(view, key=KEY, rank=1)
    monkeypatch.setattr(nixl, "_MODULES", ("nixl_that_nobody_has",))
    with pytest.raises(NotSupportedError, match=r"tandem\[nixl\]"):
        Sender(view, key=KEY, rank=0, preference="nixl")
