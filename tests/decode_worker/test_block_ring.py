"""The ring of sliding blocks holds exactly the window, for every length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_layout import KVGeometry
from decode_worker.block_ring import BlockTables


@given(
    block_size=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([1, 16, 100, 128, 129]),
    prompt=st.integers(1, 700),
    steps=st.integers(1, 400),
)
def test_no_key_inside_the_window_is_ever_overwritten(block_size, window, prompt, steps):
    geometry = KVGeometry(2, 2, 64, block_size, "float32", window, (True, False))
    blocks = geometry.blocks_for(prompt + steps)
    ring = tuple(range(100, 100 + min(blocks, geometry.sliding_blocks_worst(1))))
    tables = BlockTables(tuple(range(blocks)), ring)
    holds: dict[int, int] = {}  # slot -> position, as a sliding layer's pool would have it
    first, count = geometry.handover_blocks(prompt, sliding=True)
    for logical, block in zip(range(first, first + count), tables.sliding_range(first, count), strict=True):
        for position in range(logical * block_size, min((logical + 1) * block_size, prompt)):
            holds[block * block_size + position % block_size] = position
    for position in range(prompt, prompt + steps):
        first, ids = tables.sliding_at(geometry, position)
        assert len(set(ids)) == len(ids)
        holds[ids[position // block_size - first] * block_size + position % block_size] = position
        for key in range(max(0, position - window + 1), position + 1):
            assert holds[ids[key // block_size - first] * block_size + key % block_size] == key


@pytest.mark.parametrize("count", [0, 1, 9])
def test_sliding_range_goes_round_the_ring(count):
    tables = BlockTables((), tuple(range(9)))
    assert tables.sliding_range(7, count) == tuple(logical % 9 for logical in range(7, 7 + count))
