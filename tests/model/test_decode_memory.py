"""What a decode rank's memory is worked out to be against what packing really makes, and against the blocks a GPU group agrees on."""

from __future__ import annotations

import pytest
import torch

from benchmarks.transfer_served import random_checkpoint, shapes_of_20b
from decode_worker.scheduler import sliding_pool_of
from model.convert import convert_checkpoint
from model.decode_cuda import pack_weights
from model.decode_memory import decode_memory, empty_weights, tensor_bytes
from model.fixture import fixture_config
from model.kv_memory import full_blocks_in, full_blocks_of
from model.weights import load_shard
from tests.model.test_gpu_kv_memory import GEOMETRY, GIB, agree

SMALL = fixture_config(num_layers=2, vocab_size=1000, hidden_size=256, intermediate_size=256, num_experts=8, num_qo_heads=8, num_kv_heads=4)
LAYOUTS = [(1, 1), (2, 2), (2, 1), (4, 4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    random_checkpoint(folder, SMALL, "cpu")
    convert_checkpoint(folder, device="cpu")
    return folder


@pytest.mark.parametrize("weights", ["mxfp4", "fp8"])
@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_weights_take_what_the_packed_shard_takes(checkpoint, tp, ep, weights):
    for rank in range(tp):
        shard = load_shard(
            checkpoint, SMALL, tp=tp, ep=ep, rank=rank, device="cpu", dtype=torch.bfloat16, weights=weights, packed=True
        )  # fmt: skip
        packed, planned = pack_weights(shard), empty_weights(SMALL, tp=tp, ep=ep, rank=rank, weights=weights)
        assert tensor_bytes(planned) == tensor_bytes(packed)
        assert planned.layers[0].qkv.shape == packed.layers[0].qkv.shape


def test_a_whole_20b_rank_adds_up():
    """24 layers of 32 experts at 4.25 bits a weight, dense parts in two bytes, an eight-bit copy of the vocabulary."""
    memory = decode_memory(shapes_of_20b(24), tp=1, ep=1, weights="mxfp4", max_batch=128, max_positions=131072, device_bytes=140 * GIB)
    experts = 24 * 32 * 3 * 2880 * 2880 * 17 / 32
    dense = 2 * (24 * (5120 * 2880 + 4096 * 2880) + 2 * 201088 * 2880) + 201088 * 2880
    assert memory.weights == pytest.approx(experts + dense, rel=0.01)
    assert 0 < memory.step < GIB
    assert memory.kv == 140 * GIB - memory.besides_kv


def test_more_ranks_leave_more_for_kv():
    left = [
        decode_memory(shapes_of_20b(24), tp=tp, ep=tp, weights="fp8", max_batch=64, max_positions=8192, device_bytes=40 * GIB).kv
        for tp in (1, 2, 4, 8)
    ]
    assert left == sorted(left)
    assert left[0] < left[3]


def test_the_blocks_that_a_group_agrees_on_are_those_of_its_kv_bytes(monkeypatch):
    facts = agree(monkeypatch)
    assert facts.full_blocks == full_blocks_of(full_blocks_in(20 * GIB - GIB - 3 * GIB, GEOMETRY, 1, 100), None, 10**9)
    assert full_blocks_of(1000, None, 500) == 500
    assert full_blocks_of(1000, 77, 500) == 77
    assert full_blocks_in(-5, GEOMETRY, 1, 100) == 0
    assert sliding_pool_of(GEOMETRY, 3) == 3 * GEOMETRY.sliding_blocks_worst(1)
