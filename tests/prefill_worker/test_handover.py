"""Hand-overs at the prefill leader, with decode peers and ranks played by the test: lost, late, double and forged messages."""

import asyncio
import random

import pytest

from common.errors import KVTransferError, PeerLost, RemoteError, ServingError
from common.proto import worker_pb2
from kv_transfer.writer_ledger import WriterLedger
from prefill_worker.call import PrefillCall
from prefill_worker.engine import Cancel, Command, Release, StopPush
from prefill_worker.handover import Handovers
from prefill_worker.job import FirstToken
from prefill_worker.metrics import PrefillMetrics
from tests.support.pace import within

NUM_RANKS = 2


class FakePeers:
    """A decode leader that answers as told. `silent`: calls that get no answer before one does."""

    def __init__(self):
        self.commits: list[worker_pb2.CommitRequest] = []
        self.abandons: list[int] = []
        self.silent = 0
        self.refuse: ServingError | None = None
        self.unknown: list[int] = []

    async def commit(self, address: str, request: worker_pb2.CommitRequest) -> None:
        await self._answer()
        self.commits.append(request)

    async def abandon(self, address: str, request: worker_pb2.AbandonRequest) -> None:
        await self._answer()
        self.abandons.append(request.transfer_id)

    async def renew(self, address: str, request: worker_pb2.RenewRequest) -> worker_pb2.RenewReply:
        return worker_pb2.RenewReply(unknown_ids=[i for i in request.transfer_ids if i in self.unknown])

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.silent:
            self.silent -= 1
            raise PeerLost("no answer")
        if self.refuse:
            raise self.refuse


class Bench:
    """Hand-overs, their peers, and the commands that the engine would get."""

    def __init__(self, settle_s: float = 0.3):
        self.peers = FakePeers()
        self.commands: list[Command] = []
        self.handovers = Handovers(WriterLedger(NUM_RANKS), self.peers, self.commands.append, PrefillMetrics("p"))
        self.settle_s = settle_s

    def open(self, transfer_id: int, *, begin: bool = True) -> PrefillCall:
        reservation = worker_pb2.Reservation(internal_id=f"r{transfer_id}", transfer_id=transfer_id, incarnation=7, lease_ms=300)
        call = PrefillCall(f"r{transfer_id}", reservation, self.handovers, self.commands.append, self.settle_s)
        self.handovers.accept(reservation, call)
        if begin:
            assert call.may_begin()
        return call

    def first_token(self, call: PrefillCall, *, finish: bool = False) -> None:
        output = worker_pb2.SequenceOutput(internal_id=call.key, token_ids=[5])
        if finish:
            output.finish.reason = 2
        call.on_first_token(FirstToken(output, 5, None, 0.01, 8))

    def report(self, transfer_id: int, rank: int, error: str = "") -> None:
        report = worker_pb2.PushReport(transfer_id=transfer_id, rank=rank, error=error, error_status="INTERNAL" if error else "")
        if not error:
            report.bytes_per_rank.extend([10 + rank, 20])
            report.digest_per_rank.extend([2**64 - 1, 3])
        self.handovers.report(report)

    def stops(self) -> list[int]:
        return [command.transfer_id for command in self.commands if isinstance(command, StopPush)]

    def released(self) -> list[str]:
        return [command.key for command in self.commands if isinstance(command, Release)]


async def events_of(call: PrefillCall) -> tuple[list[str], ServingError | None]:
    kinds = []
    try:
        async for event in call.events():
            kinds.append(event.WhichOneof("event"))
    except ServingError as exc:
        return kinds, exc
    return kinds, None


@pytest.mark.parametrize("reports_first", [False, True])
async def test_commit_follows_when_all_ranks_and_the_first_token_are_there_in_any_order(reports_first):
    bench = Bench()
    call = bench.open(1)
    if not reports_first:
        bench.first_token(call)
    for rank in range(NUM_RANKS):
        bench.report(1, rank)
    await asyncio.sleep(0.01)
    if reports_first:
        assert not bench.peers.commits
        bench.first_token(call)
    assert await events_of(call) == (["first_token", "handed_over"], None)
    (commit,) = bench.peers.commits
    assert list(commit.bytes_per_rank) == [21, 40]
    assert list(commit.digest_per_rank) == [2**64 - 2, 6]
    assert commit.first_token == 5
    await asyncio.sleep(0.01)
    assert bench.released() == ["r1"]


async def test_lost_reports_fail_typed_at_their_own_deadline_and_the_rest_is_not_slowed():
    """Report P05: the done message of 1 in 50 is dropped; every transfer is over in the end, none is committed twice or too early."""
    bench = Bench(settle_s=0.4)
    rng, calls, lost = random.Random(3), {}, set()
    loop = asyncio.get_running_loop()
    started = loop.time()
    for transfer_id in range(1, 201):
        calls[transfer_id] = bench.open(transfer_id)
        bench.first_token(calls[transfer_id])
        drops = rng.random() < 1 / 50
        for rank in range(NUM_RANKS):
            if drops and rank == transfer_id % NUM_RANKS:
                lost.add(transfer_id)
            else:
                loop.call_later(rng.uniform(0, 0.05), bench.report, transfer_id, rank)
    assert lost
    good = [events_of(call) for transfer_id, call in calls.items() if transfer_id not in lost]
    assert await asyncio.gather(*good) == [(["first_token", "handed_over"], None)] * len(good)
    assert loop.time() - started < 0.35, "transfers with all their reports must not wait for others"
    for transfer_id in lost:
        kinds, error = await events_of(calls[transfer_id])
        assert kinds == ["first_token"]
        assert error.grpc_status == "DEADLINE_EXCEEDED"
    assert sorted(bench.stops()) == sorted(lost)
    for transfer_id in lost:  # the stop makes the ranks speak again
        for rank in range(NUM_RANKS):
            bench.report(transfer_id, rank, "stopped")
    await asyncio.sleep(0.05)
    assert sorted(bench.peers.abandons) == sorted(lost)
    assert len(bench.released()) == len(set(bench.released())) == 200


async def test_unanswered_commit_is_asked_again_and_a_refused_one_is_final():
    bench = Bench(settle_s=1.0)
    bench.peers.silent = 2
    call = bench.open(1)
    bench.first_token(call)
    for rank in range(NUM_RANKS):
        bench.report(1, rank)
    assert (await events_of(call))[1] is None
    bench.peers.refuse = RemoteError("INTERNAL", "digests differ")
    call = bench.open(2)
    bench.first_token(call)
    for rank in range(NUM_RANKS):
        bench.report(2, rank)
    assert (await events_of(call))[1].message == "digests differ"
    await asyncio.sleep(0.01)
    assert bench.released() == ["r1", "r2"]


async def test_output_that_ends_with_its_first_token_is_abandoned_after_the_ranks_stopped():
    bench = Bench()
    call = bench.open(1)
    bench.first_token(call, finish=True)
    assert await events_of(call) == (["first_token"], None)
    assert bench.stops() == [1]
    assert not bench.peers.abandons
    bench.report(1, 0, "stopped")
    bench.report(1, 1, "stopped")
    await asyncio.sleep(0.02)
    assert (bench.peers.abandons, bench.peers.commits, bench.released()) == ([1], [], ["r1"])


async def test_finish_that_crosses_the_last_report_is_abandoned_not_committed():
    bench = Bench()
    call = bench.open(1)
    bench.report(1, 0)
    bench.report(1, 1)
    bench.first_token(call, finish=True)
    await asyncio.sleep(0.02)
    assert (bench.peers.abandons, bench.peers.commits) == ([1], [])


async def test_failed_push_of_one_rank_ends_the_request_at_once_and_its_compute_too():
    bench = Bench()
    call = bench.open(1)
    bench.report(1, 0, "connection lost")
    kinds, error = await events_of(call)
    assert (kinds, error.message) == ([], "connection lost")
    assert bench.stops() == [1]
    assert [command.key for command in bench.commands if isinstance(command, Cancel)] == ["r1"]
    bench.report(1, 1, "stopped")
    await asyncio.sleep(0.02)
    assert bench.peers.abandons == [1]
    keys = [type(command).__name__ for command in bench.commands]
    assert keys.index("Cancel") < keys.index("Release"), "the engine must forget the job before its blocks are free"


async def test_cancelled_before_it_began_is_abandoned_without_any_rank():
    bench = Bench()
    call = bench.open(1, begin=False)
    call.fail(KVTransferError("cancelled"))
    await asyncio.sleep(0.02)
    assert (bench.peers.abandons, bench.stops()) == ([1], [])
    assert not call.may_begin(), "a given-up transfer must not begin any more"


async def test_fence_is_a_promise():
    bench = Bench()
    assert bench.handovers.fence(1)
    with pytest.raises(KVTransferError):
        bench.open(1)
    waiting = bench.open(2, begin=False)
    assert bench.handovers.fence(2)
    assert not waiting.may_begin()
    bench.open(3)
    assert not bench.handovers.fence(3)
    bench.report(3, 0, "stopped")
    bench.report(3, 1, "stopped")
    assert bench.handovers.fence(3)
    await asyncio.sleep(0.02)


async def test_transfer_that_its_decode_group_does_not_know_any_more_is_stopped():
    bench = Bench(settle_s=5)
    renewing = asyncio.create_task(bench.handovers.renew_forever())
    calls = [bench.open(1), bench.open(2)]
    bench.peers.unknown = [1]
    _, error = await asyncio.wait_for(events_of(calls[0]), within(1))
    assert error.grpc_status == "UNAVAILABLE"
    assert bench.stops() == [1]
    renewing.cancel()


async def test_abandon_that_is_never_answered_gives_up_after_a_lease():
    bench = Bench()
    bench.peers.silent = 10**6
    call = bench.open(1, begin=False)
    call.fail(KVTransferError("cancelled"))
    await asyncio.sleep(0.2)
    assert not bench.released()
    await asyncio.sleep(0.4)
    assert bench.released() == ["r1"]
