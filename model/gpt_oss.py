"""The forward pass of gpt-oss over paged KV, in plain torch ops: prefill chunks and decode steps alike, on one rank of a group.

Owns the order of operations and where ranks meet; no scheduling, no sampling, no block ids. Called by both workers on a CPU, and the
reference for the GPU forwards. Legend: T tokens, C hidden, H local query heads, K local KV heads, D head_dim, R wanted rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from common.errors import ConfigError, NotSupportedError
from kernels.reference import (
    apply_rope_ref,
    experts_ref,
    paged_attention_ref,
    rms_norm_ref,
    rope_cos_sin_ref,
    route_ref,
    write_kv_ref,
    yarn_inv_freq_ref,
)
from model.batch import AttentionTables, StepBatch
from model.config import ModelConfig
from model.kv_cache import KVCache
from model.layout import vocab_rows_per_rank
from model.parallel import ParallelGroup
from model.shards import ExpertMatrix, LayerShard, ShardWeights

__all__ = ["AttentionTables", "GptOss", "StepBatch"]


class GptOss:
    """One rank of the model. Holds weights; the KV belongs to the caller."""

    def __init__(self, config: ModelConfig, weights: ShardWeights, group: ParallelGroup, device: torch.device | str):
        if (weights.rank, weights.tp) != (group.rank, group.size):
            raise ConfigError(f"weights of rank {weights.rank} of {weights.tp} in a group at rank {group.rank} of {group.size}")
        for layer in weights.layers:
            _dense(layer.experts.gate_up)
        self._config = config
        self._weights = weights
        self._group = group
        self._sm_scale = config.head_dim**-0.5
        inv_freq, self._concentration = yarn_inv_freq_ref(
            config.head_dim,
            config.rope_theta,
            config.rope_factor,
            config.rope_original_context,
            config.rope_beta_fast,
            config.rope_beta_slow,
        )
        self._inv_freq = inv_freq.to(device)

    @torch.no_grad()
    def forward(self, batch: StepBatch, kv: KVCache, on_layer: Callable[[int], None] | None = None) -> Tensor | None:
        """Runs the batch's new tokens through all layers.

        Shapes: as in StepBatch; kv: this rank's heads
        Returns: logits [R, V] fp32 on rank 0 (R may be 0), None on the others
        Effects: writes the new tokens' K and V; calls on_layer(l) right after layer l's are written, before its attention.
            Joins two sums per layer, and one gather if logits are wanted: all ranks must call it with the same batch
        """
        cos_sin = rope_cos_sin_ref(batch.positions, self._inv_freq, self._concentration)
        x = self._weights.embed[batch.token_ids]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(index, layer, x, batch, kv, cos_sin, on_layer)
            x = x + self._experts(layer, x)
        return self._logits(x[batch.logits_rows])

    def _attention(
        self,
        index: int,
        layer: LayerShard,
        x: Tensor,
        batch: StepBatch,
        kv: KVCache,
        cos_sin: tuple[Tensor, Tensor],
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        config, slides = self._config, self._config.sliding[index]
        tables = batch.sliding if slides else batch.full
        heads, kv_heads = layer.sinks.shape[0], kv.head_range.count
        normed = rms_norm_ref(x, layer.attn_norm, config.rms_norm_eps)
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        q, k = apply_rope_ref(q, *cos_sin), apply_rope_ref(k, *cos_sin)
        pool = kv.layer(index)
        write_kv_ref(k, v, pool, tables.slot_mapping)
        if on_layer:
            on_layer(index)
        mixed = paged_attention_ref(
            q,
            pool,
            tables.block_table,
            tables.kv_start,
            batch.seq_lens,
            batch.cu_seqlens_q,
            layer.sinks,
            window=config.window_tokens if slides else None,
            sm_scale=self._sm_scale,
        )
        partial = linear(mixed.flatten(1), layer.o).float()
        return (self._group.all_reduce(partial) + layer.o_bias.float()).to(x.dtype)

    def _experts(self, layer: LayerShard, x: Tensor) -> Tensor:
        config, experts = self._config, layer.experts
        normed = rms_norm_ref(x, layer.mlp_norm, config.rms_norm_eps)
        ids, weights = route_ref(linear(normed, layer.router, layer.router_bias), config.experts_per_token)
        partial = experts_ref(
            normed,
            ids,
            weights,
            _dense(experts.gate_up),
            experts.gate_up_bias,
            _dense(experts.down),
            experts.down_bias,
            first_expert=experts.first_expert,
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
        )
        return self._group.all_reduce(partial).to(x.dtype)

    def _logits(self, rows: Tensor) -> Tensor | None:
        """The ranks' columns of the vocabulary, padded to equal counts, meet on every rank; rank 0 keeps them."""
        if rows.shape[0] == 0:
            return rows.new_empty((0, self._config.vocab_size), dtype=torch.float32) if self._group.rank == 0 else None
        normed = rms_norm_ref(rows, self._weights.norm, self._config.rms_norm_eps)
        local = linear(normed, self._weights.lm_head).float()
        missing = vocab_rows_per_rank(self._config.vocab_size, self._group.size) - local.shape[1]
        logits = self._group.all_gather(pad(local, (0, missing)), dim=1)
        return logits[:, : self._config.vocab_size] if self._group.rank == 0 else None


def _dense(matrix: ExpertMatrix) -> Tensor:
    if not isinstance(matrix, Tensor):
        raise NotSupportedError("packed experts in the plain torch forward; load them on a CPU, or with weights bf16")
    return matrix
