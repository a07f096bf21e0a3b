"""The matrix of the GPU benchmark's faults, played on groups that only remember what they were told."""

from __future__ import annotations

import itertools
import signal

import pytest

from benchmarks import transfer_gpu_faults
from benchmarks.transfer_gpu_faults import FaultMatrix


class Group:
    """A process of either side that answers as a sound one does; `writes_late`: a writer that ignores that its transfer was revoked."""

    def __init__(self, world, side):
        self.world, self.side, self.pipe = world, side, self
        self.is_dead = self.is_stopped = False
        self.paused = None

    @property
    def can_answer(self):
        return not (self.is_dead or self.is_stopped)

    def ready(self):
        return self

    def ask(self, name, *arguments, alone=False, **options):
        assert self.can_answer, f"{name} asked of a group that can't answer"
        held = self.world.held.setdefault(self, {})
        if name == "reserve":
            held[arguments[0]] = "granted"
            return self, arguments[0]
        if name == "release":
            assert held.pop(arguments[0], None) is not None
        if name == "hand_over":
            decode, number = arguments[0]
            self.world.held[decode][number] = "written"
            return {"error": "", "digests": [number]}
        if name == "difference":
            if alone and self.world.late is self:
                return "something beside the hand-over was written"
            return "" if held[arguments[0]] == "written" else "nothing there"
        return [arguments[0]] if name == "verify" else None

    def tell(self, name, reservation, seed, *, pause_at, hold_ms, deadline_s):
        assert name == "hand_over"
        self.paused = (*reservation, self.world.now_s + deadline_s)
        self.world.places.append(pause_at)

    def poll(self, timeout_s):
        return True

    def recv(self):
        return "paused", None

    def send(self, word):
        assert word == "go on"

    def answer(self, timeout_s=60.0):
        """Of the transfer that was broken."""
        assert self.can_answer
        decode, number, deadline = self.paused
        if decode.is_dead:
            return {"error": "PeerLost: gone", "digests": []}
        if decode.is_stopped:
            return {"error": "TransferTimeout: silent", "digests": []}
        if self.world.now_s > deadline:
            return {"error": "TransferTimeout: it writes nothing any more", "digests": []}
        if number in self.world.held[decode]:
            self.world.held[decode][number] = "written"
            return {"error": "", "digests": [number]}
        if self.world.writes_late:
            self.world.late = decode
        return {"error": "TransferGivenUp: revoked", "digests": []}

    def signal(self, number):
        self.is_stopped = number == signal.SIGSTOP

    def kill(self):
        self.is_dead = True


class World:
    def __init__(self, *, writes_late=False):
        self.writes_late, self.late = writes_late, None
        self.now_s, self.stamp = 0.0, {"commit": "c0ffee"}
        self.held, self.records, self.lines, self.places, self.started = {}, [], [], [], []
        self._numbers = itertools.count(100)
        self.prefill, self.decode = self.start(0), self.start(1)

    def start(self, side):
        self.started.append(Group(self, side))
        return self.started[-1]

    def sleep(self, seconds):
        self.now_s += seconds

    def next_id(self):
        return next(self._numbers)

    def say(self, line):
        self.lines.append(line)

    def revive(self):
        self.late = None
        self.prefill, self.decode = self.start(0), self.start(1)


def play(monkeypatch, world, transport):
    monkeypatch.setattr(transfer_gpu_faults.time, "sleep", world.sleep)
    FaultMatrix(world, transport).run()


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
def test_either_side_breaks_either_way_at_every_place(monkeypatch, transport):
    world = World()
    play(monkeypatch, world, transport)
    cases = {(r["side"], r["fault"], r["place"]) for r in world.records}
    assert cases == set(itertools.product(("prefill", "decode"), ("killed", "stopped"), ("byte 0", "half", "end")))
    assert world.places == [0, 6, 12] * 4
    assert all(r["commit"] == "c0ffee" for r in world.records)
    assert not any("FAILED" in line for line in world.lines)
    assert all(group.is_dead for group in world.started[2:])  # those that broke; the pair that survived lives
    assert not world.prefill.is_dead
    assert not world.held[world.decode]  # every block given back
    told = {r["outcome"].split(";")[0] for r in world.records if (r["side"], r["fault"]) == ("prefill", "stopped")}
    assert told == {"its blocks withheld until it spoke" if transport == "cuda_ipc" else "blocks of others meanwhile, late writes refused"}


@pytest.mark.parametrize(("transport", "told"), [("cuda_ipc", "all acknowledged, bytes equal"), ("tcp", "TransferGivenUp: revoked")])
def test_a_writer_that_was_stopped_does_write_late(monkeypatch, transport, told):
    """One whose own deadline has passed writes nothing, and shows nothing of what becomes of late writes."""
    world = World()
    play(monkeypatch, world, transport)
    stopped = [r["outcome"] for r in world.records if (r["side"], r["fault"]) == ("prefill", "stopped")]
    assert len(stopped) == 3
    assert all(outcome.endswith(told) for outcome in stopped)


def test_a_late_write_fails_its_case_and_the_others_go_on(monkeypatch):
    world = World(writes_late=True)
    with pytest.raises(AssertionError, match="tcp, prefill stopped at byte 0; tcp, prefill stopped at half; tcp, prefill stopped at end"):
        play(monkeypatch, world, "tcp")
    assert len(world.records) == 12
    assert sum(r["outcome"].startswith("FAILED") for r in world.records) == 3


def test_a_survivor_that_is_free_too_late_fails_its_case(monkeypatch):
    clock = itertools.count(0, 4.0)
    monkeypatch.setattr(transfer_gpu_faults.time, "monotonic", lambda: next(clock))
    with pytest.raises(AssertionError, match="decode killed at byte 0"):
        play(monkeypatch, World(), "nccl")
