"""The board: after any history its entries say what each pool, asked on its own, would say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.cost_model import PairLoad, PoolSpec, Shape, itl_ms, prefill_ms
from cluster.profile import builtin_profile
from cluster.router.board import Board
from cluster.router.choice import Out
from cluster.router.pool import PoolSet
from cluster.router.queue import QueueLimits, Ticket
from common.kv_layout import KVGeometry
from common.proto import router_pb2
from tests.support.still_groups import add_decode, add_prefill

KV = KVGeometry(4, 8, 64, 16, "bfloat16", 128, (True, False, True, False))
PROFILE = builtin_profile(36, on_cuda=True)
SHAPE = Shape(prompt=3000, output=200, worst=3200)


def make_pools(groups: int = 2) -> PoolSet:
    pools = PoolSet()
    for tp in (1, 4):
        add_prefill(pools, PoolSpec(f"p{tp}", tp=tp, ep=tp, weights="fp8"), PROFILE, groups)
        add_decode(pools, PoolSpec(f"d{tp}", tp=tp, ep=tp, max_batch=6, capacity_tokens=40_000, kv=KV), PROFILE, groups)
    return pools


def check(pools: PoolSet, board: Board, now_s: float, priority: int = 0) -> None:
    prefills, decodes = board.prefill(SHAPE, now_s, priority), board.decode(SHAPE, now_s)
    for i, pool in enumerate(pools.prefill.values()):
        links = list(pool.order)
        assert (i in prefills.out) == (not pool.is_open or not links or bool(pool.queue.refusal(SHAPE.prompt, prefills.wait_ms[i])))
        if i in prefills.out:
            continue
        late = any(link.book.late_at_s <= now_s for link in links if link.book.given)
        assert prefills.wait_ms[i] == pytest.approx(pool.wait_ms(links, now_s, priority), abs=10.1 if late else 1e-6)
        factor = pool.correction.factor(SHAPE.prompt, now_s)
        assert prefills.prefill_ms[i] == pytest.approx(prefill_ms(pool.prepared, SHAPE.prompt, factor), rel=3e-3)
    for j, pool in enumerate(pools.decode.values()):
        links = list(pool.order)
        assert (j in decodes.out) == (not pool.is_open or not links)
        if j in decodes.out:
            continue
        book, share = links[0].book, len(pool.expected) / len(links)
        load = PairLoad(0.0, book.batch + share, book.context_tokens + sum(pool.expected.values()) / len(links))
        assert decodes.itl_ms[j] == pytest.approx(itl_ms(pool.prepared, load, SHAPE, pool.itl.factor(now_s)), rel=3e-3)
        has_room = pool.front is None and any(link.book.has_room(KV.blocks_for(SHAPE.worst)) for link in links)
        assert (decodes.wait_ms is not None and decodes.wait_ms[j] > 0) == (not has_room)


KINDS = (
    "give",
    "take",
    "attach",
    "detach",
    "load",
    "expect",
    "forget",
    "front",
    "leave",
    "queue",
    "pop",
    "learn",
    "health",
    "state",
    "wait",
)
steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 10**6)), max_size=60)


@given(steps)
@example([("give", 0), ("give", 52), ("wait", 51), ("give", 2)])  # the first group is late, and the second one is free long before it
@settings(deadline=None)
def test_entries_follow_any_history(history):
    pools = make_pools()
    board = Board(pools, PROFILE)
    now_s = 100.0
    for serial, (what, number) in enumerate(history):
        prefill = list(pools.prefill.values())[number % 2]
        decode = list(pools.decode.values())[number % 2]
        giver, taker = list(prefill.links.values())[number // 2 % 2], list(decode.links.values())[number // 2 % 2]
        if what == "give":
            giver.book.give(serial, 1.0 + number % 500, now_s)
        elif what == "take" and giver.book.given:
            giver.book.take_back(next(iter(giver.book.given)), now_s)
        elif what == "attach":
            taker.book.attach(serial, number % 9000)
        elif what == "detach":
            taker.book.detach(serial - 3)
        elif what == "load":
            taker.book.take_load(number % 7, number % 50_000, number % 2500, 2500)
        elif what == "expect":
            decode.expect(serial, number % 5000)
        elif what == "forget" and decode.expected:
            decode.forget(next(iter(decode.expected)))
        elif what == "front":
            decode.no_room("big")
        elif what == "leave":
            decode.leave_front("big")
        elif what == "queue":
            prefill.queue.push(Ticket(number % 9000, float(number % 300), now_s + 50, now_s, priority=number % 3))
        elif what == "pop":
            prefill.queue.pop(now_s)
        elif what == "learn":
            prefill.correction.observe(SHAPE.prompt, 100.0, 50.0 + number % 200, now_s)
            decode.itl.observe(10.0, 5.0 + number % 30, now_s)
            prefill.has_learnt()
            decode.has_learnt()
        elif what == "health":
            giver.can_take = not giver.can_take
        elif what == "state":
            prefill.set_state(router_pb2.POOL_STATE_DRAINING if prefill.is_open else router_pb2.POOL_STATE_ACTIVE)
        else:
            now_s += number % 3000 / 1e3
        prefill.refresh(giver)
        decode.refresh(taker)
        check(pools, board, now_s, priority=number % 3)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 4000)), max_size=40), st.sampled_from([0, 1]))
def test_work_added_to_a_pool_never_makes_it_look_better(work, where):
    """Prefill work of any size on any group or in the queue; equal sequences on whichever decode group is the next to get one."""
    pools, tokens = make_pools(groups=3), 3000
    board = Board(pools, PROFILE)
    prefill, decode = list(pools.prefill.values())[where], list(pools.decode.values())[where]
    wait_ms = itl_ms = 0.0
    for serial, (is_queued, which, service_ms) in enumerate(work):
        if is_queued:
            prefill.queue.push(Ticket(10, float(service_ms), 1e9, 1.0))
        else:
            group = prefill.order.items()[which % 3]
            group.book.give(serial, float(service_ms), 1.0)
            prefill.refresh(group)
        best = decode.order.first()
        best.book.attach(serial, tokens)
        decode.refresh(best)
        before, wait_ms = wait_ms, board.prefill(SHAPE, 1.0).wait_ms[where]
        assert wait_ms >= before - 1e-6
        before, itl_ms = itl_ms, board.decode(SHAPE, 1.0).itl_ms[where]
        assert itl_ms >= before - 1e-9


def test_left_out_groups_count_for_this_choice_only():
    pools = make_pools()
    board = Board(pools, PROFILE)
    first, second = pools.decode["d1"].links.values()
    first.book.attach("a", 4000)
    pools.decode["d1"].refresh(first)
    idle = board.decode(SHAPE, 1.0).itl_ms[0]
    assert board.decode(SHAPE, 1.0, frozenset({second.incarnation})).itl_ms[0] > idle
    both = frozenset({first.incarnation, second.incarnation})
    assert board.decode(SHAPE, 1.0, both).out[0].kind in (Out.DRAINING, Out.UNHEALTHY)
    assert board.decode(SHAPE, 1.0).itl_ms[0] == idle
    assert not board.decode(SHAPE, 1.0).out
    groups = frozenset(link.incarnation for link in pools.prefill["p4"].order)
    assert list(board.prefill(SHAPE, 1.0, avoid=groups).out) == [1]
    assert not board.prefill(SHAPE, 1.0).out


def test_requests_that_no_pool_can_hold_are_out_by_name():
    pools = make_pools()
    board = Board(pools, PROFILE)
    long = Shape(prompt=39_000, output=5, worst=50_000)
    assert {out.kind for out in board.decode(long, 1.0).out.values()} == {Out.TOO_LONG}
    assert len(board.prefill(Shape(200_000, 5, 200_005), 1.0).out) == 2


def test_a_queue_that_waits_too_long_is_full():
    pools = PoolSet()
    pool = add_prefill(pools, PoolSpec("p", weights="fp8"), PROFILE, limits=QueueLimits(max_wait_s=1.0))
    board = Board(pools, PROFILE)
    (link,) = pool.links.values()
    link.book.give("a", 5000.0, 0.0)
    pool.refresh(link)
    assert board.prefill(SHAPE, 0.1).out[0].kind is Out.FULL
    assert not board.prefill(SHAPE, 4.5).out
    assert np.isclose(board.prefill(SHAPE, 4.5).wait_ms[0], 500.0)
