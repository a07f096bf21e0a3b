"""Block ids have one owner at any time, and their epochs tell grants apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.block_pool import BlockPool
from common.errors import CapacityError, ServingError


def test_epoch_rises_with_every_grant():
    pool = BlockPool(2)
    first = pool.allocate(2, "a")
    pool.free(first.block_ids, "a")
    second = pool.allocate(2, "b")
    assert dict(zip(second.block_ids, second.epochs, strict=True)) == {b: e + 1 for b, e in zip(*first.__dict__.values(), strict=True)}


def test_a_refused_allocation_takes_nothing():
    pool = BlockPool(3)
    pool.allocate(1, "a")
    with pytest.raises(CapacityError, match="3 KV blocks wanted, 2 of 3 free"):
        pool.allocate(3, "b")
    assert pool.num_free == 2


@pytest.mark.parametrize("blocks", [[0, 0], [1], [7]])
def test_only_the_owner_frees_and_only_once(blocks):
    pool = BlockPool(8)
    assert pool.allocate(1, "a").block_ids == (0,)
    pool.allocate(1, "b")
    with pytest.raises(ServingError):
        pool.free(blocks, "a")
    assert pool.num_free == 6
    pool.check()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=60))
def test_every_block_is_free_or_held_whatever_happens(steps):
    pool, held = BlockPool(12), {name: [] for name in "abc"}
    for owner, count in steps:
        if count == 0 and held[owner]:
            pool.free(held[owner].pop().block_ids, owner)
        elif count <= pool.num_free:
            held[owner].append(pool.allocate(count, owner))
        pool.check()
        ids = [b for grants in held.values() for grant in grants for b in grant.block_ids]
        assert len(set(ids)) == len(ids) == 12 - pool.num_free
