"""CUDA graphs of the prefill forward, one per length bucket, for chunks whose launches would set the time.

Owns a bucket's fixed inputs and attention plans, and which bucket a chunk takes. A chunk shorter than its bucket is padded: padding
rows are written nowhere, routed to no expert and seen by no real query. Called by the prefill worker's ranks. Legend: T tokens of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.errors import ShapeError
from model.batch import SequenceView, StepBatch, build_prefill_batch
from model.kv_cache import KVCache
from model.prefill_cuda import CudaPrefill
from model.prefill_inputs import ChunkAttention, ChunkInputs, PagedAttention, PromptChunkAttention, starts_prompt
from model.prefill_pieces import PiecewisePrefill

BUCKETS = (128, 256, 512, 1024, 1536, 2048)
# Of a group of several ranks: each has fewer kernels' time for as many launches, so that launches set the time of far longer chunks too.
GROUP_BUCKETS = (*BUCKETS, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
EAGER_WARM_TOKENS = (1, 2304, 4096, 8192)
LEAST_PIECE_TOKENS = 1024  # of a piece whose launches cost nothing


class PrefillGraph:
    """One captured forward.

    Units: tokens: rows of the bucket; `warm`: a CPU batch of at most that many tokens
    Units: kv: the cache that the graph reads and writes for good
    Units: max_seq_len [tokens]: earlier tokens and padding included, for chunks anywhere in a prompt; None: chunks that begin their prompt,
        which need no plan per request, and which a group without peers computes in pieces
    `pool`: torch's handle of a graph memory pool; graphs that share one must not run at the same time
    Effects: runs the forward twice to compile and warm it, then captures it, its collectives included: all ranks of the group do so
        together; no per-layer hook: K and V are complete when it ends
    """

    def __init__(
        self,
        prefill: CudaPrefill,
        tokens: int,
        warm: StepBatch,
        kv: KVCache,
        *,
        max_seq_len: int | None = None,
        pool: Any = None,
    ):
        self.tokens = tokens
        self.least_tokens = 1
        self._prefill = prefill
        shared = (prefill.config, prefill.heads, prefill.block_size, prefill.workspace)
        self._inputs = ChunkInputs.empty(tokens, prefill.device)
        self._attention: ChunkAttention | None = None
        forward: Callable[[], Tensor]
        if max_seq_len is None and prefill.in_pieces:
            runner = PiecewisePrefill(prefill, pieces=prefill.pieces, least_tokens=LEAST_PIECE_TOKENS, graph_tokens=tokens)
            self.least_tokens = runner.least_rows
            forward = partial(runner.run, self._inputs, None, kv, want_logits=True, on_layer=None)
        else:
            if max_seq_len is None:
                self._attention = PromptChunkAttention(*shared, graph_tokens=tokens)
            else:
                blocks = -(-max_seq_len // prefill.block_size)
                self._attention = PagedAttention(*shared, graph_tokens=tokens, graph_blocks=blocks)
            forward = partial(prefill.run, self._inputs, self._attention, kv, want_logits=True)
        self._prepare(warm)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):  # NCCL's own threads go on meanwhile
            self._logits = forward()

    def holds(self, tokens: int) -> bool:
        return self.least_tokens <= tokens <= self.tokens

    def forward(self, batch: StepBatch) -> Tensor:
        """One chunk that it `holds`.

        Returns: [1, V] fp32 logits of the last token, valid until the next call of any graph of its pool
        Effects: writes the KV pools; no host sync
        Raises: ShapeError if the chunk does not fit
        """
        self._prepare(batch)
        self._graph.replay()
        return self._logits

    def _prepare(self, batch: StepBatch) -> None:
        if not self.holds(batch.token_ids.shape[0]):
            raise ShapeError(f"a chunk of {batch.token_ids.shape[0]} tokens for a graph of {self.least_tokens} to {self.tokens}")
        self._inputs.fill(batch)
        if self._attention is not None:
            self._attention.plan(batch, self.tokens, self._prefill.device)


def lengths_up_to(most: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `lengths` that no prompt's end cuts short, and `most` itself where it does: positions past it have no rotation."""
    return tuple(dict.fromkeys(min(length, most) for length in lengths))


def buckets_of(group_size: int) -> tuple[int, ...]:
    """The lengths of the graphs that a rank of such a group keeps [tokens]."""
    return BUCKETS if group_size == 1 else GROUP_BUCKETS


def buckets_for(most: int, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """The buckets that prompts of at most `most` tokens can need. Units: buckets: rising"""
    return tuple(bucket for index, bucket in enumerate(buckets) if index == 0 or buckets[index - 1] < most)


class GraphedPrefill:
    """The forward that a rank serves: graphs for prompts whose launches would set the time, eager launches for longer ones and for later
    chunks.

    Units: buckets [tokens]: rising; a prompt takes the first that holds it; None: those of its kind of group. `eager_tokens`: lengths run
        once at construction. `chunk_tokens`: of the chunks that longer prompts come in, whose later ones attend by other kernels; None: no
        prompt is cut
    Effects: compiles, warms and captures everything here, so that the first request pays nothing; writes garbage into the cache's block 0
    """

    def __init__(
        self,
        prefill: CudaPrefill,
        kv: KVCache,
        *,
        buckets: tuple[int, ...] | None = None,
        eager_tokens: tuple[int, ...] = EAGER_WARM_TOKENS,
        chunk_tokens: int | None = None,
    ):
        self._prefill = prefill
        self._kv = kv
        most = prefill.max_positions
        for tokens in lengths_up_to(most, eager_tokens):
            prefill.forward(self._warm_batch(tokens), kv)
        if chunk_tokens is not None and chunk_tokens < most:
            prefill.forward(self._warm_batch(min(chunk_tokens, most - chunk_tokens), behind=chunk_tokens), kv)
        kept = buckets_for(most, buckets_of(prefill.group.size) if buckets is None else buckets)
        pool = torch.cuda.graph_pool_handle() if kept else None
        self._graphs = [PrefillGraph(prefill, tokens, self._warm_batch(min(tokens, most)), kv, pool=pool) for tokens in kept]

    @torch.no_grad()
    def forward(self, batch: StepBatch, kv: KVCache, on_layer: Callable[[int], None] | None = None) -> Tensor | None:
        """One chunk of one sequence; see `CudaPrefill.forward`. With a graph, on_layer is called for all layers once it is enqueued.

        Effects: a graph's logits are valid until the next call
        """
        tokens = batch.token_ids.shape[0]
        graph = next((g for g in self._graphs if g.holds(tokens)), None)
        if graph is None or kv is not self._kv or not starts_prompt(batch) or not batch.logits_rows.numel():
            return self._prefill.forward(batch, kv, on_layer)
        logits = graph.forward(batch)
        if on_layer is not None:
            for index in range(self._prefill.config.num_layers):
                on_layer(index)
        return logits

    def _warm_batch(self, tokens: int, behind: int = 0) -> StepBatch:
        """A prompt all of whose blocks are block 0, or its part behind so many tokens."""
        blocks = [0] * -(-(behind + tokens) // self._prefill.block_size)
        return build_prefill_batch(SequenceView([0] * tokens, behind, blocks, 0, blocks), self._prefill.block_size, "cpu")
