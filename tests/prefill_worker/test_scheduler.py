"""Chunks cover each prompt once, in order, and every block a chunk or a push needs is there while it needs it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import CapacityError
from common.kv_layout import KVGeometry
from prefill_worker.scheduler import PrefillScheduler, sliding_blocks_for

GEOMETRY = KVGeometry(4, 2, 64, 16, "float32", 128, (True, False, True, False))


@given(num_tokens=st.integers(1, 900), chunk_tokens=st.integers(16, 400), window=st.sampled_from([1, 16, 100, 128, 129]))
def test_chunks_cover_a_prompt_once_and_never_lose_a_key_that_is_still_seen(num_tokens, chunk_tokens, window):
    geometry = KVGeometry(2, 2, 64, 16, "float32", window, (True, False))
    scheduler = PrefillScheduler(geometry, 100, sliding_blocks_for(geometry, chunk_tokens, 0), chunk_tokens)
    scheduler.submit("a", num_tokens)
    holds, done = {}, 0
    while done < num_tokens:
        chunk = scheduler.next_chunk()
        assert (chunk.start, chunk.is_last) == (done, chunk.end == num_tokens)
        assert len(chunk.full_blocks) == geometry.blocks_for(chunk.end)

        def slot(position, chunk=chunk):
            logical = position // 16 - chunk.sliding_first
            assert logical >= 0
            return chunk.sliding_blocks[logical] * 16 + position % 16

        for position in range(chunk.start, chunk.end):
            holds[slot(position)] = position
        for key in range(max(0, chunk.start - window + 1), chunk.end):
            assert holds[slot(key)] == key
        done = chunk.end
        scheduler.chunk_done()
        handed_over = range(geometry.handover_blocks(num_tokens, sliding=True)[0] * 16, num_tokens)
        last_slots = {position: slot(position) for position in handed_over if position < done}
    scheduler.finish()
    assert all(holds[place] == position for position, place in last_slots.items())
    kept = scheduler.pools.sliding.num_blocks - scheduler.pools.sliding.num_free
    assert kept == geometry.handover_blocks(num_tokens, sliding=True)[1]
    scheduler.release("a")
    assert scheduler.pools.full.num_free == 100
    assert scheduler.pools.sliding.num_free == scheduler.pools.sliding.num_blocks


class SchedulerMachine(RuleBasedStateMachine):
    """Random submissions, computation, cancellations and ends of pushes: first in, first out, nothing leaks, nothing is shared."""

    def __init__(self):
        super().__init__()
        self.scheduler = PrefillScheduler(GEOMETRY, 40, sliding_blocks_for(GEOMETRY, 64, 2), 64)
        self.waiting: list[tuple[str, int]] = []
        self.computing: tuple[str, int] | None = None
        self.pushing: list[str] = []
        self.blocks: dict[str, set[int]] = {}
        self.counter = 0

    @rule(tokens=st.integers(1, 700))
    def submit(self, tokens):
        self.counter += 1
        if tokens > 640:
            with pytest.raises(CapacityError):
                self.scheduler.submit(f"k{self.counter}", tokens)
            return
        self.scheduler.submit(f"k{self.counter}", tokens)
        self.waiting.append((f"k{self.counter}", tokens))

    @rule()
    def compute(self):
        chunk = self.scheduler.next_chunk()
        if chunk is None:
            assert self.computing is None
            if self.waiting and not self.pushing:
                raise AssertionError("an idle group with free memory does not start the next prompt")
            return
        if self.computing is None:
            self.computing = self.waiting.pop(0)
        assert chunk.key == self.computing[0]
        assert chunk.end <= self.computing[1]
        self.blocks[chunk.key] = set(chunk.full_blocks)
        for other, blocks in self.blocks.items():
            assert other == chunk.key or not blocks & set(chunk.full_blocks)
        self.scheduler.chunk_done()
        if chunk.is_last:
            self.scheduler.finish()
            self.pushing.append(chunk.key)
            self.computing = None

    @precondition(lambda self: self.pushing or self.computing or self.waiting)
    @rule(data=st.data())
    def release(self, data):
        keys = [*self.pushing, *[key for key, _ in self.waiting], *([self.computing[0]] if self.computing else [])]
        key = data.draw(st.sampled_from(keys))
        self.scheduler.release(key)
        self.blocks.pop(key, None)
        self.pushing = [other for other in self.pushing if other != key]
        self.waiting = [other for other in self.waiting if other[0] != key]
        if self.computing and self.computing[0] == key:
            self.computing = None

    @invariant()
    def sums_agree(self):
        self.scheduler.pools.check()
        assert self.scheduler.num_waiting == len(self.waiting)
        assert self.scheduler.num_pushing == len(self.pushing)
        assert self.scheduler.computing == (self.computing[0] if self.computing else None)
        if not self.pushing and not self.computing:
            assert self.scheduler.pools.full.num_free == 40
            assert self.scheduler.pools.sliding.num_free == self.scheduler.pools.sliding.num_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_releasing_an_unknown_key_is_fine():
    PrefillScheduler(GEOMETRY, 4, 40, 64).release("nobody")
