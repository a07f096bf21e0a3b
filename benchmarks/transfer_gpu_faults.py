"""Faults of the GPU transfer benchmark: either side of a pair is killed or stopped at byte 0, half-way and at the end, over one transport.

A case opens with a whole transfer of the pair that will break, so that every case after the first also shows survivors and a fresh group,
or one that went on, working together. A survivor must be free within its deadline and a second; another pair must be equal byte for byte
right after; nothing may be written where the broken transfer's blocks have been given to others. Called by `transfer_gpu.py`.
"""

from __future__ import annotations

import itertools
import signal
import time
import traceback
from dataclasses import dataclass
from typing import Literal, Protocol

from benchmarks.transfer_gpu_groups import Child
from kv_transfer.quiet import GPU_QUIET_S
from kv_transfer.receiver import CHECKED_TRANSPORTS

LAYERS, TOKENS, BLOCKS = 12, 1024, (160, 40)
DEADLINE_S, MARGIN_S, HOLD_MS = 2.0, 1.0, 100
LATE_DEADLINE_S = 12.0  # of a writer that is stopped: longer than its sleep, so that it does write late
PLACES = {"byte 0": 0, "half": LAYERS // 2, "end": LAYERS}
PREFILL, DECODE = 0, 1
What = Literal["killed", "stopped"]


class Groups(Protocol):
    """What the benchmark lends: a pair that survives, fresh processes, numbers, a stamp for records, and where they and lines go."""

    prefill: Child
    decode: Child
    records: list[dict]
    stamp: dict

    def start(self, side: int) -> Child: ...
    def next_id(self) -> int: ...
    def say(self, line: str) -> None: ...
    def revive(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """`free_s`: from the fault until the survivor had nothing to do with it any more; `told`: how it was told."""

    free_s: float
    told: str


class FaultMatrix:
    """All cases over one transport. Starts processes of its own for the side that breaks; a stopped one goes on and is stopped again."""

    def __init__(self, groups: Groups, transport: str):
        self._groups, self._transport = groups, transport
        places = range(len(PLACES) + 1)
        self._fresh = {side: [groups.start(side) for _ in places] for side in (DECODE, PREFILL)}
        self._stopping: dict[int, Child] = {}

    def run(self) -> None:
        """Raises: AssertionError naming the cases that failed, after all have run"""
        failed = []
        self._open_survivors()
        for side, what, place in itertools.product((DECODE, PREFILL), ("killed", "stopped"), PLACES):
            name = f"{self._transport}, {('prefill', 'decode')[side]} {what} at {place}"
            try:
                outcome = self._run_case(side, what, PLACES[place])
                assert outcome.free_s <= DEADLINE_S + MARGIN_S, f"survivor free after {outcome.free_s:.2f} s only, {outcome.told}"
            except (AssertionError, RuntimeError, TimeoutError, OSError, EOFError) as error:  # the other cases go on
                failed.append(name)
                told = str(error) or type(error).__name__
                self._groups.say(f"{name}: FAILED: {told[-600:]}\n{traceback.format_exc(limit=-2)[-600:]}")
                for child in self._stopping.values():
                    child.kill()
                self._stopping.clear()
                self._groups.revive()
                self._open_survivors()
                outcome = Outcome(-1.0, f"FAILED: {told[:200]}")
            else:
                self._groups.say(f"{name}: survivor free after {outcome.free_s:.2f} s, {outcome.told}; another pair equal")
            self._groups.records.append(
                {"fault": what, "transport": self._transport, "side": ("prefill", "decode")[side], "place": place,
                 "free_s": round(outcome.free_s, 3), "deadline_s": DEADLINE_S, "outcome": outcome.told, **self._groups.stamp}
            )  # fmt: skip
        for child in [*self._stopping.values(), *self._fresh[PREFILL], *self._fresh[DECODE]]:
            child.kill()
        if failed:
            raise AssertionError("; ".join(failed))

    def _open_survivors(self) -> None:
        self._open(PREFILL, self._groups.prefill)
        self._open(DECODE, self._groups.decode)

    def _open(self, side: int, child: Child) -> Child:
        child.ready()
        if side == PREFILL:
            child.ask("prefill", tp=1, layers=LAYERS, num_tokens=TOKENS, transport=self._transport)
        else:
            child.ask("decode", tp=1, layers=LAYERS, num_blocks=BLOCKS, transports=(self._transport,), incarnation=self._groups.next_id())
        return child

    def _victim(self, side: int, what: What) -> Child:
        if what == "killed":
            return self._open(side, self._fresh_one(side))
        if side not in self._stopping:
            self._stopping[side] = self._open(side, self._fresh_one(side))
        return self._stopping[side]

    def _fresh_one(self, side: int) -> Child:
        return self._fresh[side].pop() if self._fresh[side] else self._groups.start(side)

    def _run_case(self, side: int, what: What, pause_at: int) -> Outcome:
        victim = self._victim(side, what)
        pair = (victim, self._groups.decode) if side == PREFILL else (self._groups.prefill, victim)
        self._must_be_equal(*pair)
        prefill, decode = pair
        broken = self._groups.next_id()
        deadline_s = LATE_DEADLINE_S if (side, what) == (PREFILL, "stopped") else DEADLINE_S
        reservation = decode.ask("reserve", broken, TOKENS)
        prefill.tell("hand_over", reservation, broken, pause_at=pause_at, hold_ms=HOLD_MS, deadline_s=deadline_s)
        if not prefill.pipe.poll(20) or prefill.pipe.recv()[0] != "paused":
            raise AssertionError("the writer did not come to the place where it should be stopped")
        if side == DECODE:
            return self._decode_breaks(victim, what, broken)
        return self._prefill_dies(victim, broken) if what == "killed" else self._prefill_stops(victim, broken)

    def _decode_breaks(self, victim: Child, what: What, broken: int) -> Outcome:
        prefill = self._groups.prefill
        self._break(victim, what)
        began = time.monotonic()
        prefill.pipe.send("go on")
        error = prefill.answer(20)["error"]
        free_s = time.monotonic() - began
        self._must_be_equal(prefill, self._groups.decode)
        if what == "killed":
            return Outcome(free_s, error or "all acknowledged before")
        victim.signal(signal.SIGCONT)
        difference = "" if error else victim.ask("difference", broken, broken, alone=False)
        assert not difference, f"acknowledged, and yet {difference}"
        victim.ask("wait_for_device")
        victim.ask("release", broken)
        self._must_be_equal(prefill, victim)
        return Outcome(free_s, error or "acknowledged, bytes equal after it went on")

    def _prefill_dies(self, victim: Child, broken: int) -> Outcome:
        self._break(victim, "killed")
        began = time.monotonic()
        time.sleep(GPU_QUIET_S)
        self._give_back(broken)
        free_s = time.monotonic() - began
        self._must_be_equal(self._groups.prefill, self._groups.decode, alone=True)
        time.sleep(0.2)
        self._must_be_equal(self._groups.prefill, self._groups.decode, alone=True)
        return Outcome(free_s, "its blocks given back, nothing written to them since")

    def _prefill_stops(self, victim: Child, broken: int) -> Outcome:
        """Where the receiver sees every write, the blocks are given to others while the writer sleeps, and its late writes must be refused.
        Where it does not, they wait for the writer's word, and only the others are free meanwhile."""
        is_checked = self._transport in CHECKED_TRANSPORTS
        self._break(victim, "stopped")
        began = time.monotonic()
        if is_checked:
            self._give_back(broken)
        self._must_be_equal(self._groups.prefill, self._groups.decode, alone=is_checked)
        free_s = time.monotonic() - began
        time.sleep(max(0.0, DEADLINE_S + 0.3 - free_s))  # as long as a lease
        victim.signal(signal.SIGCONT)
        victim.pipe.send("go on")
        error = victim.answer(20)["error"]
        if is_checked:
            assert error.startswith("TransferGivenUp"), f"a late write was not refused by the receiver: {error or 'acknowledged'}"
        else:
            assert not error, f"the writer went on in time, and yet {error}"
            difference = self._groups.decode.ask("difference", broken, broken, alone=False)
            assert not difference, f"acknowledged, and yet {difference}"
            self._give_back(broken)
        for _ in range(2):
            self._must_be_equal(self._groups.prefill, self._groups.decode, alone=True)
            time.sleep(0.2)
        self._groups.decode.ask("wait_for_device")
        self._must_be_equal(victim, self._groups.decode)
        how = "blocks of others meanwhile, late writes refused" if is_checked else "its blocks withheld until it spoke"
        return Outcome(free_s, f"{how}; the writer, when it went on: {error or 'all acknowledged, bytes equal'}")

    def _break(self, victim: Child, what: What) -> None:
        if what == "killed":
            victim.kill()
        else:
            victim.signal(signal.SIGSTOP)

    def _give_back(self, broken: int) -> None:
        """Poisons the blocks: whatever is written to them later is seen by the next transfer's check of what lies beside it."""
        self._groups.decode.ask("release", broken)

    def _must_be_equal(self, prefill: Child, decode: Child, *, alone: bool = False) -> None:
        """One whole transfer, every byte and the digest; with `alone`, nothing else in the pool may have been touched."""
        number = self._groups.next_id()
        result = prefill.ask("hand_over", decode.ask("reserve", number, TOKENS), number)
        assert not result["error"], f"a transfer of healthy groups: {result['error']}"
        difference = decode.ask("difference", number, number, alone=alone)
        found = decode.ask("verify", number)
        assert not difference, difference
        assert found == result["digests"], f"bytes equal, digests not: {found} {result['digests']}"
        decode.ask("release", number)
