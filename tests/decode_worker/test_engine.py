"""The decode engine alone, in this process, with commands in chosen and random orders: each is answered, nothing leaks, nothing crashes."""

import queue
import random
import threading
import time
from concurrent.futures import Future

import pytest

from common.errors import CapacityError, KVTransferError, ServingError
from common.kv_proto import geometry_to_proto
from common.proto import types_pb2, worker_pb2
from common.requests import SamplingParams, sampling_to_proto
from decode_worker import commands as cmd
from decode_worker.engine import DecodeEngine, ModelFacts
from decode_worker.executor import DecodeExecutor
from decode_worker.metrics import DecodeMetrics
from decode_worker.reservations import Reservations
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.ledger import TransferLedger
from kv_transfer.pool_view import PoolView
from kv_transfer.receiver import Receiver
from model.batch import SequenceView, build_prefill_batch
from model.control import LeaderChannel
from model.decode_step import PlainDecodeStep
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from tests.support.fake_model import CONFIG, AheadStep, FakeModel, FakeModelBuilder
from tests.support.groups import KEY
from tests.support.pace import within

GEOMETRY = CONFIG.kv_geometry(16, "float32")
FULL_BLOCKS, MAX_BATCH = 60, 4
RING = GEOMETRY.sliding_blocks_worst(1)


class Bench:
    """An engine of one rank. Its receiver offers nothing, so a revoke fences at once; `fences` are asks that get no answer."""

    def __init__(self, lease_s: float = 5.0, make_step=PlainDecodeStep):
        self.kv = kv = KVCache(GEOMETRY, 1, 0, FULL_BLOCKS, MAX_BATCH * RING, "cpu")
        view = PoolView(kv.full, kv.sliding, GEOMETRY, 1, 0)
        self.receiver = Receiver(view, key=KEY, incarnation=1, listen_host="127.0.0.1", transports=(), buffer=None)
        self.scheduler = DecodeScheduler(GEOMETRY, FULL_BLOCKS, MAX_BATCH * RING, MAX_BATCH)
        template = worker_pb2.Reservation(incarnation=1, layout=types_pb2.Layout(tp=1), lease_ms=int(lease_s * 1000))
        self.fences: list[int] = []
        self.metrics = metrics = DecodeMetrics("d")
        reservations = Reservations(
            self.scheduler, TransferLedger(1), GEOMETRY, template, KEY, lambda transfer_id, _: self.fences.append(transfer_id), metrics
        )
        self.commands: queue.SimpleQueue[cmd.Command] = queue.SimpleQueue()
        self.outputs: list[worker_pb2.SequenceOutput] = []
        model = FakeModel(FakeModelBuilder(decode_s=1e-4), LocalGroup())
        self.engine = DecodeEngine(
            self.scheduler,
            reservations,
            DecodeExecutor(make_step(model, kv, "cpu"), GEOMETRY, self.receiver),
            LeaderChannel([]),
            ModelFacts(CONFIG.vocab_size, 4096, frozenset(CONFIG.eos_token_ids), None),
            self.commands,
            lambda step, outputs, load: self.outputs.extend(one for mine in outputs.values() for one in mine),
            metrics,
        )
        self.thread = threading.Thread(target=self.engine.run)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self.thread.is_alive():
            self.thread.start()
        self.commands.put(cmd.ShutDown())
        self.thread.join(10)
        assert not self.thread.is_alive()

    def start(self) -> None:
        """What was put before is one batch of commands."""
        self.thread.start()

    def reserve(
        self, internal_id: str, *, prompt: int = 20, max_tokens: int = 10, sampling=None, router_id: str = "a", **options
    ) -> cmd.Reserve:
        sampling = sampling or SamplingParams(max_tokens=max_tokens, temperature=0, seed=1, ignore_eos=True)
        work = worker_pb2.Work(internal_id=internal_id, prompt_ids=range(3, 3 + prompt), sampling=sampling_to_proto(sampling), **options)
        writer = types_pb2.GroupDescription(incarnation=9, kv=geometry_to_proto(GEOMETRY), layout=types_pb2.Layout(tp=1))
        command = cmd.Reserve(work, router_id, writer)
        self.commands.put(command)
        return command

    def write(self, reservation: worker_pb2.Reservation, prompt_ids: list[int]) -> None:
        """What a prefill group would have put into the reserved blocks."""
        full, sliding = reservation.blocks
        first = sliding.first_logical
        view = SequenceView(prompt_ids, 0, tuple(full.block_ids), first, tuple(sliding.block_ids))
        FakeModel(FakeModelBuilder(), LocalGroup()).forward(build_prefill_batch(view, 16, "cpu", logits="none"), self.kv)

    def commit(self, reservation: worker_pb2.Reservation, *, lie: bool = False) -> cmd.Commit:
        """Commits whatever lies in the pools, as a writer that sends garbage with a right digest would."""
        result = self.receiver.verify(reservation.transfer_id)
        request = worker_pb2.CommitRequest(
            transfer_id=reservation.transfer_id,
            incarnation=1,
            first_token=5,
            bytes_per_rank=[result.bytes],
            digest_per_rank=[result.digest ^ lie],
        )
        command = cmd.Commit(request)
        self.commands.put(command)
        return command

    def put(self, command: cmd.Command) -> Future:
        self.commands.put(command)
        return command.done

    def wait_idle(self, timeout_s: float = 3.0) -> None:
        deadline = time.monotonic() + within(timeout_s)
        while time.monotonic() < deadline:
            load = self.engine.load
            if load.free_full_blocks == FULL_BLOCKS and not load.running and not load.transfers:
                return
            time.sleep(0.01)
        raise AssertionError(f"not idle: {self.engine.load}")


def test_request_runs_from_reservation_to_its_last_token():
    with Bench() as bench:
        bench.start()
        reservation = bench.reserve("r").done.result(3)
        assert [len(blocks.block_ids) for blocks in reservation.blocks] == [2, 2]
        bench.commit(reservation).done.result(3)
        bench.wait_idle()
        tokens = [token for output in bench.outputs for token in output.token_ids]
        assert [output.first_index for output in bench.outputs] == list(range(1, 10))
        assert len(tokens) == 9
        assert bench.outputs[-1].HasField("finish")


def test_reserve_and_abort_in_one_batch_of_commands():
    """The abort comes before the grant is in place on any rank: nobody is told of the reservation, and the grant does not stay."""
    with Bench() as bench:
        command = bench.reserve("r")
        aborted = bench.put(cmd.Abort("r", "changed its mind"))
        bench.start()
        with pytest.raises(KVTransferError, match="given up"):
            command.done.result(3)
        assert aborted.result(3)
        bench.wait_idle()
        bench.reserve("r").done.result(3)
        bench.put(cmd.Abort("r", ""))
        bench.wait_idle()


@pytest.mark.parametrize("kind", ["reserve", "commit", "renew", "abort"])
def test_nobody_waits_for_an_answer_any_more(kind):
    """A cancelled call cancels its future; the engine must not fall over it."""
    with Bench() as bench:
        first = bench.reserve("r")
        if kind == "reserve":
            first.done.cancel()
        bench.start()
        if kind != "reserve":
            reservation = first.done.result(3)
            command = {
                "commit": lambda: cmd.Commit(worker_pb2.CommitRequest(transfer_id=reservation.transfer_id, incarnation=2)),
                "renew": lambda: cmd.Renew([reservation.transfer_id]),
                "abort": lambda: cmd.Abort("nobody", ""),
            }[kind]()
            command.done.cancel()
            bench.commands.put(command)
        bench.put(cmd.Abort("r", "")).result(3)
        bench.wait_idle()
        assert bench.thread.is_alive()


def test_commit_that_lies_fails_and_frees_and_one_that_is_repeated_is_answered_twice():
    with Bench() as bench:
        bench.start()
        lying = bench.commit(bench.reserve("liar").done.result(3), lie=True)
        with pytest.raises(KVTransferError, match="digests differ"):
            lying.done.result(3)
        bench.wait_idle()
        assert [(o.internal_id, o.error_status) for o in bench.outputs] == [("liar", "DATA_LOSS")]
        reservation = bench.reserve("r", max_tokens=300).done.result(3)
        first = bench.commit(reservation)
        again = cmd.Commit(first.request)
        bench.commands.put(again)
        assert first.done.result(3) is again.done.result(3) is None
        assert bench.put(cmd.Commit(first.request)).result(3) is None
        bench.put(cmd.Abort("r", "enough")).result(3)
        bench.wait_idle()
        assert bench.outputs[-1].error_status == "CANCELLED"


def test_lease_that_runs_out_fails_the_request_and_frees_its_blocks():
    with Bench(lease_s=0.2) as bench:
        bench.start()
        bench.reserve("r").done.result(3)
        bench.wait_idle()
        assert bench.fences
        assert [(o.internal_id, o.error_status) for o in bench.outputs] == [("r", "DEADLINE_EXCEEDED")]


def test_deadline_and_absent_router_end_running_requests_typed():
    with Bench() as bench:
        bench.start()
        for name, options in (("late", {"deadline_ms": 150}), ("orphan", {"router_id": "gone"})):
            bench.commit(bench.reserve(name, max_tokens=800 if name == "late" else 80, **options).done.result(3)).done.result(3)
        bench.commands.put(cmd.RouterGone("gone"))
        bench.wait_idle()
        ends = {o.internal_id: o.error_status for o in bench.outputs if o.error_status}
        assert ends == {"late": "DEADLINE_EXCEEDED", "orphan": "CANCELLED"}


@pytest.mark.parametrize(("seed", "ahead"), [(seed, seed % 2 == 1) for seed in range(6)])
def test_random_commands_in_random_order_leave_nothing_behind(seed, ahead):
    """Reserve, commit, lie, abandon, abort, cancel, router gone, late promises: every request ends once, all blocks come back."""
    rng = random.Random(seed)
    admitted: set[str] = set()
    with Bench(lease_s=1.0, make_step=(lambda model, kv, _: AheadStep(model, kv, LocalGroup())) if ahead else PlainDecodeStep) as bench:
        bench.start()
        open_ones: dict[str, worker_pb2.Reservation] = {}
        for i in range(120):
            action = rng.choice(["reserve", "reserve", "commit", "commit", "lie", "abandon", "abort", "promise", "router"])
            if action == "reserve":
                name = f"r{i}"
                command = bench.reserve(name, prompt=rng.randint(1, 150), max_tokens=rng.randint(2, 60), router_id=rng.choice("ab"))
                if rng.random() < 0.2:
                    command.done.cancel()
                    bench.commands.put(cmd.Abort(name, "cancelled"))
                    continue
                try:
                    open_ones[name] = command.done.result(5)
                except CapacityError:
                    continue
            elif action == "router":
                if rng.random() < 0.1:
                    bench.commands.put(cmd.RouterGone("a"))
            elif open_ones:
                name = rng.choice(sorted(open_ones))
                reservation = open_ones.pop(name)
                if action in ("commit", "lie"):
                    try:
                        bench.commit(reservation, lie=action == "lie").done.result(5)
                        admitted.add(name)
                    except ServingError:
                        continue
                elif action == "abandon":
                    bench.commands.put(cmd.Abandon(reservation.transfer_id))
                elif action == "abort":
                    bench.put(cmd.Abort(name, "")).result(5)
                else:
                    bench.commands.put(cmd.WriterStopped(reservation.transfer_id))
        bench.wait_idle(6.0)
        bench.scheduler.pools.check()
        assert bench.scheduler.pools.sliding.num_free == MAX_BATCH * RING
    ends = [o.internal_id for o in bench.outputs if o.HasField("finish") or o.error_status]
    assert len(ends) == len(set(ends)), "a request ended twice"
    assert admitted <= set(ends)
