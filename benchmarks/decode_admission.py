"""How long a running batch waits when many requests are admitted beside it: the engine of a decode group, without its server.

    python -m benchmarks.decode_admission [--requests 64] [--rounds 9]

There is no model: a step takes 3 ms of a device that nobody has, one under way while the host works, and a transfer's KV is nothing but
zeros, whose digest is known. 16 sequences run; then all requests ask for a reservation at once, and each commits as soon as it has it.
A turn is what the admissions of one turn took, by the clock and in CPU time of the engine (on a shared machine the clock also tells who
else ran), a gap is between the ends of two steps, from the first request until the last one runs.
Rounds in which a turn takes all that there is alternate with rounds in which it takes what `AdmissionPace` says. Writes
benchmarks/results/decode_admission.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from common.kv_layout import KVGeometry
from common.kv_proto import geometry_to_proto
from common.proto import types_pb2, worker_pb2
from common.requests import SamplingParams, sampling_to_proto
from decode_worker import commands as cmd
from decode_worker.admission_pace import BUDGET_S, AdmissionPace
from decode_worker.engine import DecodeEngine, ModelFacts
from decode_worker.executor import DecodeExecutor
from decode_worker.metrics import DecodeMetrics
from decode_worker.reservations import Reservations
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.ledger import TransferLedger
from kv_transfer.pool_view import PoolView
from kv_transfer.receiver import Receiver
from model.control import LeaderChannel
from model.decode_step import StepRows
from model.kv_cache import KVCache
from model.sampling import SamplingState, TokenChoice

RESULTS = Path(__file__).with_name("results") / "decode_admission.json"
BUDGETS_S = {"all in one turn": 1e9, "paced": BUDGET_S}
KEY = b"key of an admission benchmark"
STEP_S, RUNNING, NEW_TOKENS = 0.003, 16, 64
PROMPT_TOKENS = (64, 1500)
WARM_STEP, STEP, LIMIT_S = 50, 400, 30.0  # when requests come: once for memory that is touched for the first time, once to be measured
GEOMETRY = KVGeometry(2, 1, 16, 16, "bfloat16", 128, (True, False))  # small, for a CPU reads all of it; a GPU does so beside its steps


class Recorded(AdmissionPace):
    """`turns`: when each turn's admissions were done, how long they took, and how much of that the engine computed."""

    def __init__(self, budget_s: float):
        super().__init__(budget_s)
        self.turns: list[tuple[float, float, float]] = []
        self._began_s = 0.0

    def allowance(self) -> int:
        self._began_s = time.thread_time()
        return super().allowance()

    def took(self, count: int, seconds: float) -> None:
        super().took(count, seconds)
        self.turns.append((time.perf_counter(), seconds, time.thread_time() - self._began_s))


class DeviceStep:
    """Steps of a device that takes `STEP_S` for each, one after the other. `ends`: when the host had their tokens."""

    lookahead = 1

    def __init__(self, at_end: Callable[[int], None]):
        self.ends: list[float] = []
        self._at_end = at_end
        self._under_way: deque[tuple[float, int]] = deque()
        self._free_at = 0.0

    def launch(self, rows: StepRows, states: Sequence[SamplingState] | None) -> None:
        self._free_at = max(self._free_at, time.perf_counter()) + STEP_S
        self._under_way.append((self._free_at, len(rows.views)))

    def finish(self) -> list[TokenChoice]:
        at, rows = self._under_way.popleft()
        time.sleep(max(0.0, at - time.perf_counter()))
        self.ends.append(time.perf_counter())
        self._at_end(len(self.ends))
        return [TokenChoice(5)] * rows


class Group:
    """An engine of one rank in a thread of its own."""

    def __init__(self, requests: int, budget_s: float):
        places = RUNNING + requests
        full, sliding = places * (PROMPT_TOKENS[1] + 4096) // 16, places * GEOMETRY.sliding_blocks_worst(1)
        kv = KVCache(GEOMETRY, 1, 0, full, sliding, "cpu")
        receiver = Receiver(
            PoolView(kv.full, kv.sliding, GEOMETRY, 1, 0), key=KEY, incarnation=1, listen_host="127.0.0.1", transports=(), buffer=None
        )
        self.commands: queue.SimpleQueue[cmd.Command] = queue.SimpleQueue()
        self.pace, self.step = Recorded(budget_s), DeviceStep(self._at_step)
        self.began_s = self.ended_s = 0.0
        self._left = requests
        rng = np.random.default_rng(1)
        self._bursts = {
            at: [self._request(f"{at} {i}", int(rng.integers(*PROMPT_TOKENS)), NEW_TOKENS) for i in range(requests)]
            for at in (WARM_STEP, STEP)
        }
        scheduler, metrics = DecodeScheduler(GEOMETRY, full, sliding, places), DecodeMetrics("d")
        template = worker_pb2.Reservation(incarnation=1, layout=types_pb2.Layout(tp=1), kv=geometry_to_proto(GEOMETRY), lease_ms=100_000)
        reservations = Reservations(scheduler, TransferLedger(1), GEOMETRY, template, KEY, lambda *_: None, metrics)
        self._engine = DecodeEngine(
            scheduler, reservations, DecodeExecutor(self.step, GEOMETRY, receiver), LeaderChannel([]),
            ModelFacts(201088, 8192, frozenset({2}), None), self.commands, lambda *_: None, metrics, pace=self.pace,
        )  # fmt: skip

    def run(self) -> None:
        for i in range(RUNNING):
            self.commands.put(self._request(f"running {i}", 64, 4000))
        thread = threading.Thread(target=self._engine.run, daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "requests are still waiting"

    def _request(self, name: str, prompt: int, max_tokens: int) -> cmd.Reserve:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, seed=1, ignore_eos=True)
        work = worker_pb2.Work(internal_id=name, prompt_ids=range(3, 3 + prompt), sampling=sampling_to_proto(sampling))
        writer = types_pb2.GroupDescription(incarnation=9, kv=geometry_to_proto(GEOMETRY), layout=types_pb2.Layout(tp=1))
        command = cmd.Reserve(work, "r", writer)
        command.done.add_done_callback(lambda done: self._commit(done, prompt, name))
        return command

    def _commit(self, done: Future, prompt: int, name: str) -> None:
        request = worker_pb2.CommitRequest(
            transfer_id=done.result().transfer_id, incarnation=1, first_token=5, bytes_per_rank=[handed_over(prompt)], digest_per_rank=[0]
        )
        command = cmd.Commit(request)
        command.done.add_done_callback(lambda done: self._runs(done, name))
        self.commands.put(command)

    def _runs(self, done: Future, name: str) -> None:
        done.result()
        self._left -= name.startswith(f"{STEP} ")
        if not self._left:
            self.ended_s = time.perf_counter()
            self._left = -1
            threading.Timer(0.05, self.commands.put, [cmd.ShutDown()]).start()

    def _at_step(self, number: int) -> None:
        if number in self._bursts:
            self.began_s = time.perf_counter()
            for command in self._bursts[number]:
                self.commands.put(command)


def handed_over(prompt: int) -> int:
    """Bytes of a prompt's hand-over."""
    starts = [GEOMETRY.handover_blocks(prompt, sliding=slides)[0] * GEOMETRY.block_size_tokens for slides in GEOMETRY.sliding]
    return sum(2 * GEOMETRY.head_dim * 2 * (prompt - start) for start in starts)


def measure(requests: int, budget_s: float) -> dict[str, float]:
    group = Group(requests, budget_s)
    gc.collect()
    gc.freeze()  # as a rank does when its loop starts
    group.run()
    ends, turns = np.array(group.step.ends), np.array(group.pace.turns)
    before = np.diff(ends[(ends <= group.began_s)][-100:]) * 1e3
    gaps = np.diff(ends[(ends > group.began_s - STEP_S) & (ends < group.ended_s + 2 * STEP_S)]) * 1e3
    spent, computed = turns[(turns[:, 0] > group.began_s) & (turns[:, 0] <= group.ended_s + STEP_S), 1:].T * 1e3
    return {
        "turns": len(spent), "median_turn_ms": float(np.median(spent)), "longest_turn_ms": float(spent.max()),
        "longest_turn_cpu_ms": float(computed.max()),
        "longest_gap_before_ms": float(before.max()), "median_gap_ms": float(np.median(gaps)), "longest_gap_ms": float(gaps.max()),
        "all_run_ms": (group.ended_s - group.began_s) * 1e3,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in BUDGETS_S}
    for number in range(arguments.rounds):
        for name, budget_s in BUDGETS_S.items():
            rounds[name].append(measure(arguments.requests, budget_s))
            print(number, name, {key: round(value, 2) for key, value in rounds[name][-1].items()}, flush=True)
    record: dict[str, Any] = {"requests": arguments.requests, "rounds": arguments.rounds, "running": RUNNING, "step_ms": STEP_S * 1e3}
    for name, figures in rounds.items():
        record[name] = {key: round(statistics.median(one[key] for one in figures), 2) for key in figures[0]}
    for what in ("longest_turn_ms", "longest_turn_cpu_ms", "longest_gap_ms"):
        at_once, paced = (record[name][what] for name in BUDGETS_S)
        record[what.replace("_ms", "_ratio")] = round(at_once / paced, 2)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
