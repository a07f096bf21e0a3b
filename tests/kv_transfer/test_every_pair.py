"""Any prefill TP to any decode TP: the bytes in the decode pools are the bytes without a transfer, and nothing else is touched."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kernels.digest import MASK
from kv_transfer.transports import nixl
from tests.support.kv_groups import DecodeGroup, PrefillGroup, assert_handed_over, geometry, joined

PROMPTS = (1, 15, 16, 17, 127, 128, 129, 130, 257, 1000)
PAIRS = list(itertools.product((1, 2, 4, 8), (1, 2, 4), (2, 8)))
NEEDS_NIXL = pytest.mark.skipif(not nixl.is_installed(), reason="the extra nixl is not installed")


def chunks(num_tokens: int, seed: int) -> list[tuple[int, int]]:
    """Odd ones, so that edges of chunks, blocks and the window fall in all ways."""
    rng = random.Random(seed)
    cuts = [0]
    while cuts[-1] < num_tokens:
        cuts.append(min(num_tokens, cuts[-1] + rng.choice((1, 7, 16, 33, 100, 250))))
    return list(itertools.pairwise(cuts))


def hand_over(prefill: PrefillGroup, decode: DecodeGroup, transfer_id: int) -> None:
    prefill.begin(decode.reserve(transfer_id, prefill.num_tokens))
    for start, end in chunks(prefill.num_tokens, transfer_id):
        prefill.push_chunk(transfer_id, start, end)
    results = prefill.finish(transfer_id)
    assert [result.error for result in results] == [None] * prefill.tp
    assert_handed_over(prefill, decode, transfer_id)
    for rank, receiver in enumerate(decode.receivers):
        found = receiver.verify(transfer_id)
        assert found.bytes == sum(result.bytes_per_rank[rank] for result in results)
        assert found.digest == sum(result.digest_per_rank[rank] for result in results) & MASK


def hand_over_all(prompts: list[int], prefill_tp: int, decode_tp: int, transport: str, **shape) -> None:
    g = geometry(**shape)
    for i, num_tokens in enumerate(prompts):
        prefill, decode = PrefillGroup(g, prefill_tp, num_tokens, transport, seed=i), DecodeGroup(g, decode_tp, (transport,))
        with joined(prefill, decode):
            hand_over(prefill, decode, 100 + i)


@pytest.mark.parametrize("transport", ["shm", "tcp", "cuda_ipc", "nccl"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "num_kv_heads"), PAIRS)
def test_every_pair_hands_over_the_same_bytes(prefill_tp: int, decode_tp: int, num_kv_heads: int, transport: str) -> None:
    i = PAIRS.index((prefill_tp, decode_tp, num_kv_heads))
    hand_over_all([PROMPTS[2 * i % 10], PROMPTS[(2 * i + 1) % 10]], prefill_tp, decode_tp, transport, num_kv_heads=num_kv_heads)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["shm", "tcp", "cuda_ipc", "nccl"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "num_kv_heads"), PAIRS)
def test_every_pair_hands_over_every_prompt(prefill_tp: int, decode_tp: int, num_kv_heads: int, transport: str) -> None:
    hand_over_all(list(PROMPTS), prefill_tp, decode_tp, transport, num_kv_heads=num_kv_heads)


@NEEDS_NIXL
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "num_kv_heads"), [(1, 1, 2), (2, 1, 8), (1, 2, 8)])
def test_some_pairs_hand_over_the_same_bytes_over_nixl(prefill_tp: int, decode_tp: int, num_kv_heads: int) -> None:
    hand_over_all([257], prefill_tp, decode_tp, "nixl", num_kv_heads=num_kv_heads)


@NEEDS_NIXL
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "num_kv_heads"), PAIRS)
def test_every_pair_hands_over_the_same_bytes_over_nixl(prefill_tp: int, decode_tp: int, num_kv_heads: int) -> None:
    hand_over_all([17, 1000], prefill_tp, decode_tp, "nixl", num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("transport", ["shm", "tcp", "cuda_ipc", "nccl"])
@pytest.mark.parametrize("prefill_tp", [1, 2, 4, 8])
def test_the_real_head_shape_goes_to_decode_tp_4(prefill_tp: int, transport: str) -> None:
    """8 heads of 64: decode rank r gets heads 2r and 2r + 1."""
    hand_over_all([130], prefill_tp, 4, transport, num_kv_heads=8, head_dim=64)


@pytest.mark.parametrize("transport", ["shm", "tcp", "cuda_ipc", "nccl"])
@pytest.mark.parametrize(
    "shape",
    [
        {"dtype": "float32"},
        {"block_size_tokens": 32, "window_tokens": 100},
        {"num_layers": 3, "sliding": (False, False, False)},
        {"num_layers": 2, "sliding": (True, True)},
        {"num_layers": 5, "sliding": (False, True, True, True, False)},
    ],
    ids=["fp32", "block 32 window 100", "only full", "only sliding", "uneven"],
)
def test_other_geometries_hand_over_the_same_bytes(shape: dict, transport: str) -> None:
    hand_over_all([129, 257], 2, 1, transport, **shape)


def test_transfers_of_several_prefill_groups_do_not_mix() -> None:
    g = geometry(8)
    decode = DecodeGroup(g, 2, ("shm", "tcp"), num_blocks=(80, 60))
    groups = [PrefillGroup(g, tp, n, transport, seed=tp) for tp, n, transport in ((1, 257, "shm"), (2, 130, "tcp"), (4, 300, "tcp"))]
    for i, prefill in enumerate(groups):
        prefill.begin(decode.reserve(i, prefill.num_tokens))
    for start in range(0, 300, 50):
        for i, prefill in enumerate(groups):
            if start < prefill.num_tokens:
                prefill.push_chunk(i, start, min(start + 50, prefill.num_tokens))
    for i, prefill in enumerate(groups):
        assert all(result.error is None for result in prefill.finish(i))
        assert_handed_over(prefill, decode, i)
        prefill.close()
    decode.close()


def test_a_flipped_bit_in_a_decode_pool_changes_what_verify_finds() -> None:
    g = geometry(2)
    prefill, decode = PrefillGroup(g, 1, 130, "shm"), DecodeGroup(g, 1, ("shm",))
    with joined(prefill, decode):
        hand_over(prefill, decode, 1)
        right, rng = decode.receivers[0].verify(1), random.Random(4)
        for _ in range(200):
            slides = rng.random() < 0.5
            pool = decode.views[0].pool(sliding=slides)
            block = rng.choice(decode.reserved[1][slides].block_ids[:-1])
            index = (rng.randrange(2), block, rng.randrange(2), rng.randrange(2), rng.randrange(16), rng.randrange(16))
            bits, bit = pool.view(torch.int16), 1 << rng.randrange(15)
            bits[index] ^= bit
            assert decode.receivers[0].verify(1).digest != right.digest, index
            bits[index] ^= bit
        assert decode.receivers[0].verify(1) == right
