"""The decode leader's ledger: no block is free while someone may write, each reservation ends once, whatever the order of messages."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import KVTransferError, PeerLost, TransferTimeout
from common.proto import types_pb2, worker_pb2
from kv_transfer.ledger import Action, AdmitSequence, FailRequest, FenceWriter, ReleaseBlocks, TransferLedger, TransferState

INCARNATION = 0xDEC0DE
LEASE_S = 10.0


def writer(incarnation: int = 1, num_ranks: int = 2) -> types_pb2.GroupDescription:
    ranks = [types_pb2.ProcessIdentity(host="h", pid=100 * incarnation + i, start_ticks=1) for i in range(num_ranks)]
    return types_pb2.GroupDescription(group=f"p{incarnation}", incarnation=incarnation, address=f"10.0.0.{incarnation}:1", ranks=ranks)


def commit(transfer_id: int, incarnation: int = INCARNATION) -> worker_pb2.CommitRequest:
    return worker_pb2.CommitRequest(transfer_id=transfer_id, incarnation=incarnation)


@pytest.fixture
def ledger() -> TransferLedger:
    ledger = TransferLedger(INCARNATION)
    ledger.reserve(7, "a", writer(), LEASE_S, now=0.0)
    return ledger


def test_a_good_commit_hands_the_blocks_to_the_sequence(ledger: TransferLedger) -> None:
    assert ledger.begin_commit(commit(7), 1.0)
    assert ledger.state(7) is TransferState.VERIFYING
    assert ledger.end_commit(7, None) == [AdmitSequence(7, "a")]
    assert ledger.state(7) is TransferState.COMMITTED
    assert ledger.num_open == 0


def test_a_repeated_commit_is_answered_as_before(ledger: TransferLedger) -> None:
    ledger.begin_commit(commit(7), 1.0)
    with pytest.raises(KVTransferError, match="verifying"):
        ledger.begin_commit(commit(7), 1.0)
    ledger.end_commit(7, None)
    assert not ledger.begin_commit(commit(7), 2.0)
    assert ledger.end_commit(7, None) == []


@pytest.mark.parametrize(("handover_bytes", "for_s"), [(0, LEASE_S), (500_000_000, LEASE_S + 10)], ids=["a short prompt", "a long one"])
def test_a_commit_is_answered_again_for_as_long_as_its_writer_may_ask(ledger: TransferLedger, handover_bytes: int, for_s: float) -> None:
    ledger.begin_commit(commit(7), 1.0, handover_bytes)
    ledger.end_commit(7, None)
    ledger.expire(1.0 + for_s + 2.0)
    assert not ledger.begin_commit(commit(7), 1.0 + for_s + 2.0)
    ledger.expire(1.0 + for_s + 6.0)
    assert ledger.num_committed == 0
    with pytest.raises(KVTransferError, match="free and can't be committed"):  # a writer that has long given up hears it
        ledger.begin_commit(commit(7), 1.0 + for_s + 6.0)


def test_of_thousands_of_commits_only_the_latest_are_remembered() -> None:
    ledger = TransferLedger(INCARNATION)
    for n in range(1, 5001):
        now = n / 20
        ledger.reserve(n, f"r{n}", writer(), LEASE_S, now)
        ledger.begin_commit(commit(n), now)
        ledger.end_commit(n, None)
        assert ledger.num_committed <= 20 * (LEASE_S + 5) + 2


def test_a_failed_commit_frees_at_once_because_the_writer_has_stopped(ledger: TransferLedger) -> None:
    ledger.begin_commit(commit(7), 1.0)
    error = KVTransferError("digest differs")
    assert ledger.end_commit(7, error) == [ReleaseBlocks(7), FailRequest("a", error)]
    with pytest.raises(KVTransferError, match="can't be committed"):
        ledger.begin_commit(commit(7), 2.0)


def test_a_commit_for_an_earlier_incarnation_is_refused(ledger: TransferLedger) -> None:
    with pytest.raises(PeerLost, match="incarnation"):
        ledger.begin_commit(commit(7, incarnation=1), 1.0)
    assert ledger.state(7) is TransferState.RESERVED


def test_an_abort_holds_the_blocks_until_the_writer_has_confirmed(ledger: TransferLedger) -> None:
    assert ledger.abort("a", 1.0) == [FenceWriter(7, "10.0.0.1:1")]
    assert ledger.abort("a", 1.1) == []
    assert ledger.renew([7], 1.2) == [7]
    assert ledger.expire(1.3) == []
    assert ledger.expire(1.6) == [FenceWriter(7, "10.0.0.1:1")]  # no answer so far: asked again
    assert ledger.confirm_stopped(7) == [ReleaseBlocks(7)]
    assert ledger.confirm_stopped(7) == []


def test_nothing_is_granted_to_a_writer_that_is_known_dead(ledger: TransferLedger) -> None:
    ledger.reserve(8, "b", writer(2), LEASE_S, now=0.0)
    ledger.abort("a", 1.0)
    assert ledger.writer_died(1) == [ReleaseBlocks(7)]
    assert ledger.writer_died(1) == []
    with pytest.raises(PeerLost, match="p1 is dead"):
        ledger.reserve(9, "c", writer(1), LEASE_S, now=2.0)
    ledger.reserve(9, "c", writer(2), LEASE_S, now=2.0)
    assert [type(action) for action in ledger.writer_died(2)] == [FailRequest, ReleaseBlocks, FailRequest, ReleaseBlocks]


def test_a_lease_that_runs_out_fails_the_request_and_fences(ledger: TransferLedger) -> None:
    assert ledger.renew([7], 9.0) == []
    assert ledger.expire(18.9) == []
    fence, failure = ledger.expire(19.1)
    assert fence == FenceWriter(7, "10.0.0.1:1")
    assert isinstance(failure, FailRequest)
    assert isinstance(failure.error, TransferTimeout)
    assert ledger.abandon(7) == [ReleaseBlocks(7)]


def test_silence_is_no_proof_of_death_but_every_process_gone_is(ledger: TransferLedger) -> None:
    ledger.expire(11.0)
    for now in range(12, 100):
        assert ledger.expire(float(now)) == [FenceWriter(7, "10.0.0.1:1")]
    assert ledger.sweep_dead(lambda process: process.pid == 100) == []  # one of two ranks lives
    assert ledger.sweep_dead(lambda process: True) == [ReleaseBlocks(7)]


def test_a_writer_that_lists_no_process_is_never_dead() -> None:
    ledger = TransferLedger(INCARNATION)
    ledger.reserve(7, "a", writer(num_ranks=0), LEASE_S, now=0.0)
    assert ledger.sweep_dead(lambda process: True) == []


def test_a_dead_writer_fails_its_reservations_and_no_others(ledger: TransferLedger) -> None:
    ledger.reserve(8, "b", writer(2), LEASE_S, now=0.0)
    failure, release = ledger.writer_died(1)
    assert isinstance(failure, FailRequest)
    assert isinstance(failure.error, PeerLost)
    assert release == ReleaseBlocks(7)
    assert ledger.state(8) is TransferState.RESERVED


@pytest.mark.parametrize("end", ["abort", "abandon"])
def test_a_request_given_up_while_verifying_is_not_admitted(ledger: TransferLedger, end: str) -> None:
    ledger.begin_commit(commit(7), 1.0)
    assert (ledger.abort("a", 1.0) if end == "abort" else ledger.abandon(7)) == []
    assert ledger.end_commit(7, None) == [ReleaseBlocks(7)]


@pytest.mark.parametrize("internal_id", ["", "None", "x" * 1_000_000], ids=["empty", "None", "1MB"])
def test_an_id_in_use_is_refused_and_the_first_owner_keeps_its_blocks(internal_id: str) -> None:
    ledger = TransferLedger(INCARNATION)
    ledger.reserve(1, internal_id, writer(), LEASE_S, 0.0)
    with pytest.raises(KVTransferError, match="already"):
        ledger.reserve(2, internal_id, writer(), LEASE_S, 0.0)
    with pytest.raises(KVTransferError, match="exists"):
        ledger.reserve(1, "other", writer(), LEASE_S, 0.0)
    assert ledger.num_open == 1
    ledger.abort(internal_id, 1.0)
    with pytest.raises(KVTransferError, match="already"):  # its first writer may still write
        ledger.reserve(2, internal_id, writer(), LEASE_S, 1.0)
    assert ledger.confirm_stopped(1) == [ReleaseBlocks(1)]
    ledger.reserve(2, internal_id, writer(), LEASE_S, 2.0)
    assert ledger.abandon(2) == [ReleaseBlocks(2)]


class LossyWorld(RuleBasedStateMachine):
    """A ledger, three writers and a network that loses, repeats and reorders. `may_write` is the truth about each transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = TransferLedger(INCARNATION)
        self.now = 0.0
        self.may_write: dict[int, bool] = {}
        self.writer_of: dict[int, int] = {}
        self.alive = {1: True, 2: True, 3: True}
        self.messages: list[tuple[str, int]] = []
        self.ends: dict[int, str] = {}
        self.failures: dict[str, int] = {}

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, ReleaseBlocks | AdmitSequence):
                assert not self.may_write[action.transfer_id], "blocks change hands while their writer may write"
                assert action.transfer_id not in self.ends, "a reservation ended twice"
                self.ends[action.transfer_id] = type(action).__name__
            elif isinstance(action, FailRequest):
                self.failures[action.internal_id] = self.failures.get(action.internal_id, 0) + 1
            else:
                self.messages.append(("fence", action.transfer_id))

    def stop(self, transfer_id: int) -> bool:
        if self.alive[self.writer_of[transfer_id]]:
            self.may_write[transfer_id] = False
            return True
        return False

    @rule(who=st.integers(1, 3))
    def reserve(self, who: int) -> None:
        if not self.alive[who]:
            return
        transfer_id = len(self.may_write) + 1
        self.ledger.reserve(transfer_id, f"r{transfer_id}", writer(who), LEASE_S, self.now)
        self.may_write[transfer_id], self.writer_of[transfer_id] = True, who

    @precondition(lambda self: self.may_write)
    @rule(data=st.data(), kind=st.sampled_from(["commit", "abandon", "renew"]))
    def writer_sends(self, data: st.DataObject, kind: str) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.may_write)))
        if kind == "renew" or self.stop(transfer_id):
            self.messages.append((kind, transfer_id))

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        message = data.draw(st.sampled_from(self.messages))
        if not keep:
            self.messages.remove(message)
        self.receive(*message)

    def receive(self, kind: str, transfer_id: int) -> None:
        if kind == "commit":
            try:
                self.ledger.begin_commit(commit(transfer_id), self.now)
            except KVTransferError:
                self.messages.append(("abandon", transfer_id))
        elif kind == "fence":
            if self.stop(transfer_id):
                self.messages.append(("stopped", transfer_id))
        elif kind == "stopped":
            self.act(self.ledger.confirm_stopped(transfer_id))
        elif kind == "abandon":
            self.act(self.ledger.abandon(transfer_id))
        else:
            self.ledger.renew([transfer_id], self.now)

    @precondition(lambda self: self.may_write)
    @rule(data=st.data(), is_good=st.booleans())
    def verified(self, data: st.DataObject, is_good: bool) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.may_write)))
        self.act(self.ledger.end_commit(transfer_id, None if is_good else KVTransferError("digest")))

    @precondition(lambda self: self.may_write)
    @rule(data=st.data())
    def router_aborts(self, data: st.DataObject) -> None:
        self.act(self.ledger.abort(f"r{data.draw(st.sampled_from(sorted(self.may_write)))}", self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.ledger.expire(self.now))

    @rule(who=st.integers(1, 3))
    def writer_dies(self, who: int) -> None:
        self.alive[who] = False
        for transfer_id, owner in self.writer_of.items():
            if owner == who:
                self.may_write[transfer_id] = False

    @rule()
    def dead_are_noticed(self) -> None:
        self.act(self.ledger.sweep_dead(lambda process: not self.alive[process.pid // 100]))

    @invariant()
    def at_most_one_failure_each(self) -> None:
        assert all(count == 1 for count in self.failures.values())

    def teardown(self) -> None:
        """The network heals: every lease runs out, every fence is answered or its writer is known dead."""
        for transfer_id in self.may_write:
            if self.ledger.state(transfer_id) is TransferState.VERIFYING:
                self.act(self.ledger.end_commit(transfer_id, None))
        self.now += 100.0
        self.act(self.ledger.expire(self.now))
        for message in list(self.messages):
            self.receive(*message)
        for message in list(self.messages):
            self.receive(*message)
        self.dead_are_noticed()
        for transfer_id in self.may_write:
            self.act(self.ledger.end_commit(transfer_id, None))
        assert self.ledger.num_open == 0
        assert sorted(self.ends) == sorted(self.may_write)


LossyWorld.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, database=None)
test_no_block_is_free_while_someone_may_write_and_each_reservation_ends_once = LossyWorld.TestCase
