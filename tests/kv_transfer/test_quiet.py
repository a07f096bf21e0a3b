"""Blocks of a dead writer are reused only after its GPU has had time to drop what it had enqueued."""

from __future__ import annotations

from common.proto import types_pb2
from kv_transfer.quiet import Quiet

A, B = (types_pb2.ProcessIdentity(host="h", pid=pid, start_ticks=5) for pid in (1, 2))


def test_quiet_comes_some_time_after_each_process_was_seen_dead() -> None:
    now, dead = [10.0], set()
    quiet = Quiet(1.0, clock=lambda: now[0], is_dead=lambda process: process.pid in dead)
    assert not quiet(A)
    now[0] = 20.0
    dead.add(1)
    assert not quiet(A)
    now[0] = 20.9
    dead.add(2)
    assert not quiet(A)
    assert not quiet(B)
    now[0] = 21.0
    assert quiet(A)
    assert not quiet(B)
    now[0] = 21.9
    assert quiet(B)


def test_writes_of_a_cpu_end_with_the_process() -> None:
    assert Quiet(0.0, clock=lambda: 0.0, is_dead=lambda _: True)(A)


def test_of_a_thousand_processes_that_died_only_the_last_minute_is_remembered() -> None:
    now = [0.0]
    quiet = Quiet(1.0, clock=lambda: now[0], is_dead=lambda _: True)
    for pid in range(1, 1001):
        now[0] += 10.0
        assert not quiet(types_pb2.ProcessIdentity(host="h", pid=pid, start_ticks=5))
        assert len(quiet) <= 8


def test_who_asks_again_after_it_was_forgotten_waits_once_more() -> None:
    now = [0.0]
    quiet = Quiet(1.0, clock=lambda: now[0], is_dead=lambda _: True)
    assert not quiet(A)
    now[0] = 100.0
    assert not quiet(B)
    assert not quiet(A)
    now[0] = 101.0
    assert quiet(A)
