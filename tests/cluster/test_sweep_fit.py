"""What fits a decode group, counted from its configuration: by hand, and by the rules that its ranks and its engine go by."""

from __future__ import annotations

import pytest

from cluster.sweep_fit import GIB, Admission, Planned, cell_bytes, differences, planned_of, room_of, why_not
from common.config import parse_config
from common.kv_proto import geometry_to_proto
from common.proto import types_pb2
from model.decode_memory import decode_memory
from model.fixture import fixture_config, write_random_fixture
from model.kv_memory import full_blocks_in
from tests.support.fake_groups import KV

SHAPES = {"num_layers": 4, "hidden_size": 256, "intermediate_size": 256, "num_experts": 8, "num_qo_heads": 8, "num_kv_heads": 4}


def group(**changes):
    about = {"pool": "decode", "max_batch": 8, "max_model_len": 1000, "capacity_tokens": 1600, "weights": "mxfp4", "kv": KV}
    layout = types_pb2.Layout(tp=2, ep=2, dp=1)
    return types_pb2.GroupDescription(role=types_pb2.ROLE_DECODE, layout=layout, **(about | changes))


def config(path, **decode):
    pools = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode", "layout": {"tp": 2, "ep": 2}, **decode}]
    return parse_config({"model": {"path": str(path), "max_model_len": 1000}, "pools": pools})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_random_fixture(folder, **SHAPES)
    return folder


@pytest.mark.parametrize(
    ("batch", "tokens", "why"),
    [(8, 200, "8 x 13 KV blocks are needed, it has 100"), (9, 16, "max_batch is 8"), (1, 1001, "1,000"), (7, 200, ""), (8, 192, "")],
)
def test_a_batch_that_does_not_fit_is_told_why(batch, tokens, why):
    said = why_not(group(), batch, tokens)
    assert why in said
    assert bool(said) == bool(why)


def test_memory_of_a_cell_counts_the_heads_of_one_rank():
    """Of 8 heads a rank has 4; a block of 2 full or 2 sliding layers is 2 x 2 x 4 x 16 x 64 bf16 values; sliding rings have 9 at most."""
    block = 2 * 2 * 4 * 16 * 64 * 2
    assert cell_bytes(group(), None, 3, 160) == (3 * (10 + 9) * block, None)


def test_what_is_configured_goes_before_what_memory_holds(checkpoint):
    assert planned_of(group(), config(checkpoint, kv_blocks=77), None) == Planned(77, None)
    assert planned_of(group(), config(checkpoint), None) == Planned(None, None)
    assert planned_of(group(), config(checkpoint, kv_blocks=77), 10 * GIB).blocks == 77
    assert planned_of(group(pool="other"), config(checkpoint), None) is None


def test_blocks_follow_the_memory_that_weights_buffers_and_margin_leave(checkpoint):
    shapes = fixture_config(**SHAPES)
    found = decode_memory(shapes, tp=2, ep=2, weights="mxfp4", max_batch=8, max_positions=1000, device_bytes=4 * GIB)
    geometry = shapes.kv_geometry(16, "bfloat16")
    planned = planned_of(group(kv=geometry_to_proto(geometry)), config(checkpoint, max_batch=8), 4 * GIB)
    assert planned.memory.weights_bytes == found.weights
    assert planned.memory.besides_kv + found.kv == 4 * GIB
    assert planned.blocks == min(full_blocks_in(found.kv, geometry, 2, 8 * geometry.sliding_blocks_worst(1)), 8 * geometry.blocks_for(1000))


def test_a_limit_is_named_on_both_sides_and_a_difference_in_words():
    admissions = [Admission(160, 100, 20, 8, "all 8 places of the batch are taken"), Admission(320, 100, 0, 5, "20 KV blocks wanted")]
    room = room_of(group(), Planned(90, None), (160, 320), admissions)
    assert [(row.computed, row.computed_limit, row.confirmed, row.confirmed_limit) for row in room.largest] == [
        (8, "max_batch", 8, "max_batch"),
        (4, "KV blocks", 5, "KV blocks"),
    ]
    assert differences(room) == [
        "KV blocks: 90 computed, 100 confirmed (+11.1%)",
        "largest batch at 320 tokens: 4 computed, 5 confirmed (+25.0%)",
    ]
    assert differences(room_of(group(), None, (160,), admissions[:1])) == []
    assert differences(room_of(group(), Planned(100, None), (160, 320), admissions)) == []
