"""CUDA graphs of the prefill forward for short chunks, one per length bucket, so that launches do not set the time.

Owns a bucket's fixed inputs and attention plans, and which bucket a chunk takes. A chunk shorter than its bucket is padded: padding
rows are written nowhere, routed to no expert and seen by no real query. Called by the prefill worker's ranks. Legend: T tokens of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import ShapeError
from model.batch import SequenceView, StepBatch, build_prefill_batch
from model.kv_cache import KVCache
from model.prefill_cuda import CudaPrefill
from model.prefill_inputs import ChunkAttention, ChunkInputs, PagedAttention, PromptChunkAttention, starts_prompt

BUCKETS = (128, 256, 512, 1024, 1536, 2048)
EAGER_WARM_TOKENS = (1, 2304, 4096, 8192)


class PrefillGraph:
    """One captured forward.

    Units: tokens: rows of the bucket; `warm`: a CPU batch of at most that many tokens
    Units: kv: the cache that the graph reads and writes for good
    Units: max_seq_len [tokens]: earlier tokens and padding included, for chunks anywhere in a prompt; None: chunks that begin their prompt,
        which need no plan per request
    Effects: runs the forward twice to compile and warm it, then captures it; no per-layer hook: K and V are complete when it ends
    """

    def __init__(self, prefill: CudaPrefill, tokens: int, warm: StepBatch, kv: KVCache, *, max_seq_len: int | None = None):
        self.tokens = tokens
        self._prefill = prefill
        shared = (prefill.config, prefill.heads, prefill.block_size, prefill.workspace)
        self._attention: ChunkAttention
        if max_seq_len is None:
            self._attention = PromptChunkAttention(*shared, graph_tokens=tokens)
        else:
            blocks = -(-max_seq_len // prefill.block_size)
            self._attention = PagedAttention(*shared, graph_tokens=tokens, graph_blocks=blocks)
        self._inputs = ChunkInputs.empty(tokens, prefill.device)
        self._prepare(warm)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                prefill.run(self._inputs, self._attention, kv, want_logits=True)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = prefill.run(self._inputs, self._attention, kv, want_logits=True)

    def forward(self, batch: StepBatch) -> Tensor:
        """One chunk of at most `tokens` tokens.

        Returns: [1, V] fp32 logits of the last token, valid until the next call
        Effects: writes the KV pools; no host sync
        Raises: ShapeError if the chunk does not fit
        """
        self._prepare(batch)
        self._graph.replay()
        return self._logits

    def _prepare(self, batch: StepBatch) -> None:
        if batch.token_ids.shape[0] > self.tokens:
            raise ShapeError(f"a chunk of {batch.token_ids.shape[0]} tokens does not fit a graph of {self.tokens}")
        self._inputs.fill(batch)
        self._attention.plan(batch, self.tokens, self._prefill.device)


def lengths_up_to(most: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `lengths` that no prompt's end cuts short, and `most` itself where it does: positions past it have no rotation."""
    return tuple(dict.fromkeys(min(length, most) for length in lengths))


def buckets_for(most: int, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """The buckets that prompts of at most `most` tokens can need. Units: buckets: rising"""
    return tuple(bucket for index, bucket in enumerate(buckets) if index == 0 or buckets[index - 1] < most)


class GraphedPrefill:
    """The forward that a rank serves: graphs for short prompts, eager launches for long ones and for later chunks.

    Units: buckets [tokens]: rising; a prompt takes the first that holds it. `eager_tokens`: lengths run once at construction
    Effects: compiles, warms and captures everything here, so that the first request pays nothing; writes garbage into the cache's block 0
    """

    def __init__(
        self,
        prefill: CudaPrefill,
        kv: KVCache,
        *,
        group_size: int,
        buckets: tuple[int, ...] = BUCKETS,
        eager_tokens: tuple[int, ...] = EAGER_WARM_TOKENS,
    ):
        self._prefill = prefill
        self._kv = kv
        most = prefill.max_positions
        for tokens in lengths_up_to(most, eager_tokens):
            prefill.forward(self._warm_batch(tokens), kv)
        # a graph holds its collectives' buffers for good, which the groups of several ranks don't promise
        kept = buckets_for(most, buckets) if group_size == 1 else ()
        self._graphs = [PrefillGraph(prefill, tokens, self._warm_batch(min(tokens, most)), kv) for tokens in kept]

    @torch.no_grad()
    def forward(self, batch: StepBatch, kv: KVCache, on_layer: Callable[[int], None] | None = None) -> Tensor | None:
        """One chunk of one sequence; see `CudaPrefill.forward`. With a graph, on_layer is called for all layers once it is enqueued.

        Effects: a graph's logits are valid until the next call
        """
        tokens = batch.token_ids.shape[0]
        graph = next((g for g in self._graphs if g.tokens >= tokens), None)
        if graph is None or kv is not self._kv or not starts_prompt(batch) or not batch.logits_rows.numel():
            return self._prefill.forward(batch, kv, on_layer)
        logits = graph.forward(batch)
        if on_layer is not None:
            for index in range(self._prefill.config.num_layers):
                on_layer(index)
        return logits

    def _warm_batch(self, tokens: int) -> StepBatch:
        """A prompt all of whose blocks are block 0."""
        blocks = [0] * -(-tokens // self._prefill.block_size)
        return build_prefill_batch(SequenceView([0] * tokens, 0, blocks, 0, blocks), self._prefill.block_size, "cpu")
