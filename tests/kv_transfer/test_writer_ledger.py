"""The prefill leader's ledger: what it promises holds, each transfer is committed or abandoned once, errors are told once and at once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from common.errors import KVTransferError
from common.proto import worker_pb2
from kv_transfer.transfer_id import TICK_S, TransferIds
from kv_transfer.writer_ledger import Action, PushFailed, Renewal, SendAbandon, SendCommit, StopRanks, WriterLedger


def reservation(transfer_id: int = 7, address: str = "10.0.0.9:1") -> worker_pb2.Reservation:
    return worker_pb2.Reservation(
        internal_id=f"r{transfer_id}", transfer_id=transfer_id, incarnation=5, decode_address=address, lease_ms=9000
    )


LEASE_S = 9.0


def report(rank: int, transfer_id: int = 7, error: str = "") -> worker_pb2.PushReport:
    fields = {"error": error, "error_status": "UNAVAILABLE"} if error else {"bytes_per_rank": [10, 0], "digest_per_rank": [2**63, rank]}
    return worker_pb2.PushReport(transfer_id=transfer_id, rank=rank, **fields)


@pytest.fixture
def ledger() -> WriterLedger:
    ledger = WriterLedger(num_ranks=2)
    ledger.accept(reservation(), 0.0)
    return ledger


def test_the_commit_carries_the_sums_of_all_ranks(ledger: WriterLedger) -> None:
    ledger.start(7)
    assert ledger.report(report(1)) == []
    assert ledger.report(report(1)) == []
    assert ledger.report(report(0)) == [SendCommit(reservation(), (20, 0), (0, 1))]
    assert ledger.fence(7, 1.0) == (True, [])  # nothing is written any more; the commit may still win
    ledger.ended(7, 1.0)
    assert ledger.num_open == 0


def test_only_the_first_report_of_a_rank_counts(ledger: WriterLedger) -> None:
    ledger.start(7)
    ledger.report(report(1))
    assert ledger.report(report(1, error="aborted")) == []
    assert ledger.report(report(0)) == [SendCommit(reservation(), (20, 0), (0, 1))]


def test_the_first_error_fails_the_request_at_once_and_the_last_report_abandons(ledger: WriterLedger) -> None:
    ledger.start(7)
    assert ledger.report(report(0, error="lost")) == [PushFailed("r7", "lost", "UNAVAILABLE"), StopRanks(7)]
    assert ledger.fence(7, 1.0) == (False, [])
    assert ledger.report(report(1, error="aborted")) == [SendAbandon(reservation(), "lost")]
    assert ledger.fence(7, 1.0) == (True, [])


def test_a_stop_waits_for_every_rank(ledger: WriterLedger) -> None:
    ledger.start(7)
    assert ledger.stop(7, "cancelled") == [StopRanks(7)]
    assert ledger.stop(7, "cancelled") == []
    assert ledger.report(report(0)) == []
    assert ledger.report(report(1, error="aborted")) == [SendAbandon(reservation(), "cancelled")]


def test_a_task_that_has_not_begun_stops_at_once(ledger: WriterLedger) -> None:
    assert ledger.stop(7, "deadline") == [SendAbandon(reservation(), "deadline")]
    with pytest.raises(KVTransferError, match="given up"):
        ledger.start(7)


def test_a_fence_for_an_unknown_id_is_a_promise() -> None:
    ledger = WriterLedger(num_ranks=1, promise_s=100.0)
    assert ledger.fence(7, 0.0) == (True, [])
    with pytest.raises(KVTransferError, match="given up"):  # the task overtaken by its own fence
        ledger.accept(reservation(), 1.0)
    ledger.due_renewals(101.0)
    ledger.accept(reservation(), 101.0)


def test_an_id_is_not_accepted_twice_nor_after_its_end(ledger: WriterLedger) -> None:
    with pytest.raises(KVTransferError, match="here already"):
        ledger.accept(reservation(), 0.0)
    ledger.stop(7, "x")
    ledger.ended(7, 1.0)
    with pytest.raises(KVTransferError, match="given up"):
        ledger.accept(reservation(), 2.0)


def test_leases_are_renewed_each_third_in_one_message_per_decode_group(ledger: WriterLedger) -> None:
    ledger.accept(reservation(8), 0.0)
    ledger.accept(reservation(9, "10.0.0.8:1"), 0.0)
    assert ledger.due_renewals(2.9) == []
    assert ledger.due_renewals(3.0) == [Renewal("10.0.0.9:1", 5, (7, 8)), Renewal("10.0.0.8:1", 5, (9,))]
    assert ledger.due_renewals(5.9) == []


def test_what_the_decode_group_does_not_know_is_stopped_and_fails(ledger: WriterLedger) -> None:
    ledger.start(7)
    failed, stop = ledger.renewed([7, 99], 1.0)
    assert isinstance(failed, PushFailed)
    assert stop == StopRanks(7)
    assert ledger.renewed([7], 2.0) == []


def test_ended_ids_stay_refused_for_ever_and_are_remembered_for_about_a_lease() -> None:
    ledger, ids = WriterLedger(num_ranks=1), TransferIds(0.0)
    ended = []
    for n in range(2000):  # 20 a second
        now = n / 20
        ended.append(ids.make(now))
        ledger.accept(reservation(ended[-1]), now)
        ledger.stop(ended[-1], "x")
        ledger.ended(ended[-1], now)
        ledger.due_renewals(now)
        assert ledger.num_remembered <= 20 * (LEASE_S + 2 * TICK_S) + 1
    for now in (100.0, 109.2, 110.0, 1e6):
        ledger.due_renewals(now)
        for transfer_id in ended:
            with pytest.raises(KVTransferError, match="given up"):
                ledger.accept(reservation(transfer_id), now)
    assert ledger.num_remembered == 0


def test_of_a_thousand_decode_groups_that_came_and_went_little_is_left() -> None:
    ledger = WriterLedger(num_ranks=1)
    for incarnation in range(1, 3001):
        now = 20.0 * incarnation
        message = reservation(TransferIds(0.0).make(5.0))
        message.incarnation = incarnation
        ledger.accept(message, now)
        ledger.stop(message.transfer_id, "x")
        ledger.ended(message.transfer_id, now)
        ledger.due_renewals(now)
        assert ledger.num_remembered <= 2
    assert len(ledger._horizons) == 1024


@pytest.mark.parametrize("silence_s", [3600.0, 86400.0 * 30], ids=["an hour", "a month"])
@pytest.mark.parametrize("drift", [-1e-4, 1e-4], ids=["slower", "faster"])
def test_clocks_that_drift_apart_over_a_long_silence_refuse_nothing_fresh(silence_s: float, drift: float) -> None:
    ledger, ids = WriterLedger(num_ranks=1), TransferIds(0.0)
    ledger.accept(reservation(ids.make(1.0)), 1.0)
    ledger.accept(reservation(ids.make(silence_s * (1 + drift))), silence_s)


class Group(RuleBasedStateMachine):
    """A ledger and two ranks. `writing` is the truth about each rank and transfer; reports may be lost for a while and repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = WriterLedger(num_ranks=2)
        self.now = 0.0
        self.ids: list[int] = []
        self.started: set[int] = set()
        self.writing: set[tuple[int, int]] = set()
        self.promised: set[int] = set()
        self.reports: list[worker_pb2.PushReport] = []
        self.ends: dict[int, str] = {}
        self.failed: list[str] = []

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendCommit | SendAbandon):
                transfer_id = action.reservation.transfer_id
                assert not any(owner == transfer_id for owner, _ in self.writing), "a commit or abandon while a rank writes"
                assert transfer_id not in self.ends
                self.ends[transfer_id] = type(action).__name__
            elif isinstance(action, StopRanks):
                for rank in range(2):
                    self.rank_ends(action.transfer_id, rank, "aborted")
            else:
                assert action.internal_id not in self.failed, "a failure was told twice"
                self.failed.append(action.internal_id)

    def rank_ends(self, transfer_id: int, rank: int, error: str) -> None:
        if (transfer_id, rank) in self.writing:
            self.writing.remove((transfer_id, rank))
            self.reports.append(report(rank, transfer_id, error))

    @rule()
    def accept(self) -> None:
        transfer_id = len(self.ids) + 1
        self.ids.append(transfer_id)
        if transfer_id in self.promised:
            with pytest.raises(KVTransferError):
                self.ledger.accept(reservation(transfer_id), self.now)
            self.ends[transfer_id] = "refused"
        else:
            self.ledger.accept(reservation(transfer_id), self.now)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(self.ids))
        try:
            self.ledger.start(transfer_id)
        except KVTransferError:
            return
        assert transfer_id not in self.promised, "a rank would write although a fence was answered"
        self.writing |= {(transfer_id, 0), (transfer_id, 1)}

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), error=st.sampled_from(["", "", "lost"]))
    def a_rank_ends(self, data: st.DataObject, error: str) -> None:
        self.rank_ends(*data.draw(st.sampled_from(sorted(self.writing))), error)

    @precondition(lambda self: self.reports)
    @rule(data=st.data())
    def deliver_report(self, data: st.DataObject) -> None:
        self.act(self.ledger.report(data.draw(st.sampled_from(self.reports))))

    @rule(transfer_id=st.integers(1, 12))
    def fence(self, transfer_id: int) -> None:
        stopped, actions = self.ledger.fence(transfer_id, self.now)
        self.act(actions)
        if stopped:
            assert not any(owner == transfer_id for owner, _ in self.writing), "a promise was broken"
            self.promised.add(transfer_id)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.act(self.ledger.stop(data.draw(st.sampled_from(self.ids)), "cancelled"))

    @precondition(lambda self: self.ends)
    @rule(data=st.data())
    def answered(self, data: st.DataObject) -> None:
        self.ledger.ended(data.draw(st.sampled_from(sorted(self.ends))), self.now)

    def teardown(self) -> None:
        for transfer_id in self.ids:
            self.act(self.ledger.stop(transfer_id, "shut down"))
        for message in list(self.reports):
            self.act(self.ledger.report(message))
        for transfer_id, rank in sorted(self.writing):
            self.rank_ends(transfer_id, rank, "")
        for message in list(self.reports):
            self.act(self.ledger.report(message))
        assert sorted(self.ends) == self.ids
        for transfer_id in self.ids:
            self.ledger.ended(transfer_id, self.now)
        assert self.ledger.num_open == 0


Group.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, database=None)
test_promises_hold_and_each_transfer_ends_once = Group.TestCase


class LateTasks(RuleBasedStateMachine):
    """Decode groups issue reservations on clocks of their own; routers hand them over late, out of order, twice, or hours later; decode
    groups fence what they gave up. Nothing may be accepted twice or after a promise, and nothing fresh may be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = WriterLedger(num_ranks=2, promise_s=1e9)  # one about an id that never came is kept by time, whatever else holds
        self.now = 1000.0
        self.offset_s = {5: -990.0, 6: 250.0, 7: 0.0}  # of each decode group's clock
        self.ids = {incarnation: TransferIds(self.clock(incarnation)) for incarnation in self.offset_s}
        self.issued: list[tuple[worker_pb2.Reservation, float]] = []
        self.accepted: set[int] = set()
        self.promised: set[int] = set()

    def clock(self, incarnation: int) -> float:
        return self.now + self.offset_s[incarnation]

    @rule(incarnation=st.sampled_from([5, 6, 7]))
    def issue(self, incarnation: int) -> None:
        message = reservation(self.ids[incarnation].make(self.clock(incarnation)))
        message.incarnation = incarnation
        self.issued.append((message, self.now))

    @precondition(lambda self: self.issued)
    @rule(data=st.data())
    def task_comes(self, data: st.DataObject) -> None:
        message, issued_at = data.draw(st.sampled_from(self.issued))
        transfer_id = message.transfer_id
        try:
            self.ledger.accept(message, self.now)
        except KVTransferError:
            is_over = self.now - issued_at > LEASE_S
            assert transfer_id in self.accepted or transfer_id in self.promised or is_over, "a fresh task was refused"
            return
        assert transfer_id not in self.accepted, "a task was accepted twice"
        assert transfer_id not in self.promised, "a task was accepted after a promise"
        self.accepted.add(transfer_id)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.accepted)))
        self.ledger.stop(transfer_id, "x")
        self.ledger.ended(transfer_id, self.now)

    @precondition(lambda self: self.issued)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(self.issued))[0].transfer_id
        if self.ledger.fence(transfer_id, self.now)[0]:
            self.promised.add(transfer_id)

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 8.8, 9.3, 20.0, 3000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.due_renewals(self.now)
        if seconds > LEASE_S + TICK_S:
            assert not self.ledger._ended, "ids are remembered though their horizon has passed"


LateTasks.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None, database=None)
test_late_and_replayed_tasks_are_refused_and_fresh_ones_are_not = LateTasks.TestCase
