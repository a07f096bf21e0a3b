"""CUDA graphs of the prefill forward for short chunks, one per length bucket, so that launches do not set the time.

Owns a bucket's fixed inputs and attention plans. A chunk shorter than its bucket is padded: padding rows are written nowhere, routed to no
expert and seen by no real query. Called by the prefill worker's ranks. Legend: T tokens of the bucket, N blocks, D head_dim, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from model.batch import StepBatch
from model.kv_cache import KVCache
from model.prefill_cuda import AttentionPlans, ChunkInputs, CudaPrefill


class PrefillGraph:
    """One captured forward.

    Units: tokens: rows of the bucket; max_seq_len [tokens]: earlier tokens and padding included; `warm`: a CPU batch of that many tokens
    Units: kv: the cache that the graph reads and writes for good
    Effects: runs the forward twice to compile and warm it, then captures it; no per-layer hook: K and V are complete when it ends
    """

    def __init__(self, prefill: CudaPrefill, tokens: int, max_seq_len: int, warm: StepBatch, kv: KVCache):
        self.tokens = tokens
        self._prefill = prefill
        blocks = -(-max_seq_len // prefill.block_size)
        self._plans = AttentionPlans(
            prefill.config, prefill.heads, prefill.block_size, prefill.workspace, graph_tokens=tokens, graph_blocks=blocks
        )
        self._inputs = ChunkInputs.empty(tokens, prefill.device)
        self._prepare(warm)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                prefill.run(self._inputs, self._plans, kv, want_logits=True)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = prefill.run(self._inputs, self._plans, kv, want_logits=True)

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
        self._plans.plan(batch, self.tokens, self._prefill.device)
