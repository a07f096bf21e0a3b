"""One sequence's attention through each kernel that serves: prefill over the pool's blocks, prefill over contiguous rows, decode.

Legend: L tokens of the sequence, T queries: its last ones, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kernels.attention_decode import SplitWorkspace, attention_full, attention_sliding, chunk_blocks, num_chunks
from kernels.attention_prefill import AttentionHeads, PrefillAttention, attention_workspace
from kernels.attention_prompt import PromptAttention, window_attention
from kernels.reference import paged_attention_ref

WINDOW, BLOCK_SIZE, HEAD_DIM = 128, 16, 64
SM_SCALE = HEAD_DIM**-0.5
WAYS = ("paged", "rows", "decode")
STALE = 1000.0  # what blocks hold beyond the sequence's tokens, where a kernel's contract wants finite pools


def heads_on(device: str) -> AttentionHeads:
    """gpt-oss' on a GPU, fewer where kernels are emulated; groups differ from KV heads."""
    return AttentionHeads(64, 8, HEAD_DIM) if device == "cuda" else AttentionHeads(8, 2, HEAD_DIM)


@dataclass(frozen=True)
class Sequence:
    """Shapes: q [T, H, D], k, v [L, K, D] bf16; sinks [H] fp32. Units: window: keys visible to a query, None for all"""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor
    window: int | None

    @property
    def length(self) -> int:
        return self.k.shape[0]

    def last(self, queries: int) -> Sequence:
        return replace(self, q=self.q[-queries:].contiguous())


def random_sequence(device: str, length: int, queries: int, window: int | None) -> Sequence:
    heads, generator = heads_on(device), torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, HEAD_DIM, generator=generator).bfloat16().to(device)

    k, v = draw(length, heads.num_kv_heads), draw(length, heads.num_kv_heads)
    sinks = torch.randn(heads.num_qo_heads, generator=generator).to(device)
    return Sequence(2 * draw(queries, heads.num_qo_heads), k, v, sinks, window)


def equal_scores(device: str, length: int, queries: int, window: int | None) -> Sequence:
    """Every key scores 0 and has value 1; the sink weighs as much as the last query's keys together."""
    s = random_sequence(device, length, queries, window)
    visible = min(length, window or length)
    return replace(s, q=torch.zeros_like(s.q), v=torch.ones_like(s.v), sinks=torch.full_like(s.sinks, float(visible)).log())


def attend(way: str, s: Sequence) -> Tensor:
    """[T, H, D] fp32."""
    return {"paged": _paged, "rows": _rows, "decode": _decode}[way](s).float()


def attend_ref(s: Sequence) -> Tensor:
    """The same in fp32 from the same bf16 inputs."""
    pool = torch.stack((s.k, s.v)).transpose(1, 2)[None].float()
    ints = [torch.tensor(x, device=s.q.device) for x in ([0], [s.length], [0, s.q.shape[0]])]
    table = torch.zeros(1, 1, dtype=torch.int32, device=s.q.device)
    return paged_attention_ref(s.q.float(), pool, table, *ints, s.sinks, window=s.window, sm_scale=SM_SCALE)


def _paged(s: Sequence) -> Tensor:
    pool, table = _blocks(s, STALE)
    attention = _paged_attention(_heads(s), s.window, s.q.device)
    attention.plan(s.q.shape[0], s.length, table)
    return attention.run(s.q, pool, s.sinks)


def _rows(s: Sequence) -> Tensor:
    if s.window is not None:
        return window_attention(s.q, s.k, s.v, s.sinks, s.window)
    attention = _prompt_attention(_heads(s), s.q.device)
    attention.plan(s.q.shape[0], s.length)
    return attention.run(s.q, s.k, s.v, s.sinks)


def _decode(s: Sequence) -> Tensor:
    """Every query is a row of the batch, with a length of its own; all read the same blocks."""
    rows = s.q.shape[0]
    pool, table = _blocks(s, float("nan"))
    lens = torch.arange(s.length - rows + 1, s.length + 1, dtype=torch.int32)
    tables = table.repeat(rows, 1)
    out = torch.full_like(s.q, float("nan"))
    if s.window is not None:
        first = max(0, s.length - rows + 1 - s.window) // BLOCK_SIZE
        tables, starts = tables[:, first:].contiguous(), torch.full_like(lens, first * BLOCK_SIZE).to(s.q.device)
        return attention_sliding(s.q, pool, tables, starts, lens.to(s.q.device), s.sinks, out, window=s.window, sm_scale=SM_SCALE)
    workspace = SplitWorkspace.allocate(rows, s.k.shape[1], rows * s.length, s.q.device)
    size = chunk_blocks(rows, s.k.shape[1])
    workspace.cu_chunks.copy_(torch.tensor([0, *(num_chunks(n, size) for n in lens.tolist())]).cumsum(0))
    return attention_full(s.q, pool, tables, lens.to(s.q.device), s.sinks, out, workspace, sm_scale=SM_SCALE)


def _blocks(s: Sequence, beyond: float) -> tuple[Tensor, Tensor]:
    """The sequence in shuffled blocks among others. Returns: pool [N, 2, K, block_size, D], block ids [ceil(L / block_size)] int32"""
    blocks = -(-s.length // BLOCK_SIZE)
    ids = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(s.length))[:blocks].to(s.q.device)
    padded = torch.full((blocks * BLOCK_SIZE, 2, *s.k.shape[1:]), beyond, dtype=s.k.dtype, device=s.k.device)
    padded[: s.length] = torch.stack((s.k, s.v), dim=1)
    pool = torch.full((blocks + 3, 2, s.k.shape[1], BLOCK_SIZE, HEAD_DIM), beyond, dtype=s.k.dtype, device=s.k.device)
    pool[ids] = padded.unflatten(0, (blocks, BLOCK_SIZE)).permute(0, 2, 3, 1, 4)
    return pool, ids.int()


def _heads(s: Sequence) -> AttentionHeads:
    return AttentionHeads(s.q.shape[1], s.k.shape[1], HEAD_DIM)


@cache
def _workspace(device: torch.device) -> Tensor:
    return attention_workspace(device)


@cache
def _paged_attention(heads: AttentionHeads, window: int | None, device: torch.device) -> PrefillAttention:
    return PrefillAttention(heads, BLOCK_SIZE, window_tokens=window, workspace=_workspace(device))


@cache
def _prompt_attention(heads: AttentionHeads, device: torch.device) -> PromptAttention:
    return PromptAttention(heads, workspace=_workspace(device))
