"""From sequences (token ids, positions, block ids) to the index tensors of one forward pass.

Pure: integers in, tensors out; decides nothing about scheduling. Called by both workers' ranks for each step.
Legend: T tokens, B sequences, M blocks of the longest table, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from common.errors import ServingError


@dataclass(frozen=True)
class SequenceView:
    """One sequence's part of a step.

    `token_ids`: the new tokens; `start`: position of the first of them; `full_blocks`: block ids of logical blocks 0, 1, ...;
    `sliding_blocks`: block ids of logical blocks `sliding_first`, `sliding_first + 1`, ...
    """

    token_ids: Sequence[int]
    start: int
    full_blocks: Sequence[int]
    sliding_first: int
    sliding_blocks: Sequence[int]


@dataclass(frozen=True)
class AttentionTables:
    """Where one layer kind's KV lies.

    Shapes: block_table [B, M] int32, unused entries -1; kv_start [B] int32, position of the first token of the table's first block
    Shapes: slot_mapping [T] int64 = block_id * block_size + offset, -1 for a token whose block is gone
    """

    block_table: Tensor
    kv_start: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True)
class StepBatch:
    """Everything one forward pass needs besides weights and KV.

    Shapes: token_ids, positions [T] int64; cu_seqlens_q [B + 1] int32; seq_lens [B] int32, counts the new tokens
    Shapes: logits_rows [R] int64, rows of T in rising order
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    full: AttentionTables
    sliding: AttentionTables
    logits_rows: Tensor


def build_batch(
    views: Sequence[SequenceView], block_size: int, device: torch.device | str, logits: Literal["last", "all", "none"]
) -> StepBatch:
    """Joins sequences into one ragged batch; sequences without new tokens are allowed and want no logits.

    Units: block_size [tokens]; logits: rows wanted: the last new token of each sequence, every new token, or none
    Raises: ServingError if a full layer has no block for a token (its KV would be lost)
    """
    positions = [range(view.start, view.start + len(view.token_ids)) for view in views]
    bounds = _prefix_sums([len(view.token_ids) for view in views])
    for view, span in zip(views, positions, strict=True):
        if len(view.full_blocks) * block_size < span.stop:
            raise ServingError(f"{len(view.full_blocks)} full blocks of {block_size} tokens can't hold {span.stop} tokens")
    rows = {
        "all": list(range(bounds[-1])),
        "last": [end - 1 for begin, end in pairwise(bounds) if end > begin],
        "none": [],
    }[logits]
    return StepBatch(
        token_ids=_ints([token for view in views for token in view.token_ids], torch.int64, device),
        positions=_ints([p for span in positions for p in span], torch.int64, device),
        cu_seqlens_q=_ints(bounds, torch.int32, device),
        seq_lens=_ints([span.stop for span in positions], torch.int32, device),
        full=_tables([(0, view.full_blocks) for view in views], positions, block_size, device),
        sliding=_tables([(view.sliding_first, view.sliding_blocks) for view in views], positions, block_size, device),
        logits_rows=_ints(rows, torch.int64, device),
    )


def build_prefill_batch(
    view: SequenceView, block_size: int, device: torch.device | str, *, logits: Literal["last", "all", "none"] = "last"
) -> StepBatch:
    """One chunk of one prompt; `logits="none"` for every chunk but the last."""
    return build_batch([view], block_size, device, logits)


def build_decode_batch(views: Sequence[SequenceView], block_size: int, device: torch.device | str) -> StepBatch:
    """One new token of each running sequence.

    Raises: ServingError if a sequence does not have exactly one new token
    """
    if any(len(view.token_ids) != 1 for view in views):
        raise ServingError("a decode step takes exactly one new token of each sequence")
    return build_batch(views, block_size, device, "last")


def _tables(
    blocks: list[tuple[int, Sequence[int]]], positions: list[range], block_size: int, device: torch.device | str
) -> AttentionTables:
    width = max((len(ids) for _, ids in blocks), default=0) or 1
    table = [[*ids, *[-1] * (width - len(ids))] for _, ids in blocks]
    slots = [_slot(p, first, ids, block_size) for (first, ids), span in zip(blocks, positions, strict=True) for p in span]
    return AttentionTables(
        block_table=_ints(table, torch.int32, device).view(len(blocks), width),
        kv_start=_ints([first * block_size for first, _ in blocks], torch.int32, device),
        slot_mapping=_ints(slots, torch.int64, device),
    )


def _slot(position: int, first: int, ids: Sequence[int], block_size: int) -> int:
    logical = position // block_size - first
    return ids[logical] * block_size + position % block_size if 0 <= logical < len(ids) else -1


def _prefix_sums(counts: list[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def _ints(values: list, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
