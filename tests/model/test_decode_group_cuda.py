"""A decode step cut over the ranks of a group, through the CUDA kernels' own source (run on the CPU), against the plain fp32 forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.peers import PeerLayout
from model.decode_cuda import CudaDecode, pack_weights
from model.kv_cache import KVCache
from model.shards import ExpertShard, Fp8Matrix, ShardWeights
from tests.model.test_decode_cuda import CONFIG, EXPERTS, HEADS, KV_HEADS, VOCAB, S, make_case, make_shards
from tests.support.emulated_cuda import emulated  # noqa: F401
from tests.support.emulated_peers import emulated_peers
from tests.support.thread_group import run_ranks

LENS, RANKS = [33, 140, 7], 2


def cut_shard(whole: ShardWeights, rank: int) -> ShardWeights:
    """Attention by heads, whole experts, the vocabulary by rows."""

    def heads(count, first):
        return range((first + rank * count // RANKS) * 64, (first + (rank + 1) * count // RANKS) * 64)

    qkv = [*heads(HEADS, 0), *heads(KV_HEADS, HEADS), *heads(KV_HEADS, HEADS + KV_HEADS)]
    q, mine = list(heads(HEADS, 0)), slice(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)

    def matrix(m):
        return replace(
            m, **{name: getattr(m, name)[mine] for name in (("values", "scales") if isinstance(m, Fp8Matrix) else ("blocks", "scales"))}
        )

    layers = tuple(
        replace(
            layer, qkv=layer.qkv[qkv], qkv_bias=layer.qkv_bias[qkv], o=layer.o[:, q].contiguous(),
            sinks=layer.sinks[rank * HEADS // RANKS : (rank + 1) * HEADS // RANKS],
            experts=ExpertShard(mine.start, layer.experts.intermediate, matrix(layer.experts.gate_up), layer.experts.gate_up_bias[mine],
                                matrix(layer.experts.down), layer.experts.down_bias[mine]),
        )
        for layer in whole.layers
    )  # fmt: skip
    words = slice(rank * VOCAB // RANKS, (rank + 1) * VOCAB // RANKS)
    return ShardWeights(RANKS, RANKS, rank, whole.embed, layers, whole.norm, whole.lm_head[words], words.start)


@pytest.mark.parametrize(("needs_logits", "weights"), [(False, "mxfp4"), (True, "mxfp4"), (True, "fp8")])
def test_ranks_together_are_the_plain_forward(emulated, needs_logits, weights):  # noqa: F811
    """Greedy rows either way: the likeliest word of all ranks, or rank 0's choice from all logits."""
    alone, want, caches = make_case(LENS, weights=weights)
    whole, _ = make_shards(1, weights)
    wider = 3 if weights == "fp8" else 1
    peers = emulated_peers(PeerLayout(RANKS, len(LENS), CONFIG.hidden_size, VOCAB))

    def rank_main(group):
        kv_heads = slice(group.rank * KV_HEADS // RANKS, (group.rank + 1) * KV_HEADS // RANKS)
        kv = KVCache(CONFIG.kv_geometry(S, "bfloat16"), RANKS, group.rank, caches[0].full.shape[1], caches[0].sliding.shape[1], "cpu")
        kv.full.copy_(caches[0].full[:, :, :, kv_heads])
        kv.sliding.copy_(caches[0].sliding[:, :, :, kv_heads])
        mine = peers[group.rank]
        positions = alone.inputs.full_table.shape[1] * S
        decode = CudaDecode(
            CONFIG, pack_weights(cut_shard(whole, group.rank)), kv, max_batch=len(LENS), max_positions=positions, device="cpu",
            open_peers=lambda status: mine,
        )  # fmt: skip
        decode.inputs.packed.copy_(alone.inputs.packed)
        decode.inputs.full_table.copy_(alone.inputs.full_table)
        decode.token_ids.copy_(alone.token_ids)
        decode.step(len(LENS), needs_logits=needs_logits)
        return decode.token_ids.clone(), decode._scratch.residual.clone()

    results = run_ranks(RANKS, rank_main)
    for tokens, residual in results:
        assert torch.equal(tokens, results[0][0])
        assert torch.equal(residual, results[0][1])  # added in one order everywhere
        for token, row in zip(tokens.tolist(), want, strict=True):
            assert row[token] >= row.max() - wider * 0.05 * row.std()
    if needs_logits:
        error = (peers[0].logits - want).abs()
        assert error.max() < wider * 3e-2 * want.abs().max(), f"{error.max()} of {want.abs().max()}"
        assert torch.equal(results[0][0], peers[0].logits.argmax(-1).int())
