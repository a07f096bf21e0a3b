"""Attention of a decode step over paged KV, one query a sequence: sliding layers in one launch without splits, full layers cut into chunks.

CUDA kernels of our own, since the time of a small batch is launches and the library's sink kernels plan on the host. Called by
`model/decode_cuda.py`. Legend: B sequences, H query heads, K KV heads, D head_dim (64), N blocks, S block_size (16), M table width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels import cuda_library
from kernels.reference import paged_attention_ref

BLOCK_SIZE, HEAD_DIM, MAX_GROUP = 16, 64, 8
SHORT_CHUNK, LONG_CHUNK, MAX_CHUNKS = 32, 128, 32  # blocks, blocks, chunks


@dataclass(frozen=True)
class SplitWorkspace:
    """Scratch of the full layers' kernel, shared by all layers of a step.

    Shapes: cu_chunks [max_batch + 1] int32, written by `prepare_step`; partial_acc [items, 8 * D], partial_stats [items, 4, 8, 2] fp32
    Shapes: arrived [max_batch * K * 4], tickets [2] int32, zero between launches
    """

    cu_chunks: Tensor
    partial_acc: Tensor
    partial_stats: Tensor
    arrived: Tensor
    tickets: Tensor

    @classmethod
    def allocate(cls, max_batch: int, num_kv_heads: int, kv_tokens: int, device: torch.device | str) -> SplitWorkspace:
        """Units: kv_tokens: the most tokens that all running sequences hold together in full layers"""
        items = (kv_tokens // (SHORT_CHUNK * BLOCK_SIZE) + max_batch) * num_kv_heads
        return cls(
            torch.zeros(max_batch + 1, dtype=torch.int32, device=device),
            torch.empty(items, MAX_GROUP * HEAD_DIM, dtype=torch.float32, device=device),
            torch.empty(items, 4, MAX_GROUP, 2, dtype=torch.float32, device=device),
            torch.zeros(max_batch * num_kv_heads * 4, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )


def chunk_blocks(rows: int, num_kv_heads: int) -> int:
    """KV blocks of the chunks that full attention cuts sequences into, in a step of `rows` rows: short ones where it takes them to give
    every multiprocessor work, long ones where partial results cost more (at 128 rows, 35 us of 570 with short ones).
    """
    return SHORT_CHUNK if rows * num_kv_heads <= 128 else LONG_CHUNK


def num_chunks(seq_len: int, chunk_blocks: int) -> int:
    """Chunks of a sequence, at most 32: those of a longer one are multiples of `chunk_blocks`."""
    blocks = -(-seq_len // BLOCK_SIZE)
    return -(-blocks // (chunk_blocks * -(-blocks // (chunk_blocks * MAX_CHUNKS)))) if blocks else 0


def attention_sliding(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    kv_start: Tensor,
    seq_lens: Tensor,
    sink: Tensor,
    out: Tensor,
    *,
    window: int,
    sm_scale: float,
) -> Tensor:
    """One query a sequence over its last `window` keys.

    Shapes: q, out [B, H, D] bf16; kv_pool [N, 2, K, S, D] bf16; block_table [B, M] int32, oldest block first; sink [H] fp32
    Shapes: kv_start [B] int32: position of the table's first token; seq_lens [B] int32, counts the new token, 0 for a padded row
    Units: window: keys visible, the query's own included; sm_scale: 1 / sqrt(head_dim)
    Returns: out; padded rows get zeros. The sink counts once, unscaled.
    Effects: one kernel; reads kv_pool only; no host sync; capturable. A row does not depend on the others, bit for bit.
    Raises: ShapeError
    """
    group = _check(q, kv_pool, block_table, "attention_sliding")
    if not cuda_library.runs(q):
        return _on_cpu(q, kv_pool, block_table, kv_start, seq_lens, sink, out, window, sm_scale)
    launch_sliding(q, kv_pool, block_table, kv_start, seq_lens, sink, out, window=window, sm_scale=sm_scale, group=group)
    return out


def attention_full(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sink: Tensor,
    out: Tensor,
    workspace: SplitWorkspace,
    *,
    sm_scale: float,
) -> Tensor:
    """One query a sequence over all its keys. Shapes, effects and errors as in `attention_sliding`; tables start at position 0.

    Returns: out; a row's bits depend on its own sequence and on `chunk_blocks`, which takes two values, nothing else
    Effects: needs `prepare_step` of the same seq_lens and `chunk_blocks` before it in the stream; uses the workspace
    """
    group = _check(q, kv_pool, block_table, "attention_full")
    if not cuda_library.runs(q):
        return _on_cpu(q, kv_pool, block_table, torch.zeros_like(seq_lens), seq_lens, sink, out, None, sm_scale)
    launch_full(q, kv_pool, block_table, seq_lens, sink, out, workspace, sm_scale=sm_scale, group=group)
    return out


def launch_sliding(q, kv_pool, block_table, kv_start, seq_lens, sink, out, *, window: int, sm_scale: float, group: int) -> None:
    """The launch alone; arguments as in `attention_sliding`, group = H / K."""
    cuda_library.call(
        "attention_sliding", "tandem_attention_sliding", q, kv_pool, block_table, kv_start, seq_lens, sink, out, q.shape[0],
        kv_pool.shape[2], group, block_table.shape[1], window, float(sm_scale),
    )  # fmt: skip


def launch_full(q, kv_pool, block_table, seq_lens, sink, out, workspace: SplitWorkspace, *, sm_scale: float, group: int) -> None:
    """The launch alone; arguments as in `attention_full`, group = H / K."""
    cuda_library.call(
        "attention_full", "tandem_attention_full", q, kv_pool, block_table, seq_lens, sink, out, workspace.cu_chunks,
        workspace.partial_acc, workspace.partial_stats, workspace.arrived, workspace.tickets, q.shape[0],
        kv_pool.shape[2], group, block_table.shape[1], chunk_blocks(q.shape[0], kv_pool.shape[2]), float(sm_scale),
        cuda_library.multiprocessors(q.device.index or 0),
    )  # fmt: skip


def _check(q: Tensor, kv_pool: Tensor, block_table: Tensor, op: str) -> int:
    _, two, heads, block_size, dim = kv_pool.shape
    group = q.shape[1] // heads
    fits = (two, dim, q.shape[2], group * heads) == (2, HEAD_DIM, HEAD_DIM, q.shape[1]) and group <= MAX_GROUP
    if not fits or block_size != BLOCK_SIZE or block_table.dtype != torch.int32 or not kv_pool.is_contiguous():
        raise ShapeError(
            f"{op}: q {tuple(q.shape)}, kv_pool {tuple(kv_pool.shape)}, table {block_table.dtype}; expected head_dim {HEAD_DIM}, blocks of "
            f"{BLOCK_SIZE} tokens, at most {MAX_GROUP} query heads on a KV head, an int32 table and a contiguous pool"
        )
    return group


def _on_cpu(q, kv_pool, block_table, kv_start, seq_lens, sink, out, window, sm_scale):
    bounds = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    result = paged_attention_ref(q, kv_pool, block_table, kv_start, seq_lens, bounds, sink, window=window, sm_scale=sm_scale)
    out.copy_(result.masked_fill((seq_lens == 0)[:, None, None], 0.0))
    return out
