"""Many requests beside running sequences: what one turn of the decode loop takes of them, by a clock and ranks that the test drives."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import pytest

from common.errors import DeadlineError, TransferGivenUp
from common.kv_proto import geometry_to_proto
from common.proto import plan_pb2, types_pb2, worker_pb2
from common.requests import SamplingParams, sampling_to_proto
from decode_worker import commands as cmd
from decode_worker.admission_pace import BUDGET_S
from decode_worker.engine import DecodeEngine, ModelFacts
from decode_worker.metrics import DecodeMetrics
from decode_worker.reservations import Reservations
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.ledger import TransferLedger
from model.control import LeaderChannel
from model.sampling import SamplingState, TokenChoice
from tests.support.fake_model import CONFIG
from tests.support.groups import KEY

GEOMETRY = CONFIG.kv_geometry(16, "float32")
BLOCKS, MAX_BATCH, MANY = 2000, 128, 64


class Bed:
    """An engine in this thread. `log`: grants and looks by request, and "step" for each step. Each operation takes `cost_s` of a clock that
    nothing else moves but a step, by `step_s`; `at_step` maps the number of a step to what happens while it runs."""

    lookahead = 0

    def __init__(self, cost_s: float, step_s: float = 0.0):
        self.now_s, self._cost_s, self._step_s = 0.0, cost_s, step_s
        self.log: list[str] = []
        self.at_step: dict[int, Callable[[], object]] = {}
        self.names: dict[int, str] = {}
        self.errors: dict[str, str] = {}
        self.commands: queue.SimpleQueue[cmd.Command] = queue.SimpleQueue()
        self._rows = self._steps = 0
        metrics = DecodeMetrics("d")
        self.metrics = metrics
        self.scheduler = DecodeScheduler(GEOMETRY, BLOCKS, MAX_BATCH * GEOMETRY.sliding_blocks_worst(1), MAX_BATCH)
        template = worker_pb2.Reservation(incarnation=1, layout=types_pb2.Layout(tp=1), lease_ms=100_000)
        reservations = Reservations(self.scheduler, TransferLedger(1), GEOMETRY, template, KEY, lambda *_: None, metrics)
        facts = ModelFacts(CONFIG.vocab_size, 4096, frozenset({2}), None)
        self.engine = DecodeEngine(
            self.scheduler, reservations, self, LeaderChannel([]), facts, self.commands, self._publish, metrics, clock=lambda: self.now_s
        )  # fmt: skip

    def run(self, steps: int) -> list[list[str]]:
        """Until so many steps were taken. Returns: the operations before each step"""
        self.at_step[steps] = lambda: self.commands.put(cmd.ShutDown())
        self.engine.run()
        turns: list[list[str]] = [[]]
        for event in self.log:
            if event == "step":
                turns.append([])
            else:
                turns[-1].append(event)
        return turns

    def reserve(self, name: str, *, max_tokens: int = 300, router_id: str = "a", deadline_ms: int = 0) -> cmd.Reserve:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, seed=1, ignore_eos=True)
        work = worker_pb2.Work(internal_id=name, prompt_ids=range(3, 23), sampling=sampling_to_proto(sampling), deadline_ms=deadline_ms)
        writer = types_pb2.GroupDescription(incarnation=9, kv=geometry_to_proto(GEOMETRY), layout=types_pb2.Layout(tp=1))
        command = cmd.Reserve(work, router_id, writer)
        command.done.add_done_callback(lambda done: self._answered(name, done))
        self.commands.put(command)
        return command

    def commit(self, transfer_id: int) -> cmd.Commit:
        request = worker_pb2.CommitRequest(transfer_id=transfer_id, incarnation=1, first_token=5, bytes_per_rank=[1], digest_per_rank=[1])
        command = cmd.Commit(request)
        self.commands.put(command)
        return command

    def start_running(self, name: str) -> None:
        """To be called before `run`."""
        self.reserve(name).done.add_done_callback(lambda done: self.commit(done.result().transfer_id))

    def ask(self, command: cmd.Command) -> cmd.Command:
        self.commands.put(command)
        return command

    def _answered(self, name: str, done) -> None:
        if done.exception() is None:
            self.names[done.result().transfer_id] = name
            self.log.append(f"granted {name}")

    def _publish(self, _step: int, outputs: dict[str, list[worker_pb2.SequenceOutput]], _load) -> None:
        self.errors |= {output.internal_id: output.error_status for mine in outputs.values() for output in mine if output.error_status}

    # -- what the engine asks of its ranks ---------------------------------------------------------------------------------------------

    def operate(self, plan: plan_pb2.DecodePlan) -> plan_pb2.DecodeReply:
        self.now_s += self._cost_s * (len(plan.grants) + len(plan.verifies))
        self.log += [f"looked {self.names[transfer_id]}" for transfer_id in plan.verifies]
        verified = [plan_pb2.VerifyResult(transfer_id=transfer_id, bytes=1, digest=1) for transfer_id in plan.verifies]
        return plan_pb2.DecodeReply(verified=verified, fenced=plan.revokes)

    def launch(self, plan: plan_pb2.DecodePlan, _states: Sequence[SamplingState] | None) -> None:
        self._rows = len(plan.rows)
        self.now_s += self._step_s

    def finish(self) -> list[TokenChoice]:
        self.log.append("step")
        self._steps += 1
        self.at_step.get(self._steps, lambda: None)()
        return [TokenChoice(5)] * self._rows


def names(count: int) -> list[str]:
    return [f"r{i}" for i in range(count)]


@pytest.mark.parametrize(("cost_s", "most"), [(0.4e-3, 2), (0.09e-3, 12), (3e-3, 1)])
def test_between_two_steps_are_no_more_reservations_than_the_budget_holds_and_all_come_in_order(cost_s, most):
    bed = Bed(cost_s)
    bed.start_running("running")
    bed.at_step[2] = lambda: [bed.reserve(name) for name in names(MANY)]
    turns = bed.run(2 + MANY)[2:]
    per_turn = [len(turn) for turn in turns]
    assert max(per_turn) <= most
    assert max(per_turn) * cost_s <= max(BUDGET_S, cost_s) * 1.1
    assert all(per_turn[: -(-MANY // most)])
    assert [event for turn in turns for event in turn] == [f"granted {name}" for name in names(MANY)]


def test_slow_steps_take_a_twentieth_of_their_time_of_admissions():
    """A step that is computed where it is launched, as on a CPU: nobody waits for a device."""
    bed = Bed(1e-3, step_s=0.2)
    bed.start_running("running")
    bed.at_step[4] = lambda: [bed.reserve(name) for name in names(MANY)]
    per_turn = [len(turn) for turn in bed.run(4 + MANY)[4:]]
    assert max(per_turn) in (9, 10)  # of the twentieth of 0.2 s
    assert sum(per_turn[:8]) == MANY


def test_with_nothing_running_all_are_taken_at_once():
    bed = Bed(3e-3)
    for name in names(MANY):
        bed.reserve(name)
    bed.start_running("last")
    assert bed.run(1)[0] == [*(f"granted {name}" for name in names(MANY)), "granted last", "looked last"]


def test_looks_at_what_arrived_come_before_new_reservations_and_are_bounded_alike():
    bed = Bed(3e-3)
    for name in names(5):
        bed.reserve(name)
    bed.start_running("running")

    def burst() -> None:
        for name in ("late 1", "late 2"):
            bed.reserve(name)
        for transfer_id, name in bed.names.items():
            if name != "running":
                bed.commit(transfer_id)

    bed.at_step[2] = burst
    turns = bed.run(12)[2:]
    assert turns[:7] == [*([f"looked {name}"] for name in names(5)), ["granted late 1"], ["granted late 2"]]


def test_a_cancel_overtakes_the_reservations_that_wait():
    bed = Bed(3e-3)
    bed.start_running("running")
    cancelled: list[cmd.Reserve] = []
    aborts: list[cmd.Abort] = []
    bed.at_step[2] = lambda: cancelled.extend(bed.reserve(name) for name in names(MANY))

    def cancel() -> None:
        aborts.extend(bed.ask(cmd.Abort(name, "")) for name in ("r63", "r20", "nobody"))
        bed.ask(cmd.Abort("running", ""))

    bed.at_step[4] = cancel
    answered: list[bool] = []
    bed.at_step[5] = lambda: answered.extend(abort.done.done() for abort in aborts)
    bed.start_running("other")
    turns = bed.run(70)
    assert answered == [True] * 3, "before the step after the next"
    assert [abort.done.result(0) for abort in aborts] == [True, True, False]
    assert bed.errors["running"] == "CANCELLED"
    for name in ("r63", "r20"):
        with pytest.raises(TransferGivenUp):
            cancelled[int(name[1:])].done.result(0)
        assert f"granted {name}" not in bed.log
    assert sum(event.startswith("granted r") for turn in turns for event in turn) == MANY - 2 + 1  # and "running"


def test_a_cancelled_commit_that_no_rank_was_asked_about_gives_its_blocks_back_at_once():
    bed = Bed(3e-3)
    for name in names(6):
        bed.reserve(name)
    bed.start_running("running")
    commits: dict[str, cmd.Commit] = {}
    free: list[int] = []

    def commit_all() -> None:
        commits.update({name: bed.commit(transfer_id) for transfer_id, name in bed.names.items() if name != "running"})

    def cancel_last() -> None:
        free.append(bed.scheduler.pools.full.num_free)
        bed.ask(cmd.Abort("r5", ""))

    bed.at_step |= {2: commit_all, 4: cancel_last, 5: lambda: free.append(bed.scheduler.pools.full.num_free)}
    turns = bed.run(12)
    assert free[1] - free[0] == GEOMETRY.blocks_for(320)
    with pytest.raises(TransferGivenUp):
        commits["r5"].done.result(0)
    assert "looked r5" not in [event for turn in turns for event in turn]
    assert commits["r4"].done.result(0) is None


def test_a_router_that_is_gone_and_deadlines_end_what_waits():
    bed = Bed(3e-3)
    bed.start_running("running")
    waiting: dict[str, cmd.Reserve] = {}

    def burst() -> None:
        for name in names(10):
            waiting[name] = bed.reserve(name, router_id="gone" if name in ("r2", "r7") else "a", deadline_ms=10 if name == "r9" else 0)

    bed.at_step |= {2: burst, 3: lambda: bed.ask(cmd.RouterGone("gone"))}
    bed.run(20)
    for name, error in (("r2", TransferGivenUp), ("r7", TransferGivenUp), ("r9", DeadlineError)):
        with pytest.raises(error):
            waiting[name].done.result(0)
    granted = [event for event in bed.log if event.startswith("granted r") and event != "granted running"]
    assert granted == [f"granted r{i}" for i in (0, 1, 3, 4, 5, 6, 8)]
    assert bed.scheduler.pools.full.num_free == BLOCKS - 8 * GEOMETRY.blocks_for(320)
