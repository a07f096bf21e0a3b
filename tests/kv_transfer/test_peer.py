"""A peer's thread with fake links: order of work, and what an error that has not settled holds back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from common.errors import KVTransferError, PeerLost, TransferTimeout
from kv_transfer.deadline import Deadline
from kv_transfer.push import Push, Span, split_spans
from kv_transfer.sender import PushResult
from kv_transfer.transports.choose import LinkOpener, LinkRate
from tests.support.kv_groups import DecodeGroup, PrefillGroup, geometry, joined
from tests.support.pace import within

TOKENS = 32


class FakeLink:
    """Writes nothing; fails when told, and settles when told."""

    transport = "fake"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.error: Exception | None = None
        self.is_settled = True

    def write(self, push: Push, deadline: Deadline) -> None:
        self.log.append(f"write {push.transfer_id}")
        if self.error:
            raise self.error

    def flush(self, deadline: Deadline) -> None:
        self.log.append("flush")

    def is_lost(self) -> bool:
        return False

    def settle(self) -> bool:
        return self.is_settled

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[FakeLink]:
    made: list[FakeLink] = []

    def open_fake(self, *args: object) -> FakeLink:
        made.append(FakeLink())
        return made[-1]

    monkeypatch.setattr(LinkOpener, "open", open_fake)
    return made


@pytest.fixture
def pair() -> Iterator[tuple[PrefillGroup, DecodeGroup]]:
    prefill, decode = PrefillGroup(geometry(2), 1, TOKENS), DecodeGroup(geometry(2), 1, ("tcp",))
    with joined(prefill, decode):
        yield prefill, decode


def hand_over(prefill: PrefillGroup, decode: DecodeGroup, transfer_id: int) -> PushResult:
    prefill.begin(decode.reserve(transfer_id, TOKENS))
    prefill.push_chunk(transfer_id, 0, TOKENS)
    return prefill.finish(transfer_id)[0]


def test_a_transfer_ends_with_a_flush_and_the_link_is_used_again(links, pair) -> None:
    assert hand_over(*pair, 1).error is None
    assert hand_over(*pair, 2).error is None
    assert len(links) == 1
    assert links[0].log == ["write 1"] * 4 + ["flush"] + ["write 2"] * 4 + ["flush"]


def test_transfers_that_take_turns_are_flushed_between(links, pair) -> None:
    prefill, decode = pair
    for transfer_id in (1, 2):
        prefill.begin(decode.reserve(transfer_id, TOKENS))
    for start, transfer_id in ((0, 1), (0, 2), (16, 1), (16, 2)):
        prefill.push_chunk(transfer_id, start, start + 16)
    assert prefill.finish(1)[0].error is None
    assert prefill.finish(2)[0].error is None
    turns = [entry for i, entry in enumerate(links[0].log) if i == 0 or entry != links[0].log[i - 1]]
    assert turns == ["write 1", "flush", "write 2", "flush", "write 1", "flush", "write 2", "flush"]


def test_an_error_is_not_over_before_the_link_has_settled_and_others_need_not_wait(links, pair) -> None:
    prefill, decode = pair
    assert hand_over(prefill, decode, 1).error is None
    links[0].error, links[0].is_settled = TransferTimeout("stalled"), False
    prefill.begin(decode.reserve(2, TOKENS))
    prefill.push_chunk(2, 0, TOKENS)
    results: list[PushResult] = []
    over = threading.Event()
    prefill.senders[0].finish(2, lambda result: (results.append(result), over.set()))
    assert not over.wait(0.3), "source blocks were given back although the write may still be read from them"
    assert isinstance(prefill.senders[0].error(2), TransferTimeout)
    began = time.monotonic()
    assert isinstance(hand_over(prefill, decode, 3).error, PeerLost)
    assert time.monotonic() - began < within(0.3)
    links[0].is_settled = True
    assert over.wait(within(1.0))
    assert isinstance(results[0].error, TransferTimeout)
    assert links[0].log[-1] == "close"
    assert hand_over(prefill, decode, 4).error is None
    assert len(links) == 2


def test_an_unexpected_exception_fails_the_transfer_and_the_thread_goes_on(links, pair, caplog) -> None:
    assert hand_over(*pair, 1).error is None
    links[0].error = ZeroDivisionError("a fault of ours")
    error = hand_over(*pair, 2).error
    assert isinstance(error, KVTransferError)
    assert "ZeroDivisionError" in error.message
    assert "unexpected error" in caplog.text
    assert hand_over(*pair, 3).error is None


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [
        ((0, 1), [Span(0, 1, 0, 1)]),
        ((0, 16), [Span(0, 1, 0, 16)]),
        ((3, 9), [Span(0, 1, 3, 9)]),
        ((15, 17), [Span(0, 1, 15, 16), Span(1, 1, 0, 1)]),
        ((5, 70), [Span(0, 1, 5, 16), Span(1, 3, 0, 16), Span(4, 1, 0, 6)]),
        ((32, 32), []),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_token_ranges_are_cut_at_block_edges(tokens: tuple[int, int], spans: list[Span]) -> None:
    assert split_spans(*tokens, 16) == spans


def test_what_was_measured_of_a_decode_rank_is_forgotten_once_it_is_gone() -> None:
    prefill = PrefillGroup(geometry(2), 1, TOKENS, "tcp")
    sender = prefill.senders[0]
    for n in range(3):
        decode = DecodeGroup(geometry(2), 1, ("tcp",), incarnation=100 + n)
        with joined(prefill, decode):
            assert hand_over(prefill, decode, n + 1).error is None
            assert len(sender.rates()) == 1
            (peer,) = sender._peers.values()
            decode.receivers[0].close()
            peer.join(timeout_s=within(5.0))
        assert sender.rates() == []


def test_a_decode_rank_that_was_only_idle_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(LinkOpener, "_measure", lambda *_: measured.append(1) or 1.0)
    prefill = PrefillGroup(geometry(2), 1, TOKENS, "tcp", sender_options={"idle_s": 0.1})
    decode = DecodeGroup(geometry(2), 1, ("tcp",))
    with joined(prefill, decode):
        for transfer_id in (1, 2):
            assert hand_over(prefill, decode, transfer_id).error is None
            for peer in list(prefill.senders[0]._peers.values()):
                peer.join(timeout_s=within(5.0))
    assert len(measured) == 1


def test_rates_of_a_thousand_more_decode_ranks_push_out_the_oldest() -> None:
    opener = PrefillGroup(geometry(2), 1, TOKENS, "tcp").senders[0]._opener
    for incarnation in range(2000):
        opener._report(LinkRate(incarnation, 0, "tcp", 1.0), [])
    assert len(opener.rates()) == 1024
    assert opener.rates()[-1].incarnation == 1999
