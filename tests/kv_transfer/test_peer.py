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
from kv_transfer.transports.choose import LinkOpener
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
