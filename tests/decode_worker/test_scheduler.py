"""Admission by worst case: property tests against a plain model of what is free."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import CapacityError
from common.kv_layout import KVGeometry
from decode_worker.scheduler import DecodeScheduler, Place, largest_batch, sliding_pool_of

GEOMETRY = KVGeometry(4, 2, 64, 16, "float32", 128, (True, False, True, False))
RING = GEOMETRY.sliding_blocks_worst(1)


class SchedulerMachine(RuleBasedStateMachine):
    """Random lives of requests; the model is a dict of (place, full blocks, sliding blocks)."""

    FULL, SLIDING, BATCH = 60, 5 * RING, 6

    def __init__(self):
        super().__init__()
        self.scheduler = DecodeScheduler(GEOMETRY, self.FULL, self.SLIDING, self.BATCH)
        self.model: dict[int, tuple[Place, int, int]] = {}
        self.next_id = 0
        self.in_use: dict[str, set[int]] = {"full": set(), "sliding": set()}
        self.blocks: dict[int, tuple[set[int], set[int]]] = {}

    @rule(tokens=st.integers(1, 700))
    def admit(self, tokens):
        full = -(-tokens // 16)
        sliding = min(full, RING)
        fits = (
            sum(place is not Place.HELD for place, *_ in self.model.values()) < self.BATCH
            and sum(f for _, f, _ in self.model.values()) + full <= self.FULL
            and sum(s for *_, s in self.model.values()) + sliding <= self.SLIDING
        )
        self.next_id += 1
        if not fits:
            with pytest.raises(CapacityError):
                self.scheduler.admit(self.next_id, tokens)
            return
        allotment = self.scheduler.admit(self.next_id, tokens)
        assert (len(allotment.full.block_ids), len(allotment.sliding.block_ids)) == (full, sliding)
        mine = (set(allotment.full.block_ids), set(allotment.sliding.block_ids))
        for other in self.blocks.values():
            assert not mine[0] & other[0]
            assert not mine[1] & other[1]
        self.blocks[self.next_id] = mine
        self.model[self.next_id] = (Place.RESERVED, full, sliding)

    def some(self, data, *places: Place) -> int | None:
        ids = [key for key, (place, *_) in self.model.items() if place in places]
        return data.draw(st.sampled_from(ids)) if ids else None

    @precondition(lambda self: self.model)
    @rule(data=st.data(), move=st.sampled_from(["start", "hold"]))
    def move(self, data, move):
        key = self.some(data, Place.RESERVED)
        if key is not None:
            getattr(self.scheduler, move)(key)
            self.model[key] = (Place.RUNNING if move == "start" else Place.HELD, *self.model[key][1:])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data):
        key = self.some(data, *Place)
        if key is not None:
            self.scheduler.release(key)
            del self.model[key], self.blocks[key]

    @invariant()
    def sums_agree(self):
        self.scheduler.pools.check()
        assert self.scheduler.pools.full.num_free == self.FULL - sum(f for _, f, _ in self.model.values())
        assert self.scheduler.pools.sliding.num_free == self.SLIDING - sum(s for *_, s in self.model.values())
        for place in Place:
            assert self.scheduler.count(place) == sum(p is place for p, *_ in self.model.values())


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_a_request_that_grows_to_its_worst_case_never_needs_another_block():
    """Report P08: a pool of 1.2 x one request admits one of four, and the others are refused at once, not frozen later."""
    tokens = 200
    scheduler = DecodeScheduler(GEOMETRY, int(1.2 * GEOMETRY.blocks_for(tokens)), 40 * RING, 8)
    allotment = scheduler.admit(1, tokens)
    assert len(allotment.full.block_ids) * 16 >= tokens
    for other in (2, 3, 4):
        with pytest.raises(CapacityError, match="KV blocks wanted"):
            scheduler.admit(other, tokens)
    scheduler.start(1)
    scheduler.release(1)
    scheduler.admit(2, tokens)


@pytest.mark.parametrize("tokens", [1, 16, 17, 100, 128, 300])
@pytest.mark.parametrize(("full_blocks", "max_batch"), [(60, 6), (60, 100), (3, 8), (19, 1)])
def test_the_largest_batch_is_what_is_admitted_before_one_is_refused(tokens, full_blocks, max_batch):
    scheduler = DecodeScheduler(GEOMETRY, full_blocks, sliding_pool_of(GEOMETRY, max_batch), max_batch)
    for transfer_id in range(largest_batch(GEOMETRY, full_blocks, max_batch, tokens)):
        scheduler.admit(transfer_id, tokens)
    with pytest.raises(CapacityError):
        scheduler.admit(10**6, tokens)
