"""Forward pass of one prompt chunk on one rank of a prefill pool: FP8 projections and experts, fused passes between them.

Owns the order of the kernels and the reduction points; holds no KV and schedules nothing. Called by the prefill worker's ranks; runs on a
CPU through the kernels' twins, which the tests use. Legend: T tokens of the chunk, C hidden_size, E local experts, M rows of the expert
buffer, k experts_per_token, H query heads, K KV heads, D head_dim, V vocabulary.

The last layer computes K and V for every token but everything after them for the last token alone, since nothing else is sampled from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ServingError
from kernels.attention_prefill import AttentionHeads, PrefillAttention, attention_workspace
from kernels.gemm_fp8 import ROW_ALIGNMENT, gemm_fp8, grouped_gemm_fp8
from kernels.moe_prefill import combine, combine_norm_quantize, permute_rows, swiglu_quantize
from kernels.norm import add_norm_quantize
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from kernels.reference import rms_norm_ref, yarn_inv_freq_ref
from kernels.rope_kv import rope_table, rope_write_kv
from kernels.router import Routing, route
from model.batch import AttentionTables, StepBatch
from model.config import ModelConfig
from model.kv_cache import KVCache
from model.layout import vocab_rows_per_rank
from model.parallel import ParallelGroup
from model.prefill_weights import PrefillWeights

LayerHook = Callable[[int], None]
FP8Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ChunkInputs:
    """Index tensors of one chunk on the device.

    Shapes: token_ids [T] int64; positions, full_slots, sliding_slots [T] int32; last_row [1] int64
    Shapes: num_tokens [1] int32: rows that are no padding
    """

    token_ids: Tensor
    positions: Tensor
    full_slots: Tensor
    sliding_slots: Tensor
    last_row: Tensor
    num_tokens: Tensor

    @classmethod
    def empty(cls, tokens: int, device: torch.device | str) -> ChunkInputs:
        def ints(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(ints(tokens, torch.int64), ints(tokens), ints(tokens), ints(tokens), ints(1, torch.int64), ints(1))

    def fill(self, batch: StepBatch) -> None:
        """Copies a CPU batch in; rows past it become padding that is written nowhere.

        Effects: enqueues copies on the current stream
        """
        used = batch.token_ids.shape[0]
        for target, source, padding in (
            (self.token_ids, batch.token_ids, 0),
            (self.positions, batch.positions, 0),
            (self.full_slots, batch.full.slot_mapping, -1),
            (self.sliding_slots, batch.sliding.slot_mapping, -1),
        ):
            target[used:].fill_(padding)
            target[:used].copy_(source, non_blocking=True)
        self.last_row.fill_(used - 1)
        self.num_tokens.fill_(used)


class AttentionPlans:
    """The three attention plans of a chunk: full layers, sliding layers, and the last layer's single query."""

    def __init__(
        self,
        config: ModelConfig,
        heads: AttentionHeads,
        block_size: int,
        workspace: Tensor,
        *,
        graph_tokens: int | None = None,
        graph_blocks: int | None = None,
    ):
        def make(sliding: bool, queries: int | None) -> PrefillAttention:
            window = config.window_tokens if sliding else None
            return PrefillAttention(
                heads, block_size, window_tokens=window, workspace=workspace, graph_tokens=queries, graph_blocks=graph_blocks
            )

        self.full = make(False, graph_tokens)
        self.sliding = make(True, graph_tokens)
        self._last_slides = config.sliding[-1]
        self.last = make(self._last_slides, None if graph_tokens is None else 1)
        self._window = config.window_tokens

    def plan(self, batch: StepBatch, padded_tokens: int, device: torch.device | str) -> None:
        """Plans for a CPU batch of one sequence whose chunk is padded to `padded_tokens` rows.

        Raises: ServingError if the sliding blocks don't reach back to the first query's window
        """
        used, seq_len = batch.token_ids.shape[0], int(batch.seq_lens[0])
        padding = padded_tokens - used
        start = int(batch.sliding.kv_start[0])
        if start > max(seq_len - used - self._window + 1, 0):
            raise ServingError(f"sliding blocks start at {start}, the chunk's first query at {seq_len - used} sees {self._window} keys")
        for attention, tables in ((self.full, batch.full), (self.sliding, batch.sliding)):
            ids = self._padded_blocks(tables, seq_len + padding, attention, device)
            attention.plan(padded_tokens, seq_len + padding, ids, int(tables.kv_start[0]))
        tables = batch.sliding if self._last_slides else batch.full
        ids = self._padded_blocks(tables, seq_len, self.last, device)
        self.last.plan(1, seq_len, ids, int(tables.kv_start[0]))

    @staticmethod
    def _padded_blocks(tables: AttentionTables, seq_len: int, attention: PrefillAttention, device: torch.device | str) -> Tensor:
        ids = tables.block_table[0].clamp(min=0)
        missing = attention.blocks_for(seq_len - int(tables.kv_start[0])) - ids.shape[0]
        if missing > 0:
            ids = torch.cat((ids, ids[-1:].expand(missing)))
        return ids.to(device, non_blocking=True)


class CudaPrefill:
    """A rank's prefill forward.

    Shapes: `logit_offset` [layers, T or more, all experts] fp32 or None: added to the router's logits; benchmarks of random weights set it
    Units: block_size [tokens]; max_positions: length of the rope table
    Effects: allocates the rope table and the attention workspace; kernels compile at first use
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: PrefillWeights,
        group: ParallelGroup,
        *,
        block_size: int,
        device: torch.device | str,
        max_positions: int,
        row_alignment: int = ROW_ALIGNMENT,
    ):
        self.config = config
        self.weights = weights
        self.device = torch.device(device)
        self.logit_offset: Tensor | None = None
        self._group = group
        self._row_alignment = row_alignment
        self.block_size = block_size
        first = weights.layers[0]
        self.heads = AttentionHeads(first.sinks.shape[0], first.num_kv_heads, config.head_dim)
        inv_freq, concentration = yarn_inv_freq_ref(
            config.head_dim,
            config.rope_theta,
            config.rope_factor,
            config.rope_original_context,
            config.rope_beta_fast,
            config.rope_beta_slow,
        )
        self._cos_sin = rope_table(max_positions, inv_freq.to(self.device), concentration)
        self.workspace = attention_workspace(self.device)
        self._plans = AttentionPlans(config, self.heads, block_size, self.workspace)

    @torch.no_grad()
    def forward(self, batch: StepBatch, kv: KVCache, on_layer: LayerHook | None = None) -> Tensor | None:
        """One chunk of one sequence.

        Shapes: batch: on the CPU, one sequence, logits_rows empty or its last row; kv: this rank's heads, all values finite
        Returns: logits [R, V] fp32 on rank 0 (R 0 or 1), None on the others
        Effects: writes the new tokens' K and V; calls on_layer(l) when layer l's are enqueued on the current stream, before its attention;
            no host sync after the copies of the batch. All ranks must call it with the same batch
        """
        tokens = batch.token_ids.shape[0]
        inputs = ChunkInputs.empty(tokens, self.device)
        inputs.fill(batch)
        self._plans.plan(batch, tokens, self.device)
        logits = self.run(inputs, self._plans, kv, want_logits=batch.logits_rows.numel() > 0, on_layer=on_layer)
        return logits if self._group.rank == 0 else None

    def run(
        self, inputs: ChunkInputs, plans: AttentionPlans, kv: KVCache, *, want_logits: bool, on_layer: LayerHook | None = None
    ) -> Tensor:
        """The device work of `forward`, on every rank: what a CUDA graph captures. Returns: logits [R, V] fp32"""
        layers = self.weights.layers
        last = len(layers) - 1
        residual = self.weights.embed[inputs.token_ids]
        counts = torch.zeros((len(layers), layers[0].gate_up.values.shape[0]), dtype=torch.int32, device=self.device)
        rows = add_norm_quantize(residual, layers[0].attn_norm, self.config.rms_norm_eps)
        for index in range(last):
            q = self._write_kv(index, rows, inputs, kv.layer(index), on_layer)
            attention = plans.sliding if self.config.sliding[index] else plans.full
            attended = attention.run(q, kv.layer(index), layers[index].sinks)
            rows = self.after_attention(index, residual, attended, counts[index], inputs.num_tokens)
        q = self._write_kv(last, rows, inputs, kv.layer(last), on_layer)
        if not want_logits:
            return residual.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        residual = residual[inputs.last_row]
        attended = plans.last.run(q[inputs.last_row], kv.layer(last), layers[last].sinks)
        y, routing, places = self._moe(last, residual, attended, counts[last], None)
        return self._logits(residual + self._group.all_reduce(combine(y, places, routing.expert_weights)))

    def after_attention(self, index: int, residual: Tensor, attended: Tensor, counts: Tensor, num_tokens: Tensor | None) -> FP8Rows:
        """Everything of layer `index` (not the last) behind its attention, and the next layer's norm.

        Shapes: residual [T, C]; attended [T, H, D]; counts [E] int32 zeros; num_tokens [1] int32 or None
        Returns: FP8 rows and scales of the next layer's input
        Effects: residual becomes the layer's output
        """
        y, routing, places = self._moe(index, residual, attended, counts, num_tokens)
        norm, eps = self.weights.layers[index + 1].attn_norm, self.config.rms_norm_eps
        if self._group.size == 1:
            return combine_norm_quantize(residual, y, places, routing.expert_weights, norm, eps)
        delta = self._group.all_reduce(combine(y, places, routing.expert_weights))
        return add_norm_quantize(residual, norm, eps, delta=delta)

    def _write_kv(self, index: int, rows: FP8Rows, inputs: ChunkInputs, pool: Tensor, on_layer: LayerHook | None) -> Tensor:
        """Projects, rotates and stores K and V. Returns: q [T, H, D]"""
        layer = self.weights.layers[index]
        slots = inputs.sliding_slots if self.config.sliding[index] else inputs.full_slots
        qkv = gemm_fp8(*rows, *layer.qkv)
        q = rope_write_kv(qkv, layer.qkv_bias, self._cos_sin, inputs.positions, slots, pool, self.heads.num_qo_heads)
        if on_layer is not None:
            on_layer(index)
        return q

    def _moe(
        self, index: int, residual: Tensor, attended: Tensor, counts: Tensor, num_tokens: Tensor | None
    ) -> tuple[Tensor, Routing, Tensor]:
        """Output projection, router and experts; adds the projection to residual. Returns: y [M, C], routing, each choice's row [T, k]"""
        config, layer = self.config, self.weights.layers[index]
        delta = self._group.all_reduce(gemm_fp8(*quantize_rows(attended.flatten(1)), *layer.o))
        rows = add_norm_quantize(
            residual, layer.mlp_norm, config.rms_norm_eps, delta=delta, delta_bias=layer.o_bias, bias_columns=BIAS_COLUMNS
        )  # fmt: skip
        offset = None if self.logit_offset is None else self.logit_offset[index, : residual.shape[0]]
        routing = route(
            residual, layer.mlp_norm, config.rms_norm_eps, layer.router, layer.router_bias, config.experts_per_token, counts,
            first_expert=layer.first_expert, num_tokens=num_tokens, logit_offset=offset,
        )  # fmt: skip
        expert_rows = permute_rows(*rows, routing, alignment=self._row_alignment, first_expert=layer.first_expert)
        gate_up = grouped_gemm_fp8(expert_rows.q, expert_rows.scales, *layer.gate_up, expert_rows)
        h = swiglu_quantize(gate_up, expert_rows, alpha=config.swiglu_alpha, limit=config.swiglu_limit, bias_columns=BIAS_COLUMNS)
        return grouped_gemm_fp8(*h, *layer.down, expert_rows), routing, expert_rows.rows

    def _logits(self, residual: Tensor) -> Tensor:
        x = rms_norm_ref(residual, self.weights.norm, self.config.rms_norm_eps)
        if x.is_cuda:
            logits = torch.mm(x, self.weights.lm_head.t(), out_dtype=torch.float32)
        else:
            logits = x.float() @ self.weights.lm_head.float().t()
        missing = vocab_rows_per_rank(self.config.vocab_size, self._group.size) - logits.shape[1]
        return self._group.all_gather(torch.nn.functional.pad(logits, (0, missing)), dim=1)[:, : self.config.vocab_size]
