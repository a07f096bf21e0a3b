"""A prefill chunk's index tensors on the device, and the two ways its queries reach their keys: as rows of this chunk, or in the pool.

Owns the staging copy and the attention plans; knows nothing of weights. Called by `model/prefill_cuda.py` and `model/prefill_graph.py`.
Legend: T tokens of the chunk, H query heads, K KV heads, D head_dim, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.errors import ServingError
from kernels.attention_prefill import AttentionHeads, PrefillAttention
from kernels.attention_prompt import PromptAttention, window_attention
from model.batch import AttentionTables, StepBatch
from model.config import ModelConfig

KVRows = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class ChunkInputs:
    """Index tensors of one chunk: views of one int32 buffer, so that one copy from pinned memory fills them all.

    Shapes: token_ids, positions, full_slots, sliding_slots [T] int32; last_row [1] int32; num_tokens [1] int32: rows that are no padding
    """

    token_ids: Tensor
    positions: Tensor
    full_slots: Tensor
    sliding_slots: Tensor
    last_row: Tensor
    num_tokens: Tensor
    _buffer: Tensor
    _staging: Tensor
    _copied: torch.cuda.Event | None

    @classmethod
    def empty(cls, tokens: int, device: torch.device | str) -> ChunkInputs:
        on_cuda = torch.device(device).type == "cuda"
        buffer = torch.zeros(4 * tokens + 2, dtype=torch.int32, device=device)
        staging = torch.zeros(4 * tokens + 2, dtype=torch.int32, pin_memory=on_cuda)
        a, b, c, d, e, f = buffer.split([tokens, tokens, tokens, tokens, 1, 1])
        return cls(a, b, c, d, e, f, buffer, staging, torch.cuda.Event() if on_cuda else None)

    def fill(self, batch: StepBatch) -> None:
        """Copies a CPU batch in; rows past it become padding that is written nowhere.

        Effects: enqueues one copy on the current stream; waits for the previous fill's copy, not for what follows it
        """
        used, tokens = batch.token_ids.shape[0], self.token_ids.shape[0]
        if self._copied is not None:
            self._copied.synchronize()
        *rows, last_row, num_tokens = self._staging.split([tokens, tokens, tokens, tokens, 1, 1])
        sources = (batch.token_ids, batch.positions, batch.full.slot_mapping, batch.sliding.slot_mapping)
        for target, source, padding in zip(rows, sources, (0, 0, -1, -1), strict=True):
            target[:used] = source
            target[used:] = padding
        last_row[0], num_tokens[0] = used - 1, used
        self._buffer.copy_(self._staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class ChunkAttention(Protocol):
    """How a chunk's layers attend. `reads_rows`: `attend` wants K and V as rows [T, K, D]."""

    reads_rows: bool

    def plan(self, batch: StepBatch, padded_tokens: int, device: torch.device | str) -> None:
        """Prepares for a CPU batch of one sequence whose chunk is padded to `padded_tokens` rows."""

    def attend(self, sliding: bool, q: Tensor, kv_rows: KVRows, pool: Tensor, sinks: Tensor) -> Tensor:
        """Every row of one layer. Returns: [T, H, D]"""

    def attend_last(self, q: Tensor, last_row: Tensor, kv_rows: KVRows, pool: Tensor, sinks: Tensor) -> Tensor:
        """The last real row of the last layer. Returns: [1, H, D]"""


def starts_prompt(batch: StepBatch) -> bool:
    """Whether a CPU batch of one sequence holds it from its first token on: all its keys are in the chunk."""
    return int(batch.seq_lens[0]) == batch.token_ids.shape[0]


class PagedAttention:
    """Keys in the pool: any chunk. Three plans: full layers, sliding layers, and the last layer's single query."""

    reads_rows = False

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
        self._last = LastQuery(config, heads, block_size, workspace, graph_blocks=graph_blocks)
        self._window = config.window_tokens

    def plan(self, batch: StepBatch, padded_tokens: int, device: torch.device | str) -> None:
        """See ChunkAttention.

        Raises: ServingError if the sliding blocks don't reach back to the first query's window
        """
        used, seq_len = batch.token_ids.shape[0], int(batch.seq_lens[0])
        padding = padded_tokens - used
        start = int(batch.sliding.kv_start[0])
        if start > max(seq_len - used - self._window + 1, 0):
            raise ServingError(f"sliding blocks start at {start}, the chunk's first query at {seq_len - used} sees {self._window} keys")
        for attention, tables in ((self.full, batch.full), (self.sliding, batch.sliding)):
            ids = _padded_blocks(tables, seq_len + padding, attention, device)
            attention.plan(padded_tokens, seq_len + padding, ids, int(tables.kv_start[0]))
        self._last.plan(batch, device)

    def attend(self, sliding: bool, q: Tensor, kv_rows: KVRows, pool: Tensor, sinks: Tensor) -> Tensor:
        return (self.sliding if sliding else self.full).run(q, pool, sinks)

    def attend_last(self, q: Tensor, last_row: Tensor, kv_rows: KVRows, pool: Tensor, sinks: Tensor) -> Tensor:
        return self._last.run(q.index_select(0, last_row), pool, sinks)


class PromptChunkAttention:
    """Keys as the chunk's own rows: a chunk that begins its prompt.

    Eagerly, plans are made when a layer first needs them, while the device already works on the layers before. In a CUDA graph the plan
    covers all rows of the bucket for good, since causality keeps padding from every real row; the last layer then attends with all rows.
    """

    reads_rows = True

    def __init__(self, config: ModelConfig, heads: AttentionHeads, block_size: int, workspace: Tensor, *, graph_tokens: int | None = None):
        self._config = config
        sizes = None if graph_tokens is None else (graph_tokens, graph_tokens)
        self._full = PromptAttention(heads, workspace=workspace, graph_sizes=sizes)
        self._last = LastQuery(config, heads, block_size, workspace) if graph_tokens is None else None
        self._planned: tuple[StepBatch, int, torch.device | str] | None = None

    def plan(self, batch: StepBatch, padded_tokens: int, device: torch.device | str) -> None:
        """See ChunkAttention.

        Raises: ServingError if the chunk does not begin its prompt
        """
        if not starts_prompt(batch):
            raise ServingError(f"a chunk of {batch.token_ids.shape[0]} tokens up to {int(batch.seq_lens[0])} does not begin its prompt")
        self._planned = (batch, padded_tokens, device)

    def attend(self, sliding: bool, q: Tensor, kv_rows: KVRows, pool: Tensor, sinks: Tensor) -> Tensor:
        assert kv_rows is not None, "a layer that reads rows got none"
        if sliding:
            return window_attention(q, *kv_rows, sinks, self._config.window_tokens)
        if self._last is not None:
            self._full.plan(q.shape[0])
        return self._full.run(q, *kv_rows, sinks)

    def attend_last(self, q: Tensor, last_row: Tensor, kv_rows: KVRows, pool: Tensor, sinks: Tensor) -> Tensor:
        if self._last is None:
            return self.attend(self._config.sliding[-1], q, kv_rows, pool, sinks).index_select(0, last_row)
        assert self._planned is not None, "plan() comes before attend_last()"
        batch, _, device = self._planned
        self._last.plan(batch, device)
        return self._last.run(q.index_select(0, last_row), pool, sinks)


class LastQuery:
    """The single query that the last layer needs, over the pool."""

    def __init__(self, config: ModelConfig, heads: AttentionHeads, block_size: int, workspace: Tensor, *, graph_blocks: int | None = None):
        self._slides = config.sliding[-1]
        self._attention = PrefillAttention(
            heads, block_size, window_tokens=config.window_tokens if self._slides else None, workspace=workspace,
            graph_tokens=None if graph_blocks is None else 1, graph_blocks=graph_blocks,
        )  # fmt: skip

    def plan(self, batch: StepBatch, device: torch.device | str) -> None:
        tables, seq_len = batch.sliding if self._slides else batch.full, int(batch.seq_lens[0])
        ids = _padded_blocks(tables, seq_len, self._attention, device)
        self._attention.plan(1, seq_len, ids, int(tables.kv_start[0]))

    def run(self, q: Tensor, pool: Tensor, sinks: Tensor) -> Tensor:
        return self._attention.run(q, pool, sinks)


def _padded_blocks(tables: AttentionTables, seq_len: int, attention: PrefillAttention, device: torch.device | str) -> Tensor:
    ids = tables.block_table[0].clamp(min=0)
    missing = attention.blocks_for(seq_len - int(tables.kv_start[0])) - ids.shape[0]
    if missing > 0:
        ids = torch.cat((ids, ids[-1:].expand(missing)))
    return ids.to(device, non_blocking=True)
