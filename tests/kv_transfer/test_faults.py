"""Peers that stop, die and come back: the survivor is free by its deadline + 1 s, other pairs go on, nothing lands where it should not."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from common import auth, process
from common.errors import PeerLost, TransferTimeout
from common.proto import types_pb2
from kv_transfer.ledger import ReleaseBlocks, TransferLedger
from kv_transfer.sender import PushResult
from kv_transfer.transports import nixl
from tests.support.kv_groups import KEY, DecodeGroup, PrefillGroup, assert_handed_over, geometry, joined
from tests.support.kv_peer import PeerProcess
from tests.support.pace import within

TOKENS = 160


@pytest.fixture
def peers() -> Iterator[list[PeerProcess]]:
    started: list[PeerProcess] = []
    yield started
    for peer in started:
        peer.end()


def start(peers: list[PeerProcess], role: str, transport: str) -> PeerProcess:
    peers.append(PeerProcess(role, transport))
    return peers[-1]


def push_all(prefill: PrefillGroup, transfer_id: int, at: int, then) -> None:
    """Pushes in chunks of 16 tokens and calls `then` before chunk `at`."""
    for i, position in enumerate(range(0, prefill.num_tokens, 16)):
        if i == at:
            then()
        prefill.push_chunk(transfer_id, position, min(position + 16, prefill.num_tokens))
    if at * 16 >= prefill.num_tokens:
        then()


def transports(*names: str) -> list:
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in names if name == "nixl" and nixl.is_installed()]
    return [name for name in names if name != "nixl"] + slow


@pytest.mark.parametrize("at", [0, 5, 10], ids=["begin", "half", "end"])
@pytest.mark.parametrize("transport", transports("tcp", "cuda_ipc", "nixl"))
def test_a_stopped_decode_rank_ends_at_the_deadline_and_other_pairs_go_on(peers: list[PeerProcess], transport: str, at: int) -> None:
    g = geometry(2)
    stopped = start(peers, "decode", transport)
    prefill, healthy = PrefillGroup(g, 1, TOKENS, transport, seed=3), DecodeGroup(g, 1, (transport,), incarnation=0xBEEF)
    with joined(prefill, healthy):
        if at:  # links exist already
            prefill.begin(stopped.reserve(1, TOKENS))
            push_all(prefill, 1, 99, lambda: None)
            assert prefill.finish(1)[0].error is None
        began = time.monotonic()
        prefill.begin(stopped.reserve(2, TOKENS), deadline_s=within(1.5))
        push_all(prefill, 2, at, lambda: stopped.signal(signal.SIGSTOP))
        prefill.begin(healthy.reserve(3, TOKENS))
        push_all(prefill, 3, 99, lambda: None)
        assert prefill.finish(3, timeout_s=within(1.5))[0].error is None
        assert time.monotonic() - began < within(1.5), "the healthy pair waited for the stopped one"
        assert_handed_over(prefill, healthy, 3)
        results: list[PushResult] = []
        prefill.senders[0].finish(2, results.append)
        while not (results or (transport == "nixl" and prefill.senders[0].error(2) is not None)) and time.monotonic() - began < within(2.5):
            time.sleep(0.01)
        error = results[0].error if results else prefill.senders[0].error(2)
        stopped.signal(signal.SIGCONT)
        if transport == "tcp":
            assert results
            if at < 10 or error is not None:  # at the end every byte may have been acknowledged before
                assert isinstance(error, TransferTimeout)
        else:  # one-sided: what had a connection is written without the peer's help; else it is over only when the peer has taken it
            assert results if error is None else isinstance(error, TransferTimeout)
            while not results:
                time.sleep(0.01)
        prefill.begin(stopped.reserve(4, TOKENS))  # the group is back without a restart of anybody
        push_all(prefill, 4, 99, lambda: None)
        assert prefill.finish(4)[0].error is None
        assert stopped.ask("is_right", 4, 3)


@pytest.mark.parametrize("at", [0, 5, 10], ids=["begin", "half", "end"])
@pytest.mark.parametrize("transport", transports("shm", "tcp", "cuda_ipc", "nixl"))
def test_a_killed_decode_rank_is_noticed_at_once(peers: list[PeerProcess], transport: str, at: int) -> None:
    killed = start(peers, "decode", transport)
    prefill, healthy = (
        PrefillGroup(geometry(2), 1, TOKENS, transport, seed=3),
        DecodeGroup(geometry(2), 1, (transport,), incarnation=0xBEEF),
    )

    with joined(prefill, healthy):
        prefill.begin(killed.reserve(1, TOKENS), deadline_s=20.0)
        push_all(prefill, 1, at, killed.kill)
        died = time.monotonic()
        result = prefill.finish(1)[0]
        if at < 10 or result.error is not None:  # at the end every byte may have been acknowledged before
            assert isinstance(result.error, PeerLost)
        assert time.monotonic() - died < within(2.0)
        prefill.begin(healthy.reserve(2, TOKENS))
        push_all(prefill, 2, 99, lambda: None)
        assert prefill.finish(2)[0].error is None
        assert_handed_over(prefill, healthy, 2)


@pytest.mark.parametrize("transport", ["shm", "tcp", "cuda_ipc"])
def test_a_long_prefill_learns_early_that_nobody_will_read_its_kv(peers: list[PeerProcess], transport: str) -> None:
    killed = start(peers, "decode", transport)
    prefill = PrefillGroup(geometry(2), 1, TOKENS, transport)
    try:
        prefill.begin(killed.reserve(1, TOKENS))
        push_all(prefill, 1, 99, lambda: None)
        assert prefill.finish(1)[0].error is None  # there is a link now
        prefill.begin(killed.reserve(2, TOKENS), deadline_s=60.0)
        killed.kill()
        time.sleep(0.15)
        for position in (0, 16, 32):
            prefill.push_chunk(2, position, position + 16)
        give_up = time.monotonic() + within(1.0)
        while prefill.senders[0].error(2) is None and time.monotonic() < give_up:
            time.sleep(0.01)
        assert isinstance(prefill.senders[0].error(2), PeerLost)
    finally:
        prefill.close()


@pytest.mark.parametrize("transport", ["shm", "tcp", "cuda_ipc"])
def test_blocks_of_a_killed_prefill_group_are_free_once_its_death_is_known(peers: list[PeerProcess], transport: str) -> None:
    writer = start(peers, "prefill", transport)
    decode = DecodeGroup(geometry(2), 1, (transport,))
    ledger = TransferLedger(decode.incarnation)
    ranks = [process.identity(writer.pid)]
    ledger.reserve(1, "a", types_pb2.GroupDescription(incarnation=4, address="nowhere", ranks=ranks), 10.0, time.monotonic())
    try:
        reservation = decode.reserve(1, TOKENS)
        assert writer.ask("push", reservation.SerializeToString(), TOKENS, 5)
        writer.signal(signal.SIGSTOP)
        assert ledger.abort("a", time.monotonic()) != []
        assert ledger.sweep_dead(process.is_known_dead) == []  # stopped is not dead: it may go on writing any time
        writer.kill()
        assert ledger.sweep_dead(process.is_known_dead) == [ReleaseBlocks(1)]
        decode.release(1)
        for pool in decode.pools:
            pool.check()
            assert pool.num_free == pool.num_blocks
    finally:
        decode.close()


def test_an_abort_does_not_wait_for_a_stopped_peer(peers: list[PeerProcess]) -> None:
    stopped = start(peers, "decode", "tcp")
    prefill = PrefillGroup(geometry(2), 1, TOKENS, "tcp")
    try:
        prefill.begin(stopped.reserve(1, TOKENS), deadline_s=60.0)
        push_all(prefill, 1, 2, lambda: stopped.signal(signal.SIGSTOP))
        done: list[PushResult] = []
        prefill.senders[0].finish(1, done.append)
        over = threading.Event()
        began = time.monotonic()
        prefill.senders[0].abort(1, over.set)
        assert over.wait(within(1.0))
        assert time.monotonic() - began < within(1.0)
        assert "aborted" in done[0].error.message
    finally:
        prefill.close()


def test_a_replaced_decode_group_is_recognised_by_its_incarnation() -> None:
    g = geometry(2)
    first, second = DecodeGroup(g, 1, ("tcp",), incarnation=1), DecodeGroup(g, 1, ("tcp",), incarnation=2)
    prefill = PrefillGroup(g, 1, TOKENS, "tcp")
    with joined(prefill, first):
        stale = first.reserve(1, TOKENS)
        stale.ranks[0].endpoints[0].detail = second.receivers[0].endpoints()[0].detail  # the port is another process's by now
        auth.sign(stale, KEY)
        prefill.begin(stale)
        push_all(prefill, 1, 99, lambda: None)
        error = prefill.finish(1)[0].error
        assert isinstance(error, PeerLost)
        assert "replaced" in error.message
        assert second.receivers[0].counts().get("ok", 0) == 0
        second.close()
