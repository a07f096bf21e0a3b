"""The keyed digest: equal across layouts and chunkings, equal to its plain twin, and changed by any change of bytes or places."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from common.errors import ShapeError
from common.kv_layout import head_range
from kernels.digest import MASK, DigestKey, kv_digest, kv_digest_ref

SECRET = b"0123456789abcdef0123456789abcdef"
LAYERS, HEADS, BLOCK, DIM, TOKENS = 3, 4, 16, 8, 70
INT = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def key_of(dtype: torch.dtype = torch.bfloat16, transfer_id: int = 7, secret: bytes = SECRET) -> DigestKey:
    row_bytes = DIM * dtype.itemsize
    return DigestKey.derive(secret, transfer_id, num_tokens=TOKENS, row_bytes=row_bytes, num_layers=LAYERS, num_kv_heads=HEADS)


def random_kv(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Per layer [2, HEADS, TOKENS, DIM]: random bits, NaN and infinities among them."""
    g = torch.Generator().manual_seed(seed)
    low, high = torch.iinfo(INT[dtype]).min, torch.iinfo(INT[dtype]).max
    return [torch.randint(low, high, (2, HEADS, TOKENS, DIM), generator=g).to(INT[dtype]).view(dtype) for _ in range(LAYERS)]


def paged(kv: torch.Tensor, heads: slice, ids: list[int], num_blocks: int) -> torch.Tensor:
    """[2, HEADS, TOKENS, DIM] -> pool [N, 2, K, S, D], unused elements NaN."""
    part = kv[:, heads].contiguous()
    pool = torch.full((num_blocks, 2, part.shape[1], BLOCK, DIM), float("nan"), dtype=kv.dtype)
    for position in range(TOKENS):
        pool[ids[position // BLOCK], :, :, position % BLOCK] = part[:, :, position]
    return pool


def digest_of(kv: list[torch.Tensor], key: DigestKey, *, tp: int = 1, cuts: tuple[int, ...] = (0, TOKENS), seed: int = 1) -> int:
    total = 0
    for rank in range(tp):
        heads = head_range(HEADS, tp, rank)
        ids = random.Random(seed + rank).sample(range(9), 5)
        for layer in range(LAYERS):
            pool = paged(kv[layer], slice(heads.start, heads.start + heads.count), ids, 9)
            for start, end in itertools.pairwise(cuts):
                first = start // BLOCK
                blocks = torch.tensor(ids[first : -(-end // BLOCK)])
                total += kv_digest(pool, blocks, first_logical=first, tokens=(start, end), layer=layer, first_head=heads.start, key=key)
    return total & MASK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tokens", [(0, 1), (15, 17), (16, 48), (3, 70), (64, 70)], ids=lambda t: f"{t[0]}-{t[1]}")
def test_digest_equals_its_plain_twin(tokens: tuple[int, int], dtype: torch.dtype) -> None:
    kv, key, ids = random_kv(3, dtype), key_of(dtype), [6, 2, 8, 0, 5]
    pool = paged(kv[1], slice(1, 3), ids, 9)
    first = tokens[0] // BLOCK
    blocks = torch.tensor(ids[first : -(-tokens[1] // BLOCK)])
    fields = {"first_logical": first, "tokens": tokens, "layer": 1, "first_head": 1, "key": key}
    assert kv_digest(pool, blocks, **fields) == kv_digest_ref(pool, blocks, **fields)


def test_digest_of_many_blocks_equals_its_plain_twin_across_cache_chunks() -> None:
    key = DigestKey.derive(SECRET, 1, num_tokens=1024, row_bytes=256, num_layers=1, num_kv_heads=1)
    pool = torch.randint(-(2**31), 2**31 - 1, (70, 2, 1, 16, 64)).to(torch.int32).view(torch.float32)
    blocks = torch.randperm(70)[:64]
    fields = {"first_logical": 0, "tokens": (0, 1024), "layer": 0, "first_head": 0, "key": key}
    assert kv_digest(pool, blocks, **fields) == kv_digest_ref(pool, blocks, **fields)


def test_digest_is_the_same_for_every_layout_chunking_and_block_order() -> None:
    kv, key = random_kv(), key_of()
    want = digest_of(kv, key)
    for tp, cuts in itertools.product((1, 2, 4), ((0, 70), (0, 1, 15, 33, 64, 70), tuple(range(71)))):
        assert digest_of(kv, key, tp=tp, cuts=cuts, seed=tp) == want


def test_digest_of_heads_that_several_ranks_hold_counts_per_rank() -> None:
    kv, key = random_kv(), key_of()
    assert digest_of(kv, key, tp=8) == 2 * digest_of(kv, key) & MASK


def test_every_flipped_bit_changes_the_digest() -> None:
    kv, key = random_kv(), key_of()
    want, rng = digest_of(kv, key), random.Random(5)
    flat = [layer.view(torch.int16).view(-1) for layer in kv]
    for _ in range(400):
        layer, word, bit = rng.randrange(LAYERS), rng.randrange(len(flat[0])), rng.randrange(16)
        mask = torch.tensor(1 << bit).to(torch.int16)
        flat[layer][word] ^= mask
        assert digest_of(kv, key) != want, (layer, word, bit)
        flat[layer][word] ^= mask
    assert digest_of(kv, key) == want


@pytest.mark.parametrize("bit", [14, 15])
def test_flipping_the_same_top_bit_in_two_places_changes_the_digest(bit: int) -> None:
    """Such pairs cancel in sums of 64-bit words with odd multipliers."""
    kv, key = random_kv(), key_of()
    want, rng = digest_of(kv, key), random.Random(6)
    flat = kv[0].view(torch.int16).view(-1)
    mask = torch.tensor(1 << bit).to(torch.int16)
    for _ in range(200):
        pair = torch.tensor(rng.sample(range(len(flat)), 2))
        flat[pair] ^= mask
        assert digest_of(kv, key) != want
        flat[pair] ^= mask


@pytest.mark.parametrize("what", ["layers", "heads", "kv", "blocks", "tokens", "words"])
def test_swapping_changes_the_digest(what: str) -> None:
    kv, key = random_kv(), key_of()
    want = digest_of(kv, key)
    swapped = [layer.clone() for layer in kv]
    one = swapped[1]
    if what == "layers":
        swapped[0], swapped[1] = swapped[1], swapped[0]
    elif what == "heads":
        one.copy_(kv[1][:, [1, 0, 2, 3]])
    elif what == "kv":
        one.copy_(kv[1][[1, 0]])
    elif what == "blocks":
        one[:, :, 0:16], one[:, :, 16:32] = kv[1][:, :, 16:32], kv[1][:, :, 0:16]
    elif what == "tokens":
        one[:, :, 5], one[:, :, 6] = kv[1][:, :, 6], kv[1][:, :, 5]
    else:
        one[0, 0, 0, 0:2], one[0, 0, 0, 2:4] = kv[1][0, 0, 0, 2:4], kv[1][0, 0, 0, 0:2]
    assert digest_of(swapped, key) != want


def test_tokens_outside_of_the_range_do_not_count() -> None:
    kv, key = random_kv(), key_of()
    pool = paged(kv[0], slice(0, HEADS), [0, 1, 2, 3, 4], 9)
    fields = {"first_logical": 0, "tokens": (5, 70), "layer": 0, "first_head": 0, "key": key}
    want = kv_digest(pool, torch.arange(5), **fields)
    pool[0, :, :, :5] = 1.0
    pool[4, :, :, 6:] = 1.0
    assert kv_digest(pool, torch.arange(5), **fields) == want


def test_the_key_depends_on_secret_and_transfer() -> None:
    kv = random_kv()
    digests = {digest_of(kv, key_of(transfer_id=t, secret=s)) for t in (1, 2) for s in (SECRET, SECRET[::-1])}
    assert len(digests) == 4


def test_rows_must_be_whole_words() -> None:
    with pytest.raises(ShapeError, match="32-bit words"):
        DigestKey.derive(SECRET, 1, num_tokens=1, row_bytes=6, num_layers=1, num_kv_heads=1)
