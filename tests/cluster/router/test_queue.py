"""The queue of a prefill pool, with a clock that the test moves by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.queue import AGEING_S_PER_LEVEL, PrefillQueue, QueueLimits, Ticket, wait_until_free_ms
from common.errors import OverloadedError


def ticket(
    enqueued_s: float = 0.0, *, priority: int = 0, deadline_s: float = 1e9, prompt_tokens: int = 10, service_ms: float = 5.0
) -> Ticket:
    return Ticket(prompt_tokens, service_ms, deadline_s, enqueued_s, priority)


def queue(**limits) -> PrefillQueue:
    return PrefillQueue(QueueLimits(**limits))


def test_first_in_first_out():
    line = queue()
    tickets = [ticket(i) for i in range(5)]
    for t in tickets:
        line.push(t)
    assert [line.pop(0.0) for _ in range(6)] == [*tickets, None]


def test_priority_is_a_head_start_and_nobody_starves():
    line = queue()
    low = ticket(0.0, priority=-100)
    line.push(low)
    overtaken = 0
    now_s = 0.0
    while True:
        now_s += 0.05
        line.push(ticket(now_s, priority=100))
        if line.pop(now_s) is low:
            break
        overtaken += 1
    assert now_s == pytest.approx(200 * AGEING_S_PER_LEVEL, abs=0.2)
    assert overtaken > 0


def test_expired_work_is_never_handed_out():
    line = queue()
    late, fine = ticket(deadline_s=1.0), ticket(deadline_s=3.0)
    line.push(late)
    line.push(fine)
    assert line.pop(1.0) is fine
    assert line.pop(1.0) is None
    assert line.expire(1.0) == [late]
    assert len(line) == 0


def test_blocked_tickets_keep_their_place():
    line = queue()
    first, second = ticket(0.0), ticket(1.0)
    line.push(first)
    line.push(second)
    assert line.pop(0.0, lambda t: t is first) is second
    assert line.pop(0.0) is first


def test_cancellation_takes_out_exactly_that_one():
    line = queue()
    tickets = [ticket(0.0) for _ in range(4)]
    for t in tickets:
        line.push(t)
    assert line.remove(tickets[2])
    assert not line.remove(tickets[2])
    assert line.drain() == [tickets[0], tickets[1], tickets[3]]
    assert (len(line), line.prompt_tokens, line.service_ms) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("limits", "word"),
    [({"max_requests": 2}, "requests"), ({"max_prompt_tokens": 25}, "prompt tokens"), ({"max_wait_s": 1.0}, "wait")],
)
def test_each_bound_refuses_with_a_time_to_come_back(limits, word):
    line = queue(**limits)
    line.push(ticket())
    line.push(ticket())
    with pytest.raises(OverloadedError, match=word) as refused:
        line.push(ticket(), wait_ms=2500.0)
    assert refused.value.retry_after_s > 0
    assert len(line) == 2
    line.push(ticket(), wait_ms=2500.0, accepted_before=True)
    assert len(line) == 3


def test_one_prompt_above_the_token_bound_still_gets_into_an_empty_queue():
    line = queue(max_prompt_tokens=100)
    line.push(ticket(prompt_tokens=500))
    with pytest.raises(OverloadedError):
        line.push(ticket(prompt_tokens=1))


def test_work_ahead_counts_what_goes_before():
    line = queue()
    for priority, ms in ((0, 10.0), (5, 20.0), (-5, 40.0)):
        line.push(ticket(priority=priority, service_ms=ms))
    assert line.ahead_ms(0) == 30.0
    assert line.ahead_ms(5) == 20.0
    assert line.ahead_ms(-5) == 70.0
    assert line.ahead_ms(50) == 0.0


operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-100, 100), st.floats(0.1, 5)),
        st.tuples(st.just("pop"), st.just(0), st.just(0.0)),
        st.tuples(st.just("remove"), st.integers(0, 50), st.just(0.0)),
        st.tuples(st.just("expire"), st.just(0), st.just(0.0)),
    ),
    max_size=80,
)


@given(operations)
def test_any_sequence_hands_out_each_ticket_at_most_once_and_keeps_the_sums(steps):
    line, now_s, pushed, gone = queue(), 0.0, [], []
    for kind, number, life_s in steps:
        now_s += 0.3
        if kind == "push":
            pushed.append(ticket(now_s, priority=number, deadline_s=now_s + life_s, prompt_tokens=abs(number) + 1))
            line.push(pushed[-1])
        elif kind == "pop":
            got = line.pop(now_s)
            if got is not None:
                assert got.deadline_s > now_s
                waiting = [t for t in pushed if t not in gone and t.deadline_s > now_s]
                assert got.key == min(t.key for t in waiting)
                gone.append(got)
        elif kind == "remove" and number < len(pushed):
            was_there = pushed[number] not in gone
            assert line.remove(pushed[number]) == was_there
            if was_there:
                gone.append(pushed[number])
        elif kind == "expire":
            gone += line.expire(now_s)
    left = [t for t in pushed if t not in gone]
    assert len(gone) == len(set(map(id, gone)))
    assert len(line) == len(left)
    assert line.prompt_tokens == sum(t.prompt_tokens for t in left)
    assert line.service_ms == pytest.approx(sum(t.service_ms for t in left))


def test_wait_is_the_level_to_which_the_work_fills_up():
    assert wait_until_free_ms([0.0, 0.0], 0.0) == 0.0
    assert wait_until_free_ms([0.0, 10.0], 4.0) == 4.0
    assert wait_until_free_ms([0.0, 10.0], 30.0) == 20.0
    assert wait_until_free_ms([7.0, 50.0], 0.0) == 7.0
    assert wait_until_free_ms([], 5.0) == float("inf")


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-100, 100)), min_size=2, max_size=40))
def test_nobody_is_overtaken_by_who_came_later_than_its_priority_is_worth(arrivals):
    line = queue()
    for at_s, priority in arrivals:
        line.push(ticket(at_s, priority=priority))
    handed_out = [line.pop(0.0) for _ in arrivals]
    for i, after in enumerate(handed_out):
        for before in handed_out[:i]:
            head_start_s = (before.priority - after.priority) * AGEING_S_PER_LEVEL
            assert before.enqueued_s - after.enqueued_s <= head_start_s + 1e-9


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=16), st.floats(0, 1e6), st.integers(0, 15), st.floats(0, 1e5))
def test_more_work_or_busier_groups_never_shorten_the_wait(busy, ahead, which, more):
    before = wait_until_free_ms(sorted(busy), ahead)
    busier = list(busy)
    busier[which % len(busy)] += more
    assert before <= wait_until_free_ms(sorted(busier), ahead) * (1 + 1e-9) + 1e-9
    assert before <= wait_until_free_ms(sorted(busy), ahead + more) * (1 + 1e-9) + 1e-9
    assert wait_until_free_ms(sorted([*busy, more]), ahead) <= before * (1 + 1e-9) + 1e-9
