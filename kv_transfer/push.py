"""The unit of work of a transport: tokens of one layer that one prefill rank writes for one decode rank.

Plain data and the cutting of a token range at block edges. Made by the sender, carried out by links.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kernels.digest import DigestKey
from kv_transfer.device import Moment


@dataclass(frozen=True)
class Span:
    """Tokens [begin, end) of each of `count` blocks that follow each other logically; `first_logical` is the first one's index."""

    first_logical: int
    count: int
    begin: int
    end: int


def split_spans(start_token: int, end_token: int, block_size: int) -> list[Span]:
    """Cuts tokens [start_token, end_token) into at most three spans: rest of a block, whole blocks, start of a block."""
    spans = []
    while start_token < end_token:
        block, begin = divmod(start_token, block_size)
        whole = (end_token - start_token) // block_size
        if begin == 0 and whole:
            span = Span(block, whole, 0, block_size)
        else:
            span = Span(block, 1, begin, min(block_size, begin + end_token - start_token))
        spans.append(span)
        start_token += span.count * (span.end - span.begin)
    return spans


@dataclass(frozen=True)
class DevicePart:
    """What a push of memory on a device needs besides: nothing of it was waited for, the device keeps the order.

    Shapes: source_ids, target_ids as in `Push`, int32 on the device; source_ids None: 0, 1, 2, ...; key: on the device
    Units: ready: when the source holds the tokens
    """

    ready: Moment
    source_ids: Tensor | None
    target_ids: Tensor
    key: DigestKey


@dataclass(frozen=True)
class Push:
    """`source_ids[i]` and `target_ids[i]` (granted with `target_epochs[i]`) are the two sides' blocks of logical index `first_logical + i`.

    Shapes: source [N, 2, K, S, D], one layer; ids and epochs int64 [n]
    Units: heads are local to their side, `first_head` counts the model's; `tokens` [start, end) are positions in the sequence
    """

    transfer_id: int
    incarnation: int
    layer: int
    tokens: tuple[int, int]
    first_logical: int
    source: Tensor
    source_ids: np.ndarray
    source_head: int
    target_ids: np.ndarray
    target_epochs: np.ndarray
    target_head: int
    first_head: int
    num_heads: int
    device: DevicePart | None = None

    @property
    def spans(self) -> list[Span]:
        return split_spans(*self.tokens, self.source.shape[3])

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over the heads of this push."""
        return 2 * self.num_heads * self.source.shape[4] * self.source.element_size()

    @property
    def nbytes(self) -> int:
        return (self.tokens[1] - self.tokens[0]) * self.token_bytes
