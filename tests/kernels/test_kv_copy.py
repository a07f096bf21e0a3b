"""The copy kernel, emulated: the same bytes in the target and the same digest as its plain twin, and nothing beside them is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from common.errors import ShapeError
from kernels.digest import MASK, DigestKey
from kernels.kv_copy import MAX_SEGMENTS, Segment, Tally, TileShape, kv_copy, kv_copy_ref
from tests.support.emulated_cuda import emulated

__all__ = ["emulated"]

CPU = torch.device("cpu")
LAYERS, MODEL_HEADS = 3, 8
INT = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Case:
    source_heads: int = 4
    target_heads: int = 2
    source_head: int = 2
    target_head: int = 0
    num_heads: int = 2
    block_size: int = 16
    head_dim: int = 64
    tokens: tuple[int, int] = (5, 70)
    dtype: torch.dtype = torch.bfloat16
    shuffled: bool = True
    blocks: int = 2

    def __str__(self) -> str:
        start, end = self.tokens
        heads = f"K{self.source_heads}.{self.source_head}-{self.target_heads}.{self.target_head}"
        return f"{heads}-S{self.block_size}-D{self.head_dim}-T{start}-{end}"


BASE = Case()
CASES = [
    BASE,
    replace(BASE, tokens=(16, 48)),
    replace(BASE, tokens=(63, 64)),
    replace(BASE, tokens=(0, 1)),
    replace(BASE, source_heads=1, target_heads=4, source_head=0, target_head=3, num_heads=1),
    replace(BASE, source_heads=8, target_heads=8, source_head=0, num_heads=8, tokens=(0, 80)),
    replace(BASE, head_dim=8),
    replace(BASE, head_dim=16, block_size=32),
    replace(BASE, dtype=torch.float32, head_dim=64),
    replace(BASE, dtype=torch.float32, head_dim=128, tokens=(30, 33)),
    replace(BASE, shuffled=False),
    replace(BASE, source_heads=8, target_heads=4, source_head=4, num_heads=4, tokens=(0, 112), blocks=3),
    replace(BASE, source_heads=8, target_heads=8, source_head=1, target_head=2, num_heads=3, tokens=(3, 100), blocks=3),
    replace(BASE, dtype=torch.float32, head_dim=64, block_size=64, source_heads=2, source_head=0, tokens=(0, 300)),
]


def random_pool(case: Case, heads: int) -> torch.Tensor:
    dtype = INT[case.dtype]
    shape = (7, 2, heads, case.block_size, case.head_dim)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype).view(case.dtype)


def segment_of(case: Case, source: torch.Tensor, target: torch.Tensor | None, layer: int) -> Segment:
    first = case.tokens[0] // case.block_size
    count = -(-case.tokens[1] // case.block_size) - first
    source_ids = torch.randperm(7)[:count].int() if case.shuffled else None
    target_ids = torch.randperm(7)[:count].int() if case.shuffled else None
    address = target.data_ptr() if target is not None else 0
    heads = (case.source_head, case.target_head)
    return Segment(source.data_ptr(), address, *heads, source_ids, target_ids, case.tokens, first, layer, MODEL_HEADS - case.num_heads)


def shape_of(case: Case) -> TileShape:
    row_bytes = case.head_dim * case.dtype.itemsize
    return TileShape(case.block_size, row_bytes, case.source_heads, case.target_heads, case.num_heads, MODEL_HEADS)


def key_of(case: Case) -> DigestKey:
    row_bytes = case.head_dim * case.dtype.itemsize
    shape = {"num_layers": LAYERS, "num_kv_heads": MODEL_HEADS}
    return DigestKey.derive(b"secret", 9, num_tokens=max(case.tokens[1], 1), row_bytes=row_bytes, **shape)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_copy_equals_its_plain_twin(emulated, case: Case) -> None:
    source, targets = random_pool(case, case.source_heads), [random_pool(case, case.target_heads) for _ in range(LAYERS)]
    expected, key = [target.clone() for target in targets], key_of(case)
    segments = [segment_of(case, source, target, layer) for layer, target in enumerate(targets)]
    shape, tally = shape_of(case), Tally(CPU)
    tally.on_device[0] = -5
    kv_copy(segments, shape, key, tally, blocks=case.blocks)
    wanted = sum(kv_copy_ref(source, into, segment, shape, key) for into, segment in zip(expected, segments, strict=True))
    for got, want in zip(targets, expected, strict=True):
        assert got.view(INT[case.dtype]).equal(want.view(INT[case.dtype]))
    assert (tally.value() + 5) & MASK == wanted & MASK


def test_without_a_target_it_digests_alone(emulated) -> None:
    source, key, tally = random_pool(BASE, BASE.source_heads), key_of(BASE), Tally(CPU)
    segment = segment_of(BASE, source, None, 1)
    kv_copy([segment], shape_of(BASE), key, tally)
    assert tally.value() == kv_copy_ref(source, None, segment, shape_of(BASE), key)


def test_more_segments_than_one_launch_takes(emulated) -> None:
    case = replace(BASE, tokens=(0, 16))
    sources = [random_pool(case, case.source_heads) for _ in range(MAX_SEGMENTS + 3)]
    target = [random_pool(case, case.target_heads) for _ in sources]
    expected = [t.clone() for t in target]
    segments = [segment_of(case, s, t, i % LAYERS) for i, (s, t) in enumerate(zip(sources, target, strict=True))]
    key, tally = key_of(case), Tally(CPU)
    kv_copy(segments, shape_of(case), key, tally)
    triples = zip(sources, expected, segments, strict=True)
    assert tally.value() == sum(kv_copy_ref(s, e, segment, shape_of(case), key) for s, e, segment in triples) & MASK
    for got, want in zip(target, expected, strict=True):
        assert got.view(torch.int16).equal(want.view(torch.int16))


def test_a_tally_goes_on_with_the_next_launch_and_a_ring_of_stages_goes_round(emulated) -> None:
    """One thread block, more stages than it has room for, twice."""
    case = replace(BASE, source_heads=8, target_heads=8, source_head=0, num_heads=8, tokens=(1, 112))
    source, target, key, tally = random_pool(case, 8), random_pool(case, 8), key_of(case), Tally(CPU)
    expected = target.clone()
    segment = segment_of(case, source, target, 2)
    for launches in (1, 2):
        kv_copy([segment], shape_of(case), key, tally, blocks=1)
        assert tally.value() == launches * kv_copy_ref(source, expected, segment, shape_of(case), key) & MASK
    assert target.view(torch.int16).equal(expected.view(torch.int16))
    assert tally.on_device[1] == 0


def test_heads_of_blocks_larger_than_a_stage_are_refused() -> None:
    with pytest.raises(ShapeError, match="16384 at most"):
        TileShape(64, 512, 1, 1, 1, 1)


@pytest.mark.parametrize("row_bytes", [8, 48, 1024])
def test_rows_that_a_warp_cannot_share_are_refused(row_bytes: int) -> None:
    with pytest.raises(ShapeError, match="copies on a GPU take"):
        TileShape(16, row_bytes, 1, 1, 1, 1)
