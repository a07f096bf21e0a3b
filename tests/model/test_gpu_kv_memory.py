"""How many KV blocks a GPU rank offers: what its card has free behind weights, step and margin; and that the step takes what it says."""

from __future__ import annotations

import pytest
import torch

from common.errors import ConfigError
from common.rank_spec import RankSpec
from model.control import LeaderChannel
from model.decode_cuda import _nbytes, buffer_bytes
from model.group import GroupLinks
from model.kv_memory import agree_on_memory
from model.parallel import LocalGroup
from tests.model.test_decode_cuda import CONFIG, FORMATS, S, make_case

GEOMETRY = CONFIG.kv_geometry(S, "bfloat16")
GIB = 1 << 30
BLOCK_BYTES = len(GEOMETRY.full_layers) * 2 * GEOMETRY.num_kv_heads * GEOMETRY.head_block_bytes


def agree(monkeypatch, *, free=20 * GIB, useful=10**9, **options):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 141 * GIB))
    spec = RankSpec("p", "g", "decode", "", 1, 1, 0, "", 1, b"", device="cuda", **options)
    links = GroupLinks(LocalGroup(), LeaderChannel([]))
    return agree_on_memory(spec, links, GEOMETRY, sliding_blocks=100, useful_full_blocks=useful, leader_address="", step_bytes=GIB)


def test_blocks_fill_what_the_card_has_left(monkeypatch):
    sliding = 100 * BLOCK_BYTES // len(GEOMETRY.full_layers) * len(GEOMETRY.sliding_layers)
    facts = agree(monkeypatch)
    left = 20 * GIB - GIB - 3 * GIB - sliding
    assert facts.full_blocks == left // BLOCK_BYTES
    assert agree(monkeypatch, free=40 * GIB).full_blocks - facts.full_blocks == pytest.approx(20 * GIB // BLOCK_BYTES, abs=1)


def test_no_more_blocks_than_can_be_used_or_than_were_asked_for(monkeypatch):
    assert agree(monkeypatch, useful=500).full_blocks == 500
    assert agree(monkeypatch, kv_blocks=77).full_blocks == 77


@pytest.mark.parametrize("options", [{"free": 3 * GIB}, {"kv_blocks": 10**9}])
def test_what_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch, options):
    with pytest.raises(ConfigError, match="bytes"):
        agree(monkeypatch, **options)


@FORMATS
def test_the_steps_share_is_what_its_buffers_take(weights):
    decode, _, _ = make_case([40, 33, 7], weights=weights)
    taken = _nbytes(decode._scratch) + _nbytes(decode.inputs)
    split = sum(part.nbytes for part in (decode._scratch.split.partial_acc, decode._scratch.split.partial_stats))
    computed = buffer_bytes(CONFIG, decode._weights, max_batch=3, max_positions=48)
    assert taken - split <= computed <= taken
