"""KV geometry: windows, hand-over ranges and head ranges, against counting by hand."""

import pytest

from common.errors import LayoutMismatch
from common.kv_layout import KVGeometry, check_join, head_range, plan_pairs


def geometry(**changes) -> KVGeometry:
    values = dict(num_layers=4, num_kv_heads=8, head_dim=64, block_size_tokens=16, dtype="bfloat16", window_tokens=128,
                  sliding=(True, False, True, False))  # fmt: skip
    return KVGeometry(**{**values, **changes})


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("scheduled", [1, 2, 15, 16, 17, 100])
def test_sliding_blocks_worst_is_reached_and_never_passed(block_size, scheduled):
    g = geometry(block_size_tokens=block_size)
    spans = [(p + scheduled - 1) // block_size - g.first_live_block(p) + 1 for p in range(2000)]
    assert max(spans) == g.sliding_blocks_worst(scheduled)


@pytest.mark.parametrize("position", [0, 1, 126, 127, 128, 129, 143, 144, 1000])
def test_first_live_block_holds_the_oldest_visible_key(position):
    oldest = max(0, position - 127)
    assert geometry().first_live_block(position) == oldest // 16


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 127, 128, 129, 130, 143, 144, 145, 257, 1000])
def test_sliding_handover_covers_what_the_next_token_sees(num_tokens):
    first, count = geometry().handover_blocks(num_tokens, sliding=True)
    assert first * 16 <= max(0, num_tokens - 127)
    assert (first + count) * 16 >= num_tokens
    assert count <= geometry().sliding_blocks_worst(1)


def test_handover_bytes_of_the_real_model():
    """120b at 8,192 tokens: 307 MB with clipped sliding layers, from its published shape."""
    g = geometry(num_layers=36, sliding=(True, False) * 18)
    assert round(g.handover_bytes(8192) / 1e6) == 307


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("src", [1, 2, 4, 8])
@pytest.mark.parametrize("dst", [1, 2, 4, 8])
def test_every_decode_head_is_written_exactly_once(heads, src, dst):
    got = {}
    for pair in plan_pairs(heads, src, dst):
        for i in range(pair.num_heads):
            source = head_range(heads, src, pair.src_rank).start + pair.src_head + i
            target = (pair.dst_rank, pair.dst_head + i)
            assert target not in got
            got[target] = source
    wanted = {(r, i): head_range(heads, dst, r).start + i for r in range(dst) for i in range(head_range(heads, dst, r).count)}
    assert got == wanted


def test_the_reported_join_of_tp1_to_tp4_gives_two_heads_a_rank():
    assert [(p.dst_rank, p.src_head, p.num_heads) for p in plan_pairs(8, 1, 4)] == [(0, 0, 2), (1, 2, 2), (2, 4, 2), (3, 6, 2)]


def test_an_impossible_join_is_refused_with_every_reason():
    with pytest.raises(LayoutMismatch) as caught:
        check_join(geometry(), 3, geometry(block_size_tokens=32, dtype="float32"), 2)
    for part in ("block_size_tokens 16 != 32", "dtype bfloat16 != float32", "prefill: tp 3 and 8 KV heads"):
        assert part in str(caught.value)
