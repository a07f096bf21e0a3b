"""From a commit to the first decode step: the decode engine as it serves, on pools of true size, with a step that computes nothing.

What is timed is what lies between a prefill group's last word and the forward pass: the engine's loop, the check of every byte that was
handed over, admission. Runs in the decode group's process of the GPU transfer benchmark, and on a CPU in its test.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from statistics import median
from typing import TYPE_CHECKING

import torch

from common.errors import ServingError
from common.kv_layout import KVGeometry
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
from kv_transfer.pool_view import TORCH_DTYPE, PoolView
from kv_transfer.receiver import Receiver
from model.control import LeaderChannel
from model.decode_step import StepRows
from model.sampling import SamplingState, TokenChoice

if TYPE_CHECKING:
    from benchmarks.transfer_gpu_groups import Side

KEY = b"the key of the transfer benchmark"
MAX_BATCH, VOCAB_SIZE, ANSWER_S = 4, 1000, 30.0


class NoStep:
    """Notes when it is called, and puts one small kernel on the device."""

    lookahead = 0

    def __init__(self, device: str):
        self._work = torch.zeros(1, device=device)
        self._rows = 0
        self.called: queue.SimpleQueue[float] = queue.SimpleQueue()

    def launch(self, rows: StepRows, states: Sequence[SamplingState] | None) -> None:
        self.called.put(time.perf_counter())
        self._work.add_(1)
        self._rows = len(rows.views)

    def finish(self) -> list[TokenChoice | ServingError]:
        self._work.item()
        return [TokenChoice(5) for _ in range(self._rows)]


class Engine:
    """A decode group of one rank whose pools hold whatever they hold: a commit tells the digest of just that."""

    def __init__(self, geometry: KVGeometry, full_blocks: int, device: str):
        ring = geometry.sliding_blocks_worst(1)
        shape = (2, geometry.num_kv_heads, geometry.block_size_tokens, geometry.head_dim)
        full, sliding = (
            torch.zeros(len(layers), blocks, *shape, dtype=TORCH_DTYPE[geometry.dtype], device=device)
            for layers, blocks in ((geometry.full_layers, full_blocks), (geometry.sliding_layers, MAX_BATCH * ring))
        )
        self._geometry = geometry
        self.receiver = Receiver(
            PoolView(full, sliding, geometry, 1, 0), key=KEY, incarnation=1, listen_host="127.0.0.1", transports=(), buffer=None
        )
        scheduler = DecodeScheduler(geometry, full_blocks, MAX_BATCH * ring, MAX_BATCH)
        template = worker_pb2.Reservation(incarnation=1, layout=types_pb2.Layout(tp=1), lease_ms=60_000)
        metrics = DecodeMetrics("benchmark")
        reservations = Reservations(scheduler, TransferLedger(1), geometry, template, KEY, lambda *_: None, metrics)
        self.step = NoStep(device)
        self.commands: queue.SimpleQueue[cmd.Command] = queue.SimpleQueue()
        self.published: queue.SimpleQueue[float] = queue.SimpleQueue()
        executor = DecodeExecutor(self.step, geometry, self.receiver)
        facts = ModelFacts(VOCAB_SIZE, 1 << 20, frozenset(), None)
        engine = DecodeEngine(
            scheduler, reservations, executor, LeaderChannel([]), facts, self.commands,
            lambda *_: self.published.put(time.perf_counter()), metrics,
        )  # fmt: skip
        self._thread = threading.Thread(target=engine.run, daemon=True)
        self._thread.start()

    def one(self, name: str, num_tokens: int) -> tuple[float, float]:
        """Returns: seconds from the commit to the first step's beginning, and to its end with the token's publication"""
        sampling = SamplingParams(max_tokens=2, temperature=0, seed=1, ignore_eos=True)
        prompt = [3 + i % 900 for i in range(num_tokens)]
        work = worker_pb2.Work(internal_id=name, prompt_ids=prompt, sampling=sampling_to_proto(sampling))
        writer = types_pb2.GroupDescription(incarnation=9, kv=geometry_to_proto(self._geometry), layout=types_pb2.Layout(tp=1))
        reservation = self._put(cmd.Reserve(work, "router", writer)).result(ANSWER_S)
        found = self.receiver.verify(reservation.transfer_id)
        commit = worker_pb2.CommitRequest(
            transfer_id=reservation.transfer_id, incarnation=1, first_token=5, bytes_per_rank=[found.bytes], digest_per_rank=[found.digest]
        )
        began = time.perf_counter()
        self._put(cmd.Commit(commit)).result(ANSWER_S)
        stepped = self.step.called.get(timeout=ANSWER_S)
        published = self.published.get(timeout=ANSWER_S)
        return stepped - began, published - began

    def _put(self, command: cmd.Reserve | cmd.Commit) -> Future:
        self.commands.put(command)
        return command.done

    def close(self) -> None:
        self.commands.put(cmd.ShutDown())
        self._thread.join(ANSWER_S)
        self.receiver.close()


def time_commits(geometry: KVGeometry, num_tokens: int, rounds: int, device: str) -> dict[str, float]:
    """Requests one after the other. Returns: medians and the worst in ms"""
    engine = Engine(geometry, geometry.blocks_for(num_tokens) + 8, device)
    try:
        times = [engine.one(f"r{i}", num_tokens) for i in range(rounds + 2)][2:]
    finally:
        engine.close()
    steps = [1e3 * step for step, _ in times]
    return {
        "to_step_ms": median(steps), "to_step_worst_ms": max(steps), "to_token_ms": median(1e3 * published for _, published in times),
    }  # fmt: skip


def commit_to_step(side: Side, num_tokens: int) -> dict[str, float]:
    """With the KV of 120b on the process's GPU. Returns: as `time_commits`"""
    from benchmarks.transfer_gpu_groups import geometry

    return time_commits(geometry(), num_tokens, 20, "cuda:0")
