"""The reuse race on GPUs: few blocks, short leases, late writers, aborts at random; nobody may ever get another request's bytes.

The decode process owns pools and ledger, the prefill process four writers on streams of their own; they talk over one socket per writer and
one for fences. Late is what a writer has enqueued behind idle work of its GPU, so that it lands long after it was asked to stop.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING

import torch

from benchmarks.transfer_gpu_groups import CUDA, POISON, DecodeGroup, PrefillGroup
from common.errors import CapacityError, KVTransferError, ServingError
from common.proto import types_pb2, worker_pb2
from kv_transfer.ledger import AdmitSequence, FenceWriter, ReleaseBlocks, TransferLedger

if TYPE_CHECKING:
    from benchmarks.transfer_gpu_groups import Side

LAYERS, LEASE_S, KEPT_S = 4, 0.05, 0.03
RACE_S, END_S = 20.0, 8.0  # in which transfers are begun, and in which the last ones must be over
WRITER = types_pb2.GroupDescription(incarnation=4, address="p", ranks=[types_pb2.ProcessIdentity(host="elsewhere", pid=1)])
WRITERS = ((1, 65), (2, 48), (1, 100), (2, 17))  # tp, tokens
DELAYS_MS = (0, 0, 0, 2, 20, 80)


class RaceDecode:
    def __init__(self, group: DecodeGroup):
        self.group = group
        self.ledger = TransferLedger(group.incarnation, fence_retry_s=0.02)
        self.lock = threading.RLock()
        self.outcome: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seeds: dict[int, int] = {}
        self.running: list[tuple[float, int, list[int]]] = []
        self.fences: Connection | None = None

    def act(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, ReleaseBlocks):
                self.group.release(action.transfer_id)
                self.outcome["failed typed"] += 1
            elif isinstance(action, AdmitSequence):
                self.outcome["admitted"] += 1
            elif isinstance(action, FenceWriter):
                for receiver in self.group.receivers:
                    receiver.revoke(action.transfer_id)
                self.fences.send(action.transfer_id)

    def reserve(self, transfer_id: int, num_tokens: int, seed: int) -> bytes | None:
        try:
            reservation = self.group.reserve(transfer_id, num_tokens, LEASE_S)
        except CapacityError:
            return None
        self.ledger.reserve(transfer_id, f"r{transfer_id}", WRITER, LEASE_S, time.monotonic())
        self.seeds[transfer_id] = seed
        return reservation

    def abandon(self, transfer_id: int) -> None:
        self.act(self.ledger.abandon(transfer_id))

    def stopped(self, transfer_id: int) -> None:
        self.act(self.ledger.confirm_stopped(transfer_id))

    def commit(self, transfer_id: int, digests: list[int]) -> None:
        try:
            self.ledger.begin_commit(worker_pb2.CommitRequest(transfer_id=transfer_id, incarnation=self.group.incarnation), 0.0)
        except ServingError:
            return  # too late: it was given up
        if self.group.verify(transfer_id) != digests:
            self.wrong.append(f"{transfer_id}: digest differs at its commit")
        self.look(transfer_id, "at its commit")
        self.act(self.ledger.end_commit(transfer_id, None))
        for receiver in self.group.receivers:
            receiver.revoke(transfer_id)
        self.running.append((time.monotonic() + KEPT_S, transfer_id, digests))

    def look(self, transfer_id: int, when: str) -> None:
        difference = self.group.difference(transfer_id, self.seeds[transfer_id], alone=False)
        if difference:
            self.wrong.append(f"{transfer_id} {when}: {difference}")

    def end_sequences(self, now: float) -> None:
        """A sequence keeps its blocks for a while; they must not have changed meanwhile."""
        for entry in [entry for entry in self.running if entry[0] <= now]:
            self.running.remove(entry)
            self.look(entry[1], "after its commit")
            self.group.release(entry[1])

    def serve(self, connection: Connection) -> None:
        try:
            while True:
                name, *arguments = connection.recv()
                with self.lock:
                    answer = getattr(self, name)(*arguments)
                if name != "stopped":
                    connection.send(answer)
        except (EOFError, OSError):
            return


def race_decode(side: Side, address: str) -> dict:
    """Returns: outcomes, what was wrong, blocks that are not free, blocks that changed while they were free"""
    group = side.group = DecodeGroup(tp=2, layers=LAYERS, num_blocks=(24, 24), incarnation=0xACE)
    race = RaceDecode(group)
    rng = random.Random(1)
    with Listener(address, "AF_UNIX") as listener:
        race.fences = listener.accept()
        threads = [threading.Thread(target=race.serve, args=(race.fences,), daemon=True)]
        threads += [threading.Thread(target=race.serve, args=(listener.accept(),), daemon=True) for _ in WRITERS]
        for thread in threads:
            thread.start()
        give_up = time.monotonic() + RACE_S + END_S
        while time.monotonic() < give_up:
            with race.lock:
                now = time.monotonic()
                race.act(race.ledger.expire(now))
                if rng.random() < 0.2 and race.seeds:
                    race.act(race.ledger.abort(f"r{max(race.seeds) - rng.randrange(4)}", now))
                race.end_sequences(now)
                is_over = not any(thread.is_alive() for thread in threads[1:])  # writers hang up
                if is_over and not race.running and not race.ledger.num_open:
                    break
            time.sleep(0.003)
    torch.cuda.synchronize()
    time.sleep(0.2)
    changed = sum(
        int((view.pool(sliding=s).view(torch.int16) != POISON).any((0, 2, 3, 4, 5)).sum()) for view in group.views for s in (0, 1)
    )
    not_free = sum(pool.num_blocks - pool.num_free for pool in group.block_pools)
    return {"outcome": dict(race.outcome), "wrong": race.wrong, "not_free": not_free, "changed": changed, "open": race.ledger.num_open}


class Writer:
    """One prefill group with a stream, a thread and a connection of its own."""

    def __init__(self, index: int, address: str, fenced: Fenced):
        self.index, self.fenced = index, fenced
        tp, num_tokens = WRITERS[index]
        self.group = PrefillGroup(tp=tp, layers=LAYERS, num_tokens=num_tokens)
        self.connection = Client(address, "AF_UNIX")
        self.rng = random.Random(index)
        self.errors: Counter[str] = Counter()

    def ask(self, *message: object):
        self.connection.send(message)
        return self.connection.recv()

    def run(self, victims: int) -> None:
        until = time.monotonic() + RACE_S
        with self.connection, torch.cuda.stream(torch.cuda.Stream(CUDA)):
            for i in range(victims):
                if time.monotonic() < until:
                    self.one(1 + self.index + len(WRITERS) * i)

    def one(self, transfer_id: int) -> None:
        while (reservation := self.ask("reserve", transfer_id, self.group.num_tokens, transfer_id)) is None:
            time.sleep(0.002)
        if not self.fenced.begin(transfer_id, self.group, reservation):
            self.errors["fenced before it began"] += 1
            return
        try:
            for layer in range(LAYERS):
                delay_ms = self.rng.choice(DELAYS_MS) if layer in (0, 2) else 0
                if delay_ms:
                    torch.cuda._sleep(int(delay_ms * 1.6e6))
                self.group.fill(transfer_id, layer)
                self.group.push(transfer_id, layer)
            results = self.group.finish(transfer_id)
        except KVTransferError:  # aborted and over
            self.errors["aborted"] += 1
            torch.cuda.current_stream().synchronize()
            return
        torch.cuda.current_stream().synchronize()  # the pools are filled again
        error = next((result.error for result in results if result.error), None)
        if error is not None:
            self.errors[type(error).__name__] += 1
            self.ask("abandon", transfer_id)
        else:
            digests = [sum(parts) % 2**64 for parts in zip(*(result.digest_per_rank for result in results), strict=True)]
            self.ask("commit", transfer_id, digests)


class Fenced:
    """Keeps a fence and the begin of the same transfer from crossing, as the writer's ledger does."""

    def __init__(self, address: str):
        self.connection = Client(address, "AF_UNIX")
        self.lock = threading.Lock()
        self.begun: dict[int, PrefillGroup] = {}
        self.refused: set[int] = set()
        threading.Thread(target=self.run, daemon=True).start()

    def begin(self, transfer_id: int, group: PrefillGroup, reservation: bytes) -> bool:
        with self.lock:
            if transfer_id in self.refused:
                return False
            group.begin(reservation)
            self.begun[transfer_id] = group
            return True

    def run(self) -> None:
        asked: set[int] = set()
        try:
            while True:
                transfer_id = self.connection.recv()
                with self.lock:
                    group = self.begun.get(transfer_id)
                    if group is None:
                        self.refused.add(transfer_id)
                        self.connection.send(("stopped", transfer_id))
                        continue
                if transfer_id not in asked:
                    asked.add(transfer_id)
                    self.abort(group, transfer_id)
        except (EOFError, OSError):
            return

    def abort(self, group: PrefillGroup, transfer_id: int) -> None:
        left = [len(group.senders)]

        def on_stopped() -> None:
            with self.lock:
                left[0] -= 1
                if not left[0]:
                    self.connection.send(("stopped", transfer_id))

        for sender in group.senders:
            sender.abort(transfer_id, on_stopped)


def race_prefill(side: Side, address: str, victims: int) -> dict:
    """Returns: how writes ended, by kind of error"""
    give_up = time.monotonic() + 20
    while True:
        try:
            fenced = Fenced(address)
            break
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
    writers = [Writer(i, address, fenced) for i in range(len(WRITERS))]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(writer: Writer) -> None:
        try:
            writer.run(victims // len(WRITERS))
        except Exception as exc:  # noqa: BLE001 raised below
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(writer,), daemon=True) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(RACE_S + END_S)
    if failures:
        raise failures[0]
    return dict(sum((writer.errors for writer in writers), Counter()))
