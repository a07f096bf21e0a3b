"""Forward pass of one prompt chunk on one rank of a prefill pool: FP8 experts, FP8 or bf16 projections, fused passes between them.

Owns the order of the kernels and the reduction points; holds no KV and schedules nothing. Called by the prefill worker's ranks; runs on a
CPU through the kernels' twins, which the tests use. Legend: T tokens of the chunk, C hidden_size, E local experts, M rows of the expert
buffer, k experts_per_token, H query heads, K KV heads, D head_dim, V vocabulary.

The last layer computes K and V for every token but everything after them for the last token alone, since nothing else is sampled from.

A rank alone, with a bf16 output projection, adds that product to the residual stream inside the product. So its bias has to be in the
stream already: the pass that ends a layer stores the stream with the next layer's output bias in it, and norms it without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import WorkerLost
from kernels.attention_prefill import AttentionHeads, attention_workspace
from kernels.experts_prefill import empty_counters, experts_down, experts_gate_up
from kernels.moe_prefill import combine, combine_norm, combine_norm_quantize, permute_rows
from kernels.norm import add_norm, add_norm_quantize
from kernels.peers import Peers, missing_rank
from kernels.quantize import BIAS_COLUMNS
from kernels.reference import rms_norm_ref, yarn_inv_freq_ref
from kernels.rope_kv import rope_table, rope_write_kv
from kernels.router import Routing, route
from model.batch import StepBatch
from model.config import ModelConfig
from model.kv_cache import KVCache
from model.layout import vocab_rows_per_rank
from model.parallel import ParallelGroup
from model.prefill_inputs import ChunkAttention, ChunkInputs, PagedAttention, PromptChunkAttention, starts_prompt
from model.prefill_pieces import PiecewisePrefill
from model.prefill_projections import NormedRows, add_output, project, project_output
from model.prefill_weights import Fp8Weight, PrefillWeights

LayerHook = Callable[[int], None]
PIECES = 2
LEAST_PIECE_TOKENS = 8192  # eager launches take longer than the kernels of shorter ones (docs/performance.md)


class CudaPrefill:
    """A rank's prefill forward.

    Shapes: `logit_offset` [layers, T or more, all experts] fp32 or None: added to the router's logits; benchmarks of random weights set it
    Units: block_size [tokens]; max_positions: length of the rope table
    Units: contiguous: chunks that begin a prompt attend to K and V as rows instead of reading them back from the pool
    Units: pieces, least_piece_tokens: how a group without peers cuts such chunks, see `model/prefill_pieces.py`
    Units: peers: sums go over them instead of the group's collectives, each in one pass with what follows it
    Units: adds_output: the stream holds a layer's output bias before its attention
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
        contiguous: bool = True,
        pieces: int = PIECES,
        least_piece_tokens: int = LEAST_PIECE_TOKENS,
        peers: Peers | None = None,
    ):
        self.config = config
        self.weights = weights
        self.device = torch.device(device)
        self.logit_offset: Tensor | None = None
        self.group = group
        self.block_size = block_size
        self.max_positions = max_positions
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
        self.cos_sin = rope_table(max_positions, inv_freq.to(self.device), concentration)
        self.workspace = attention_workspace(self.device)
        self._paged = PagedAttention(config, self.heads, block_size, self.workspace)
        self._prompt = PromptChunkAttention(config, self.heads, block_size, self.workspace) if contiguous else None
        self.pieces = pieces
        self._counters = empty_counters(self.device)
        self.adds_output = group.size == 1 and isinstance(first.o, Tensor)
        self.peers = peers
        self.in_pieces = contiguous and group.size > 1 and peers is None
        self._piecewise = PiecewisePrefill(self, pieces=pieces, least_tokens=least_piece_tokens) if self.in_pieces else None

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
        attention = self._paged if self._prompt is None or not starts_prompt(batch) else self._prompt
        attention.plan(batch, tokens, self.device)
        want_logits = batch.logits_rows.numel() > 0
        if self._piecewise is not None and isinstance(attention, PromptChunkAttention):
            logits = self._piecewise.run(inputs, attention, kv, want_logits=want_logits, on_layer=on_layer)
        else:
            logits = self.run(inputs, attention, kv, want_logits=want_logits, on_layer=on_layer)
        return logits if self.group.rank == 0 else None

    def run(
        self, inputs: ChunkInputs, attention: ChunkAttention, kv: KVCache, *, want_logits: bool, on_layer: LayerHook | None = None
    ) -> Tensor:
        """The device work of `forward`, on every rank: what a CUDA graph captures. Returns: logits [R, V] fp32"""
        layers, eps = self.weights.layers, self.config.rms_norm_eps
        last = len(layers) - 1
        residual = torch.nn.functional.embedding(inputs.token_ids, self.weights.embed)
        counts = torch.zeros((len(layers), layers[0].gate_up.values.shape[0]), dtype=torch.int32, device=self.device)
        first_norm = add_norm_quantize if isinstance(layers[0].qkv, Fp8Weight) else add_norm
        rows: NormedRows = first_norm(residual, layers[0].attn_norm, eps)
        if self.adds_output:
            residual += layers[0].o_bias
        for index in range(last):
            q, kv_rows = self._write_kv(index, rows, inputs, kv.layer(index), attention, on_layer)
            attended = attention.attend(self.config.sliding[index], q, kv_rows, kv.layer(index), layers[index].sinks)
            rows = self.after_attention(index, residual, attended, counts[index], inputs.num_tokens)
        q, kv_rows = self._write_kv(last, rows, inputs, kv.layer(last), attention, on_layer)
        if not want_logits:
            return residual.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        attended = attention.attend_last(q, inputs.last_row, kv_rows, kv.layer(last), layers[last].sinks)
        return self.last_row_logits(residual, attended, inputs.last_row, counts[last])

    def check_ranks(self) -> None:
        """Waits for the device. Raises: WorkerLost if a rank did not come to a sum so far, which leaves that one and all later ones void"""
        lost = missing_rank(int(self.peers.status)) if self.peers is not None else None
        if lost is not None:
            raise WorkerLost("a rank of the group did not take part in a sum in time", rank=lost)

    def last_row_logits(self, residual: Tensor, attended: Tensor, last_row: Tensor, counts: Tensor) -> Tensor:
        """What the last layer does behind its attention: for the last token alone.

        Shapes: residual [T, C]; attended [1, H, D]; last_row [1]; counts [E] int32 zeros
        Returns: logits [1, V] fp32
        """
        residual = residual.index_select(0, last_row)
        y, routing, places = self._moe(len(self.weights.layers) - 1, residual, attended, counts, None)
        return self._logits(residual + self.group.all_reduce(combine(y, places, routing.expert_weights)))

    def after_attention(self, index: int, residual: Tensor, attended: Tensor, counts: Tensor, num_tokens: Tensor | None) -> NormedRows:
        """Everything of layer `index` (not the last) behind its attention, and the next layer's norm.

        Shapes: residual [T, C]; attended [T, H, D]; counts [E] int32 zeros; num_tokens [1] int32 or None
        Returns: the next layer's input
        Effects: residual becomes the layer's output
        """
        y, routing, places = self._moe(index, residual, attended, counts, num_tokens)
        following, eps = self.weights.layers[index + 1], self.config.rms_norm_eps
        in_fp8 = isinstance(following.qkv, Fp8Weight)
        if self.group.size == 1:
            joined = combine_norm_quantize if in_fp8 else combine_norm
            bias = following.o_bias if self.adds_output else None
            return joined(residual, y, places, routing.expert_weights, following.attn_norm, eps, stream_bias=bias)
        if self.peers is not None and not in_fp8:
            normed = torch.empty_like(residual)
            self.peers.sum_experts_norm(
                y, routing.expert_ids, routing.expert_weights, residual, following.attn_norm, eps=eps,
                first_expert=self.weights.layers[index].first_expert, num_local_experts=counts.shape[0], normed=normed, rows=places,
            )  # fmt: skip
            return normed
        delta = self.group.all_reduce(combine(y, places, routing.expert_weights))
        return (add_norm_quantize if in_fp8 else add_norm)(residual, following.attn_norm, eps, delta=delta)

    def _write_kv(
        self, index: int, rows: NormedRows, inputs: ChunkInputs, pool: Tensor, attention: ChunkAttention, on_layer: LayerHook | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Projects, rotates and stores K and V. Returns: q [T, H, D]; k and v [T, K, D] if the attention reads rows"""
        layer, heads = self.weights.layers[index], self.heads
        slots = inputs.sliding_slots if self.config.sliding[index] else inputs.full_slots
        qkv = project(rows, layer.qkv)
        kv_rows = None
        if attention.reads_rows:
            shape = (qkv.shape[0], heads.num_kv_heads, heads.head_dim)
            kv_rows = (qkv.new_empty(shape), qkv.new_empty(shape))
        q = rope_write_kv(qkv, layer.qkv_bias, self.cos_sin, inputs.positions, slots, pool, heads.num_qo_heads, kv_rows=kv_rows)
        if on_layer is not None:
            on_layer(index)
        return q, kv_rows

    def _moe(
        self, index: int, residual: Tensor, attended: Tensor, counts: Tensor, num_tokens: Tensor | None
    ) -> tuple[Tensor, Routing, Tensor]:
        """Output projection, router and experts; adds the projection to residual. Returns: y [M, C], routing, each choice's row [T, k]"""
        config, layer = self.config, self.weights.layers[index]
        delta = bias = None
        if self.adds_output:
            assert isinstance(layer.o, Tensor)
            add_output(residual, attended, layer.o)
        elif self.peers is not None:
            self.peers.sum_projection(project_output(attended, layer.o), layer.o_bias, residual)
        else:
            delta, bias = self.group.all_reduce(project_output(attended, layer.o)), layer.o_bias
        inverse_rms = torch.empty(residual.shape[0], dtype=torch.float32, device=residual.device)
        rows = add_norm_quantize(
            residual, layer.mlp_norm, config.rms_norm_eps, delta=delta, delta_bias=bias, bias_columns=BIAS_COLUMNS,
            inverse_rms=inverse_rms,
        )  # fmt: skip
        return self.run_experts(index, residual, inverse_rms, rows, counts, num_tokens)

    def run_experts(
        self, index: int, residual: Tensor, inverse_rms: Tensor, rows: tuple[Tensor, Tensor], counts: Tensor, num_tokens: Tensor | None
    ) -> tuple[Tensor, Routing, Tensor]:
        """Router and experts of a layer; `rows`: the residual's quantised norm. Returns: y [M, C], routing, each choice's row [T, k]"""
        config, layer = self.config, self.weights.layers[index]
        offset = None if self.logit_offset is None else self.logit_offset[index, : residual.shape[0]]
        routing = route(
            residual, inverse_rms, layer.router, layer.router_bias, config.experts_per_token, counts,
            first_expert=layer.first_expert, num_tokens=num_tokens, logit_offset=offset,
        )  # fmt: skip
        mean = residual.shape[0] * config.experts_per_token / config.num_experts
        expert_rows = permute_rows(*rows, routing, first_expert=layer.first_expert)
        hidden = experts_gate_up(
            expert_rows, *layer.gate_up, layer.intermediate, self._counters, rows_per_expert=mean, alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
        )  # fmt: skip
        y = experts_down(hidden, *layer.down, expert_rows, self._counters, rows_per_expert=mean, limit=config.swiglu_limit)
        return y, routing, expert_rows.rows

    def _logits(self, residual: Tensor) -> Tensor:
        x = rms_norm_ref(residual, self.weights.norm, self.config.rms_norm_eps)
        if x.is_cuda:
            logits = torch.mm(x, self.weights.lm_head.t(), out_dtype=torch.float32)
        else:
            logits = x.float() @ self.weights.lm_head.float().t()
        missing = vocab_rows_per_rank(self.config.vocab_size, self.group.size) - logits.shape[1]
        return self.group.all_gather(torch.nn.functional.pad(logits, (0, missing)), dim=1)[:, : self.config.vocab_size]
