"""Where each layer, block and head lies in a rank's KV memory."""

from __future__ import annotations

import pytest
import torch

from common.errors import ShapeError
from common.kv_layout import HeadRange, KVGeometry
from model.kv_cache import KVCache

GEOMETRY = KVGeometry(5, 2, 4, 16, "float32", 128, (True, False, True, True, False))


def test_pools_follow_each_other_full_first():
    kv = KVCache(GEOMETRY, 1, 0, 3, 4, "cpu")
    block = 2 * 2 * 16 * 4
    assert kv.full.shape == (2, 3, 2, 2, 16, 4)
    assert kv.sliding.shape == (3, 4, 2, 2, 16, 4)
    assert kv.nbytes(GEOMETRY, 1, 0, 3, 4) == (2 * 3 + 3 * 4) * block * 4 == kv.buffer.numel()
    kv.buffer.view(torch.float32).copy_(torch.arange(kv.buffer.numel() // 4))
    assert kv.layer(1)[2, 1, 0, 5, 3] == ((2 * 2 + 1) * 2 * 16 + 5) * 4 + 3
    assert kv.layer(4)[0, 0, 0, 0, 0] == 3 * block
    assert [int(kv.layer(layer)[0, 0, 0, 0, 0]) for layer in (0, 2, 3)] == [6 * block, 10 * block, 14 * block]


def test_layers_are_views_of_given_memory_which_is_left_as_it_is():
    wanted = KVCache.nbytes(GEOMETRY, 2, 1, 2, 1)
    buffer = torch.full((wanted,), 7, dtype=torch.uint8)
    kv = KVCache(GEOMETRY, 2, 1, 2, 1, "cpu", buffer)
    assert (buffer == 7).all()
    kv.layer(0).fill_(0)
    assert int((buffer == 0).sum()) == 1 * 2 * 1 * 16 * 4 * 4
    assert kv.head_range == HeadRange(1, 1)


def test_own_memory_is_written_at_construction():
    kv = KVCache(GEOMETRY, 1, 0, 2, 2, "cpu")
    assert not kv.buffer.any()


def test_bf16_and_a_model_of_one_layer_kind():
    geometry = KVGeometry(2, 8, 64, 32, "bfloat16", 128, (False, False))
    kv = KVCache(geometry, 4, 3, 5, 0, "cpu")
    assert kv.full.dtype == torch.bfloat16
    assert kv.full.shape == (2, 5, 2, 2, 32, 64)
    assert kv.sliding.shape == (0, 0, 2, 2, 32, 64)
    assert kv.head_range == HeadRange(6, 2)


WANTED = KVCache.nbytes(GEOMETRY, 1, 0, 1, 1)


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(WANTED - 1, dtype=torch.uint8), torch.zeros(WANTED // 4), torch.zeros(WANTED, 2, dtype=torch.uint8)[:, 0]],
    ids=["short", "float", "strided"],
)
def test_memory_of_another_size_or_type_is_refused(buffer: torch.Tensor):
    with pytest.raises(ShapeError, match="KV buffer"):
        KVCache(GEOMETRY, 1, 0, 1, 1, "cpu", buffer)
