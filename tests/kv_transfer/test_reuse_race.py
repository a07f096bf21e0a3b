"""The next request wants the blocks of an aborted one whose writer is still at it: nobody ever gets the wrong bytes."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter

import pytest

from common.errors import CapacityError, KVTransferError, ServingError
from common.proto import types_pb2, worker_pb2
from kernels.digest import MASK
from kv_transfer.deadline import Deadline
from kv_transfer.ledger import AdmitSequence, FenceWriter, ReleaseBlocks, TransferLedger
from kv_transfer.push import Push
from kv_transfer.transports.base import DeviceLink, Link
from kv_transfer.transports.choose import LinkOpener
from tests.support.kv_groups import DecodeGroup, PrefillGroup, assert_handed_over, geometry, joined, received
from tests.support.pace import within

WRITER = types_pb2.GroupDescription(incarnation=4, address="prefill", ranks=[types_pb2.ProcessIdentity(host="elsewhere", pid=1)])


class LateLink:
    """A link whose writes come late, and heed no deadline once they are under way."""

    def __init__(self, link: Link, wait):
        self._link = link
        self._wait = wait
        self.transport = link.transport

    def write(self, push: Push, deadline: Deadline) -> None:
        self._wait()
        self._link.write(push, Deadline(60.0))

    def flush(self, deadline: Deadline) -> None:
        self._link.flush(deadline)

    def is_lost(self) -> bool:
        return self._link.is_lost()

    def settle(self) -> bool:
        return self._link.settle()

    def close(self) -> None:
        self._link.close()


class LateDeviceLink(LateLink):
    """The same for a link that gathers what it writes."""

    _link: DeviceLink

    def submit(self) -> None:
        self._link.submit()

    def take_digest(self) -> int:
        return self._link.take_digest()


def make_late(monkeypatch: pytest.MonkeyPatch, wait) -> None:
    real_open = LinkOpener.open

    def late_open(self: LinkOpener, *args) -> LateLink:
        link = real_open(self, *args)
        return LateDeviceLink(link, wait) if isinstance(link, DeviceLink) else LateLink(link, wait)

    monkeypatch.setattr(LinkOpener, "open", late_open)


def test_blocks_are_held_while_a_one_sided_write_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, arrived = threading.Event(), threading.Event()
    make_late(monkeypatch, lambda: (arrived.set(), gate.wait()))
    g = geometry(2)
    decode = DecodeGroup(g, 1, ("shm",), num_blocks=(5, 9))
    a, b = PrefillGroup(g, 1, 80, "shm", seed=1), PrefillGroup(g, 1, 80, "shm", seed=2)
    ledger = TransferLedger(decode.incarnation)
    ledger.reserve(1, "a", WRITER, 10.0, 0.0)
    with joined(a, decode):
        a.begin(decode.reserve(1, 80))
        a.push_chunk(1, 0, 80)
        assert arrived.wait(within(5.0))
        assert ledger.abort("a", 1.0) == [FenceWriter(1, "prefill")]
        stopped = threading.Event()
        a.senders[0].abort(1, stopped.set)
        assert not stopped.wait(0.3), "stopped although its write is under way"
        with pytest.raises(CapacityError):  # B finds no room rather than A's blocks
            decode.pools[0].allocate(5, "b")
        gate.set()
        assert stopped.wait(within(5.0))
        assert ledger.confirm_stopped(1) == [ReleaseBlocks(1)]
        decode.release(1)
        for view in decode.views:
            view.full.fill_(float("nan"))
            view.sliding.fill_(float("nan"))
        b.begin(decode.reserve(2, 80))
        b.push_chunk(2, 0, 80)
        assert b.finish(2)[0].error is None
        assert_handed_over(b, decode, 2)
    b.close()


def test_a_late_checked_write_is_refused_after_its_blocks_went_to_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, arrived, is_late = threading.Event(), threading.Event(), [True]
    make_late(monkeypatch, lambda: is_late[0] and (arrived.set(), gate.wait()))
    g = geometry(2)
    decode = DecodeGroup(g, 1, ("tcp",), num_blocks=(5, 9))
    a, b = PrefillGroup(g, 1, 80, "tcp", seed=1), PrefillGroup(g, 1, 80, "tcp", seed=2)
    with joined(a, decode):
        a.begin(decode.reserve(1, 80))
        a.push_chunk(1, 0, 80)
        assert arrived.wait(within(5.0))
        is_late[0] = False
        assert decode.receivers[0].is_fenced(1)
        decode.release(1)
        b.begin(decode.reserve(2, 80))
        b.push_chunk(2, 0, 80)
        assert b.finish(2)[0].error is None
        gate.set()
        error = a.finish(1)[0].error
        assert isinstance(error, KVTransferError)
        assert "revoked" in error.message
        assert_handed_over(b, decode, 2)
        assert decode.receivers[0].counts()["unknown_transfer"] >= 1
    b.close()


class Cluster:
    """A decode group with few blocks, its ledger, and prefill groups that work at the same time."""

    def __init__(self, transport: str, seed: int):
        g = geometry(2, window_tokens=32)
        self.rng = random.Random(seed)
        self.lock = threading.RLock()
        self.decode = DecodeGroup(g, 2, (transport,), num_blocks=(24, 12))
        self.ledger = TransferLedger(self.decode.incarnation, fence_retry_s=0.01)
        self.prefills = [PrefillGroup(g, tp, tokens, transport, seed=tp) for tp, tokens in ((1, 65), (2, 48), (1, 100), (2, 17))]
        self.writer_of: dict[int, PrefillGroup] = {}
        self.doomed: list[int] = []  # have a short lease and may be aborted; the others have all the time they need
        self.fenced: set[int] = set()
        self.outcome: Counter[str] = Counter()

    def act(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, ReleaseBlocks):
                self.decode.release(action.transfer_id)
                self.outcome["released"] += 1
            elif isinstance(action, AdmitSequence):
                self.outcome["admitted"] += 1
                self.decode.release(action.transfer_id)
            elif isinstance(action, FenceWriter):
                self.fence(action.transfer_id)

    def fence(self, transfer_id: int) -> None:
        for receiver in self.decode.receivers:
            receiver.revoke(transfer_id)
        if all(receiver.is_fenced(transfer_id) for receiver in self.decode.receivers):
            self.act(self.ledger.confirm_stopped(transfer_id))
        if transfer_id in self.fenced:
            return
        self.fenced.add(transfer_id)
        prefill = self.writer_of[transfer_id]
        left = [len(prefill.senders)]

        def on_stopped() -> None:
            with self.lock:
                left[0] -= 1
                if not left[0]:
                    self.act(self.ledger.confirm_stopped(transfer_id))

        for sender in prefill.senders:
            sender.abort(transfer_id, on_stopped)

    def hand_over(self, prefill: PrefillGroup, transfer_id: int) -> None:
        while True:
            with self.lock, contextlib.suppress(CapacityError):
                self.decode.pools[1].check()
                if min(pool.num_free for pool in self.decode.pools) >= 7:
                    reservation = self.decode.reserve(transfer_id, prefill.num_tokens)
                    is_doomed = self.rng.random() < 0.5
                    if is_doomed:
                        self.doomed.append(transfer_id)
                    lease_s = 0.05 if is_doomed else 60.0
                    self.ledger.reserve(transfer_id, f"r{transfer_id}", WRITER, lease_s, time.monotonic())
                    self.writer_of[transfer_id] = prefill
                    prefill.begin(reservation)  # before any abort: that is the writer ledger's and the ordered plans' part
                    break
            time.sleep(0.002)
        for start in range(0, prefill.num_tokens, 40):
            prefill.push_chunk(transfer_id, start, min(start + 40, prefill.num_tokens))
        try:
            results = prefill.finish(transfer_id)
        except KVTransferError:  # aborted and over
            return
        error = next((result.error for result in results if result.error), None)
        with self.lock:
            if error is not None:
                self.act(self.ledger.abandon(transfer_id))
            else:
                self.commit(prefill, transfer_id, results)

    def commit(self, prefill: PrefillGroup, transfer_id: int, results: list) -> None:
        try:
            self.ledger.begin_commit(worker_pb2.CommitRequest(transfer_id=transfer_id, incarnation=self.decode.incarnation), 0.0)
        except ServingError:
            return  # too late: it was given up
        for rank, receiver in enumerate(self.decode.receivers):
            digest = sum(result.digest_per_rank[rank] for result in results) & MASK
            assert receiver.verify(transfer_id).digest == digest, "wrong bytes under a grant"
        assert_handed_over_bytes(prefill, self.decode, transfer_id)
        self.act(self.ledger.end_commit(transfer_id, None))


def assert_handed_over_bytes(prefill: PrefillGroup, decode: DecodeGroup, transfer_id: int) -> None:
    g, n = prefill.geometry, prefill.num_tokens
    for rank, view in enumerate(decode.views):
        for layer, slides in enumerate(g.sliding):
            first, _ = g.handover_blocks(n, sliding=slides)
            heads = slice(view.heads.start, view.heads.start + view.heads.count)
            assert received(decode, transfer_id, rank, layer, n).equal(prefill.kv[layer][:, heads, first * g.block_size_tokens :])


@pytest.mark.parametrize(
    ("transport", "victims"),
    [
        ("shm", 100),
        ("tcp", 100),
        ("cuda_ipc", 100),
        pytest.param("shm", 500, marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param("tcp", 500, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_many_requests_share_few_blocks_with_late_writers_and_short_leases(
    monkeypatch: pytest.MonkeyPatch, transport: str, victims: int
) -> None:
    delays = random.Random(8)
    make_late(monkeypatch, lambda: time.sleep(delays.choice((0.0, 0.0, 0.0, 0.002, 0.02))))
    cluster = Cluster(transport, seed=1)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for i in range(victims // 4):
                cluster.hand_over(cluster.prefills[index], 1 + index + 4 * i)
        except Exception as exc:  # noqa: BLE001 handed to the test's thread
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with cluster.lock:
            cluster.act(cluster.ledger.expire(time.monotonic()))
            if cluster.rng.random() < 0.2 and cluster.doomed:
                victim = cluster.rng.choice(cluster.doomed[-2:])
                cluster.act(cluster.ledger.abort(f"r{victim}", time.monotonic()))
        time.sleep(0.003)
    give_up = time.monotonic() + 5.0
    while cluster.ledger.num_open and time.monotonic() < give_up:
        with cluster.lock:
            cluster.act(cluster.ledger.expire(time.monotonic() + 1.0))
        time.sleep(0.01)
    assert errors == []
    assert cluster.outcome["admitted"] + cluster.outcome["released"] == victims
    assert cluster.outcome["admitted"] > 0
    assert cluster.outcome["released"] > 0
    for pool in cluster.decode.pools:
        pool.check()
        assert pool.num_free == pool.num_blocks
    for prefill in cluster.prefills:
        prefill.close()
    cluster.decode.close()
