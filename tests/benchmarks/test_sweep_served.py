"""The checkpoint of the served sweep sends tokens to all experts in all layers, as a trained model does."""

from __future__ import annotations

import torch

from benchmarks.sweep_served import QUIET_SCALES, SPREADS, tiny_shapes
from benchmarks.transfer_served import random_checkpoint
from model import gpt_oss
from model.batch import SequenceView, build_prefill_batch
from model.gpt_oss import GptOss
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from model.weights import load_shard

TOKENS, BLOCK = 512, 16


def shares(folder, monkeypatch, **options) -> list[float]:
    """Of the most used expert in each layer, as a multiple of an even share."""
    config = tiny_shapes()
    random_checkpoint(folder, config, "cpu", **options)
    chosen, own = [], gpt_oss.route_ref

    def watched(*arguments):
        ids, weights = own(*arguments)
        chosen.append(ids)
        return ids, weights

    monkeypatch.setattr(gpt_oss, "route_ref", watched)
    shard = load_shard(folder, config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")
    blocks = TOKENS // BLOCK
    kv = KVCache(config.kv_geometry(BLOCK, "float32"), 1, 0, blocks, blocks, "cpu")
    ids = torch.randint(0, config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(4)).tolist()
    batch = build_prefill_batch(SequenceView(ids, 0, list(range(blocks)), 0, list(range(blocks))), BLOCK, "cpu")
    GptOss(config, shard, LocalGroup(), "cpu").forward(batch, kv)
    even = TOKENS * config.experts_per_token / config.num_experts
    return [float(layer.flatten().bincount().max()) / even for layer in chosen]


def test_tokens_spread_over_the_experts_of_every_layer(tmp_path, monkeypatch):
    assert max(shares(tmp_path, monkeypatch, scales=QUIET_SCALES, spreads=SPREADS)) < 2


def test_the_usual_random_checkpoint_would_not_do(tmp_path, monkeypatch):
    assert max(shares(tmp_path, monkeypatch)) > 3
