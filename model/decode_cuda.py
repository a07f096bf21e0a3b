"""One decode step of gpt-oss on an H200, everything between two sampled tokens in one CUDA graph.

Owns the packed weights' shape, the step's static buffers and the graphs; the KV, its blocks and the requests are the caller's.
Called by the decode worker's GPU rank and `benchmarks/decode.py`. Legend: B rows of a bucket (one sequence each), L layers, M table width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.errors import ConfigError
from kernels.attention_decode import BLOCK_SIZE, SplitWorkspace, attention_full, attention_sliding, chunk_blocks
from kernels.decode_fused import (
    MAX_STREAMED_TOKENS,
    combine_norm,
    embed_norm,
    norm_route,
    output_projection,
    pack_qkv,
    partial_projection,
    prepare_step,
    qkv_rope_write,
)
from kernels.moe_decode import ExpertOutputs
from kernels.peers import Peers
from kernels.reference import yarn_inv_freq_ref
from kernels.sampling_cuda import SamplingRows
from model.config import ModelConfig
from model.decode_experts import DecodeExperts, pack_decode_experts
from model.kv_cache import KVCache
from model.next_words import NextWords, Vocabulary, WordScratch, pack_vocabulary
from model.shards import LayerShard, ShardWeights

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS_PER_ROUTE_COUNTER = 8
ROUTER_ROWS, NEVER_CHOSEN = 16, -1e30
SMALL_WORDS = 9  # int32 a row besides the sliding table: seed (2), three inputs, three floats, top_k
STATUS_WORDS = 4  # ahead of the tokens in a step's results, so that both are one download


@dataclass(frozen=True)
class DecodeLayer:
    """One layer's weights as the kernels want them: bf16 on the device, QKV rows in `pack_qkv` order, sinks fp32, experts packed."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    sinks: Tensor
    o: Tensor
    o_bias: Tensor
    mlp_norm: Tensor
    router: Tensor
    router_bias: Tensor
    experts: DecodeExperts


@dataclass(frozen=True)
class DecodeWeights:
    """Shapes: embed [V, C]; norm [C]; both bf16"""

    embed: Tensor
    layers: tuple[DecodeLayer, ...]
    norm: Tensor
    vocabulary: Vocabulary


def pack_weights(shard: ShardWeights, layers: deque[LayerShard] | None = None) -> DecodeWeights:
    """A loaded shard in the decode kernels' layouts.

    Units: layers: taken from the left one by one in place of the shard's own, so that memory holds one layer twice at most
    Raises: as `pack_decode_experts`
    """
    left = deque(shard.layers) if layers is None else layers
    packed = []
    while left:
        packed.append(_pack_layer(left.popleft()))
    return DecodeWeights(shard.embed, tuple(packed), shard.norm, pack_vocabulary(shard.lm_head, shard.vocab_start))


def _pack_layer(layer: LayerShard) -> DecodeLayer:
    router, router_bias = _pad_router(layer.router, layer.router_bias)
    return DecodeLayer(
        attn_norm=layer.attn_norm,
        qkv=pack_qkv(layer.qkv),
        qkv_bias=pack_qkv(layer.qkv_bias),
        sinks=layer.sinks.float(),
        o=layer.o,
        o_bias=layer.o_bias,
        mlp_norm=layer.mlp_norm,
        router=router,
        router_bias=router_bias,
        experts=pack_decode_experts(layer.experts, layer.router.shape[1]),
    )


def _pad_router(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """To whole tiles of 16 experts; those that do not exist are never chosen."""
    missing = -weight.shape[0] % ROUTER_ROWS
    return pad(weight, (0, 0, 0, missing)), pad(bias, (0, missing), value=NEVER_CHOSEN)


class SmallInputs(NamedTuple):
    """Shapes: token_source, seq_lens, sliding_start [B] int32; sliding_table [B, 9] int32"""

    token_source: Tensor
    seq_lens: Tensor
    sliding_start: Tensor
    sliding_table: Tensor
    sampling: SamplingRows


class StepInputs:
    """What the host writes before a step, in buffers whose addresses the graphs hold.

    Shapes: token_source, seq_lens, sliding_start [B] int32; full_table [B, M], sliding_table [B, 9] int32
    Units: token_source: the row of the step before whose sampled token this row goes on with (itself at first), or -1 - token id
    Units: seq_lens counts the new token; 0 marks a padded row, which writes nowhere and reads no expert
    """

    def __init__(self, rows: int, full_blocks: int, sliding_blocks: int, device: torch.device | str):
        self._rows, self._sliding_blocks = rows, sliding_blocks
        self.packed = torch.zeros(rows * (SMALL_WORDS + sliding_blocks), dtype=torch.int32, device=device)
        self.token_source, self.seq_lens, self.sliding_start, self.sliding_table, self.sampling = self.split(self.packed)
        self.token_source.copy_(torch.arange(rows))
        self.sampling.top_p.fill_(1.0)
        self.full_table = torch.zeros(rows, full_blocks, dtype=torch.int32, device=device)

    def split(self, packed: Tensor) -> SmallInputs:
        """Views of `packed`, or of another tensor of its shape: what may change in every step, in one piece."""
        rows = self._rows
        seed = packed[: 2 * rows].view(torch.int64)
        words = [packed[i * rows : (i + 1) * rows] for i in range(2, SMALL_WORDS)]
        temperature, top_p, min_p = (word.view(torch.float32) for word in words[3:6])
        sampling = SamplingRows(temperature, words[6], top_p, min_p, seed)
        return SmallInputs(words[0], words[1], words[2], packed[SMALL_WORDS * rows :].view(rows, self._sliding_blocks), sampling)


class _Scratch:
    """Activations of one step, at the largest batch."""

    def __init__(self, config: ModelConfig, layer: DecodeLayer, vocab: int, rows: int, kv_tokens: int, kv_heads: int, device):
        def bf16(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)

        def fp32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        hidden, k = config.hidden_size, config.experts_per_token
        q_heads = layer.qkv.shape[0] // config.head_dim - 2 * kv_heads
        vocabulary_rows = max(rows, MAX_STREAMED_TOKENS)
        self.residual, self.normed, self.projected = bf16(rows, hidden), bf16(vocabulary_rows, hidden), bf16(rows, hidden)
        self.qkv, self.q = bf16(rows, layer.qkv.shape[0]), bf16(rows, q_heads, config.head_dim)
        self.attention = bf16(rows, q_heads, config.head_dim)
        self.experts = layer.experts.scratch(rows, k, device)
        self.route_logits, self.expert_weights = fp32(rows, layer.router.shape[0]), fp32(rows, k)
        self.expert_ids, self.route_arrived = ints(rows, k), ints(-(-rows // TOKENS_PER_ROUTE_COUNTER))
        self.cos_sin = fp32(rows, config.head_dim // 2, 2)
        self.full_slots, self.sliding_slots = ints(rows), ints(rows)
        self.split = SplitWorkspace.allocate(rows, kv_heads, kv_tokens, device)
        self.words = WordScratch.allocate(rows, vocab, device)


def _make_inputs(config: ModelConfig, rows: int, max_positions: int, block_size: int, device: torch.device | str) -> StepInputs:
    sliding_blocks = -(-(config.window_tokens - 1) // block_size) + 1
    return StepInputs(rows, -(-max_positions // block_size), sliding_blocks, device)


def buffer_bytes(config: ModelConfig, weights: DecodeWeights, *, max_batch: int, max_positions: int) -> int:
    """Device memory of a `CudaDecode`'s own buffers, but for the part of its attention workspace that grows with the KV pool."""
    layer = weights.layers[0]
    kv_heads = (layer.qkv.shape[0] // config.head_dim - layer.sinks.shape[0]) // 2
    scratch = _Scratch(config, layer, weights.vocabulary.weight.shape[0], max_batch, 0, kv_heads, "meta")
    return _nbytes(scratch) + _nbytes(_make_inputs(config, max_batch, max_positions, BLOCK_SIZE, "meta"))


def _nbytes(holder: object) -> int:
    """Bytes of the tensors of an object and of those in it; views of another's memory have none of their own."""
    parts = vars(holder).values()
    own = sum(part.untyped_storage().nbytes() for part in parts if isinstance(part, Tensor) and part._base is None)
    return own + sum(_nbytes(part) for part in parts if is_dataclass(part))


class CudaDecode:
    """A rank's decode step, alone or with the other ranks of its group, which all do the same steps in the same order.

    `inputs` is written by the host before `step` or `replay`; `token_ids` then holds the sampled tokens, on every rank, which are the next
    step's input where `inputs.token_source` says so. `results` is status and tokens in one piece: a status other than 0 names a rank that
    did not come in time (`kernels.peers.missing_rank`), and then all results of this step and later ones are void.
    A row's result does not depend on the other rows as long as the bucket stays at or below 16 rows, bit for bit; above, the dense products
    are the library's, whose order of additions depends on the bucket.

    Shapes: results [4 + B] int32, token_ids its last B
    Shapes: `logits_override` [L, B, E] fp32 or None: takes the router's place; benchmarks of random weights set it
    Units: max_batch: rows of the largest bucket; max_positions: the longest sequence [tokens]
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecodeWeights,
        kv: KVCache,
        *,
        max_batch: int,
        max_positions: int,
        device: torch.device | str,
        open_peers: Callable[[Tensor], Peers] | None = None,
    ):
        """`open_peers(status)` joins the other ranks; None: there are none.

        Raises: ConfigError; what `open_peers` raises
        """
        if max_batch > BUCKETS[-1]:
            raise ConfigError(f"decode on the GPU takes up to {BUCKETS[-1]} sequences, got max_batch {max_batch}")
        if kv.full.shape[-2:] != (BLOCK_SIZE, 64):
            raise ConfigError(f"decode on the GPU takes KV blocks of 16 tokens and heads of 64, got {tuple(kv.full.shape[-2:])}")
        self.config = config
        self.logits_override: Tensor | None = None
        self._weights = weights
        self._kv = kv
        self.block_size = kv.full.shape[-2]
        self.inputs = _make_inputs(config, max_batch, max_positions, self.block_size, device)
        self.results = torch.zeros(STATUS_WORDS + max_batch, dtype=torch.int32, device=device)
        self.token_ids = self.results[STATUS_WORDS:]
        kv_tokens = min(max_batch * max_positions, kv.full.shape[1] * self.block_size)
        vocab = weights.vocabulary.weight.shape[0]
        self._scratch = _Scratch(config, weights.layers[0], vocab, max_batch, kv_tokens, kv.full.shape[3], device)
        inv_freq, self._concentration = yarn_inv_freq_ref(
            config.head_dim,
            config.rope_theta,
            config.rope_factor,
            config.rope_original_context,
            config.rope_beta_fast,
            config.rope_beta_slow,
        )
        self._inv_freq = inv_freq.to(device)
        self._peers = open_peers(self.results[:1]) if open_peers is not None else None
        self._words = NextWords(weights.vocabulary, self._scratch.words, max_batch, device, self._peers)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    @property
    def logits(self) -> Tensor:
        """[max_batch, V] fp32 of the last step, if that was one with `needs_logits`; rows past its bucket are stale. In a group: on
        rank 0."""
        return self._words.logits if self._peers is None else self._peers.logits

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has a part of the vocabulary."""
        return self._peers is None

    @torch.no_grad()
    def step(self, rows: int, *, needs_logits: bool = False) -> None:
        """Enqueues one step of the first `rows` rows on the current stream; the tokens land in `token_ids`.

        Units: needs_logits: somebody wants them, or a row has a filter; in a group also where a row has a temperature. The same on all
            ranks
        """
        inputs, s, config = self.inputs, self._scratch, self.config
        eps = config.rms_norm_eps
        residual, normed = s.residual[:rows], s.normed[:rows]
        prepare_step(
            inputs.token_source[:rows],
            self.token_ids,
            inputs.seq_lens[:rows],
            inputs.full_table[:rows],
            inputs.sliding_table[:rows],
            inputs.sliding_start[:rows],
            self._inv_freq,
            concentration=self._concentration,
            block_size=self.block_size,
            chunk_blocks=chunk_blocks(rows, self._kv.layer(0).shape[2]),
            cos_sin=s.cos_sin[:rows],
            full_slots=s.full_slots[:rows],
            sliding_slots=s.sliding_slots[:rows],
            cu_chunks=s.split.cu_chunks[: rows + 1],
        )
        layers = self._weights.layers
        embed_norm(self.token_ids[:rows], self._weights.embed, layers[0].attn_norm, eps=eps, residual=residual, normed=normed)
        for index, layer in enumerate(layers):
            self._attention(index, layer, rows)
            outputs = self._experts(index, layer, rows)
            self._combine(layer, outputs, layers[index + 1].attn_norm if index + 1 < len(layers) else self._weights.norm, rows)
        self._words.pick(s.normed, inputs.sampling.first(rows), inputs.seq_lens[:rows], self.token_ids[:rows], needs_logits=needs_logits)

    def _attention(self, index: int, layer: DecodeLayer, rows: int) -> None:
        inputs, s = self.inputs, self._scratch
        sliding = self.config.sliding[index]
        pool, slots = self._kv.layer(index), (s.sliding_slots if sliding else s.full_slots)[:rows]
        q, out, seq_lens = s.q[:rows], s.attention[:rows], inputs.seq_lens[:rows]
        qkv_rope_write(s.normed[:rows], layer.qkv, layer.qkv_bias, pool, slots, s.cos_sin[:rows], q, scratch=s.qkv[:rows])
        scale = self.config.head_dim**-0.5
        if sliding:
            tables, start = inputs.sliding_table[:rows], inputs.sliding_start[:rows]
            window = self.config.window_tokens
            attention_sliding(q, pool, tables, start, seq_lens, layer.sinks, out, window=window, sm_scale=scale)
        else:
            attention_full(q, pool, inputs.full_table[:rows], seq_lens, layer.sinks, out, s.split, sm_scale=scale)
        if self._peers is None:
            output_projection(out.flatten(1), layer.o, layer.o_bias, s.residual[:rows], scratch=s.projected[:rows])
        else:
            partial_projection(out.flatten(1), layer.o, s.projected[:rows])
            self._peers.sum_projection(s.projected[:rows], layer.o_bias, s.residual[:rows])

    def _experts(self, index: int, layer: DecodeLayer, rows: int) -> ExpertOutputs:
        s, config = self._scratch, self.config
        ids = s.expert_ids[:rows]
        norm_route(
            s.residual[:rows],
            layer.mlp_norm,
            layer.router,
            layer.router_bias,
            s.full_slots[:rows],
            eps=config.rms_norm_eps,
            normed=s.normed[:rows],
            logits=s.route_logits[:rows],
            arrived=s.route_arrived,
            expert_ids=ids,
            expert_weights=s.expert_weights[:rows],
            logits_override=None if self.logits_override is None else self.logits_override[index, :rows],
        )
        return layer.experts.run(s.normed[:rows], ids, s.experts, alpha=config.swiglu_alpha, limit=config.swiglu_limit)

    def _combine(self, layer: DecodeLayer, outputs: ExpertOutputs, norm_weight: Tensor, rows: int) -> None:
        s, experts = self._scratch, layer.experts
        (combine_norm if self._peers is None else self._peers.sum_experts_norm)(
            outputs.pairs,
            s.expert_ids[:rows],
            s.expert_weights[:rows],
            s.residual[:rows],
            norm_weight,
            eps=self.config.rms_norm_eps,
            first_expert=experts.first_expert,
            num_local_experts=experts.num_local,
            normed=s.normed[:rows],
            rows=outputs.rows,
        )

    def capture(self, rows: int, *, needs_logits: bool = False) -> None:
        """Records the graph of one bucket.

        Effects: runs the step twice on a side stream first (compiles, loads); needs valid inputs, overwrites token_ids and KV slots
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step(rows, needs_logits=needs_logits)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(rows, needs_logits=needs_logits)
        self._graphs[rows, needs_logits] = graph

    def replay(self, rows: int, *, needs_logits: bool = False) -> None:
        """Enqueues the recorded step of a bucket."""
        self._graphs[rows, needs_logits].replay()

    def run(self, rows: int, *, needs_logits: bool) -> None:
        """Enqueues a step of the first `rows` rows: the recorded one if there is one."""
        if (rows, needs_logits) in self._graphs:
            self.replay(rows, needs_logits=needs_logits)
        else:
            self.step(rows, needs_logits=needs_logits)
