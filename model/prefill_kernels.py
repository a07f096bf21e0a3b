"""Compiles the kernels of the prefill forward before a rank starts: FlashInfer's, Triton's and our own, into the caches ranks look into.

Kernels depend on the sizes of a layer, not on its weights or on how many layers there are: so one layer of zeros stands for all. Called by
`tandem prepare` on nodes with a GPU; a rank that finds nothing compiled compiles the same at its start.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.reference import FP8_BLOCK
from model.config import ModelConfig
from model.fp8_folder import padded
from model.kv_cache import KVCache
from model.layout import RankCut, cut_for_rank
from model.parallel import LocalGroup
from model.prefill_cuda import CudaPrefill
from model.prefill_graph import EAGER_WARM_TOKENS, GraphedPrefill, buckets_of
from model.prefill_weights import SERVED_PROJECTIONS, PrefillWeights, Projections, prepare_prefill_weights
from model.shards import ExpertShard, Fp8Matrix, LayerShard, ShardWeights

SLIDING = (True, False, True, False)  # both kinds of layer, each also before the last, which computes less


def compile_prefill_kernels(
    config: ModelConfig,
    *,
    tp: int,
    ep: int,
    block_size: int,
    projections: Projections = SERVED_PROJECTIONS,
    device: torch.device | str,
    lengths: tuple[int, ...] = EAGER_WARM_TOKENS,
    buckets: tuple[int, ...] | None = None,
) -> None:
    """Runs what a rank runs to warm itself, on the sizes of rank 0.

    Units: block_size, lengths, buckets [tokens]; buckets None: those that such a group keeps
    Effects: device memory holds one layer, embedding and head until it returns
    Raises: ConfigError if the model can't be cut this way
    """
    buckets = buckets_of(tp) if buckets is None else buckets
    few = replace(config, num_layers=len(SLIDING), sliding=SLIDING)
    weights = _blank_weights(few, cut_for_rank(few, tp=tp, ep=ep, rank=0, granule=FP8_BLOCK), projections, device)
    prefill = CudaPrefill(few, weights, LocalGroup(), block_size=block_size, device=device, max_positions=max(*lengths, *buckets))
    GraphedPrefill(
        prefill,
        KVCache(few.kv_geometry(block_size, "bfloat16"), tp, 0, 1, 1, device),
        buckets=buckets,
        eager_tokens=lengths,
    )


def _blank_weights(config: ModelConfig, cut: RankCut, projections: Projections, device: torch.device | str) -> PrefillWeights:
    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def experts(rows: int, columns: int) -> Fp8Matrix:
        values = zeros(count, padded(rows), padded(columns), dtype=torch.float8_e4m3fn)
        scales = torch.ones((count, padded(rows) // FP8_BLOCK, padded(columns) // FP8_BLOCK), device=device)
        return Fp8Matrix(values, scales, rows, columns)

    hidden, inner, count = config.hidden_size, len(cut.intermediate), len(cut.experts)
    query, width = (heads * config.head_dim for heads in (len(cut.qo_heads), len(cut.qo_heads) + 2 * len(cut.kv_heads)))
    layer = LayerShard(
        attn_norm=zeros(hidden), qkv=zeros(width, hidden), qkv_bias=zeros(width),
        sinks=zeros(len(cut.qo_heads), dtype=torch.float32), o=zeros(hidden, query), o_bias=zeros(hidden), mlp_norm=zeros(hidden),
        router=zeros(config.num_experts, hidden), router_bias=zeros(config.num_experts),
        experts=ExpertShard(
            first_expert=0, intermediate=inner, gate_up=experts(2 * inner, hidden), down=experts(hidden, inner),
            gate_up_bias=zeros(count, 2 * inner, dtype=torch.float32), down_bias=zeros(count, hidden, dtype=torch.float32),
        ),
    )  # fmt: skip
    ends = {"embed": zeros(config.vocab_size, hidden), "norm": zeros(hidden), "lm_head": zeros(len(cut.vocab), hidden)}
    shard = ShardWeights(tp=1, ep=1, rank=0, layers=(layer,), vocab_start=0, **ends)
    packed = prepare_prefill_weights(config, shard, device, projections=projections)
    return replace(packed, layers=packed.layers * config.num_layers)
