"""Attention of a prefill chunk over the paged KV pool, sink included, for one layer kind.

A plan is made on the host once per chunk and serves all layers of the kind. FlashInfer on CUDA: FA3 for full layers, FA2 for sliding ones,
which measured faster each; the fp32 twin elsewhere. Called by `model/`.
Legend: T new tokens, H query heads, K KV heads, D head_dim, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels.flashinfer_plan import Planner
from kernels.reference import paged_attention_ref

WORKSPACE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class AttentionHeads:
    """Local heads of one rank."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int


class PrefillAttention:
    """One sequence's chunk against its blocks, for layers of one kind.

    Units: window_tokens: keys a query sees, itself included, None for all; block_size [tokens]
    Units: graph_tokens, graph_blocks: with both given, plans go to fixed buffers that a captured CUDA graph reads; every plan then takes
        exactly graph_tokens queries and at most graph_blocks blocks
    Effects: the first object of a kind compiles its FlashInfer module (minutes); `workspace` may be shared by objects of one stream
    """

    def __init__(
        self,
        heads: AttentionHeads,
        block_size: int,
        *,
        window_tokens: int | None,
        workspace: Tensor,
        graph_tokens: int | None = None,
        graph_blocks: int | None = None,
    ):
        self._heads = heads
        self._block_size = block_size
        self._window_tokens = window_tokens
        self._graph_tokens = graph_tokens
        self._sm_scale = heads.head_dim**-0.5
        self._plan: tuple[int, int, int, Tensor] | None = None
        self._wrapper = self._make_wrapper(workspace, graph_blocks) if workspace.is_cuda else None
        self._planner = Planner(self._wrapper)

    @property
    def backend(self) -> str:
        """FlashInfer's name of the kernel that serves this kind on Hopper."""
        return "fa3" if self._window_tokens is None else "fa2"

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self._block_size)

    def plan(self, num_queries: int, seq_len: int, block_ids: Tensor, kv_start: int = 0) -> None:
        """Fixes the shape of the next runs.

        Shapes: block_ids [>= ceil((seq_len - kv_start) / block_size)] int32, on the pool's device
        Units: num_queries: the last positions of the sequence; seq_len counts them; kv_start: position of the first block's first token
        Effects: host work and copies to the device on the current stream; waits for the last plan's copy; not capturable
        Raises: ShapeError if the blocks don't hold the tokens or a graph's plan changes its number of queries
        """
        kv_tokens = seq_len - kv_start
        blocks = self.blocks_for(kv_tokens)
        if blocks > block_ids.shape[0]:
            raise ShapeError(f"{kv_tokens} tokens need {blocks} blocks of {self._block_size}, the table has {block_ids.shape[0]}")
        if self._graph_tokens is not None and num_queries != self._graph_tokens:
            raise ShapeError(f"captured for {self._graph_tokens} queries, asked to plan {num_queries}")
        self._plan = (num_queries, seq_len, kv_start, block_ids)
        if self._wrapper is None:
            return
        self._planner.plan(
            torch.tensor([0, num_queries], dtype=torch.int32),
            torch.tensor([0, blocks], dtype=torch.int32),
            block_ids[:blocks],
            torch.tensor([kv_tokens - (blocks - 1) * self._block_size], dtype=torch.int32),
            self._heads.num_qo_heads,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            self._block_size,
            causal=True,
            window_left=self._window_left,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            disable_split_kv=True,  # a chunk's tiles fill the chip; without it a graph's plan always splits and merges
        )

    def run(self, q: Tensor, kv_pool: Tensor, sinks: Tensor) -> Tensor:
        """Softmax attention with the sink once per row.

        Shapes: q [T, H, D] bf16, T as planned; kv_pool [N, 2, K, block_size, D] bf16, all values finite; sinks [H] fp32
        Returns: [T, H, D] in q.dtype
        Effects: reads kv_pool; capturable; no host sync
        Source: FlashInfer BatchAttentionWithAttentionSinkWrapper; `paged_attention_ref`
        """
        if self._wrapper is None:
            return self._run_ref(q, kv_pool, sinks)
        return self._wrapper.run(q, kv_pool, sinks, self._sm_scale, out=torch.empty_like(q))

    @property
    def _window_left(self) -> int:
        """FlashInfer counts the keys left of the query."""
        return -1 if self._window_tokens is None else self._window_tokens - 1

    def _make_wrapper(self, workspace: Tensor, graph_blocks: int | None):
        from flashinfer import BatchAttentionWithAttentionSinkWrapper

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=workspace.device)

        buffers = {}
        if graph_blocks is not None:
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": ints(2),
                "paged_kv_indptr_buf": ints(2),
                "paged_kv_indices_buf": ints(graph_blocks),
                "paged_kv_last_page_len_buf": ints(1),
            }
        return BatchAttentionWithAttentionSinkWrapper(
            workspace,
            kv_layout="HND",
            backend=self.backend,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            head_dim_qk=self._heads.head_dim,
            head_dim_vo=self._heads.head_dim,
            window_left=self._window_left,
            **buffers,
        )

    def _run_ref(self, q: Tensor, kv_pool: Tensor, sinks: Tensor) -> Tensor:
        assert self._plan is not None, "plan() comes before run()"
        num_queries, seq_len, kv_start, block_ids = self._plan
        return paged_attention_ref(
            q,
            kv_pool,
            block_ids[None],
            torch.tensor([kv_start]),
            torch.tensor([seq_len]),
            torch.tensor([0, num_queries]),
            sinks,
            window=self._window_tokens,
            sm_scale=self._sm_scale,
        )


def attention_workspace(device: torch.device | str) -> Tensor:
    """Scratch memory that the attention objects of one stream share."""
    return torch.empty(WORKSPACE_BYTES if torch.device(device).type == "cuda" else 0, dtype=torch.uint8, device=device)
