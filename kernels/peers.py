"""Where the ranks of a group meet on GPUs: sums of activations, logits to rank 0, tokens to all, over memory they map of each other.

Owns the layout of that memory and the launches; whoever starts a rank allocates and maps it (`model/peer_memory.py`). Every rank makes the
same calls in the same order. One barrier a call, inside the kernel, so all of it is captured in the step's graph; what the barrier rests on
is told in `cuda/peers.cu`. Called by `model/decode_cuda.py` and, for sums alone, by `model/prefill_cuda.py`.
Legend: R ranks, B rows, C hidden_size, V vocabulary, k experts_per_token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels import cuda_library
from kernels.reference import rms_norm_ref
from kernels.sampling_cuda import SamplingScratch

MAX_RANKS, MAX_ROWS = 8, 128  # as in peers.cu
SERVED_RANKS = (1, 2, 4, 8)
_FLAG_BYTES = MAX_ROWS * MAX_RANKS * 4
_ALIGNMENT = 2 << 20  # below 2 MiB the driver may put several allocations behind one handle


@dataclass(frozen=True)
class PeerLayout:
    """Where in each rank's memory what lies, in bytes; rank 0 alone has room for logits, at the end.

    Units: rows: that sums take at once, longer ones go piece by piece; at most 128 where logits and tokens are to meet; vocab: 0 where not
    """

    ranks: int
    rows: int
    columns: int
    vocab: int

    def __post_init__(self) -> None:
        if self.ranks not in SERVED_RANKS or (self.vocab and self.rows > MAX_ROWS):
            raise ShapeError(f"{self.ranks} ranks and {self.rows} rows meet; the kernels take {SERVED_RANKS} ranks and {MAX_ROWS} rows")

    @property
    def sum_flags(self) -> int:
        return 3 * _FLAG_BYTES

    @property
    def best(self) -> int:
        return self.sum_flags + self.rows * MAX_RANKS * 4

    @property
    def tokens(self) -> int:
        return self.best + 2 * MAX_RANKS * MAX_ROWS * 8

    @property
    def sums(self) -> int:
        return self.tokens + 2 * MAX_ROWS * 4

    @property
    def logits(self) -> int:
        return self.sums + 2 * self.rows * self.ranks * self.columns * 2

    def nbytes(self, rank: int) -> int:
        wanted = self.logits + (self.rows * self.vocab * 4 if rank == 0 else 0)
        return -(-wanted // _ALIGNMENT) * _ALIGNMENT


class Peers:
    """One rank's view of the group's memory.

    Shapes: memory [nbytes] uint8, this rank's own, zero at first; status [1] int32, see `missing_rank`
    Units: bases: per rank the address of its memory in this process; timeout_s: how long a meeting waits for a rank
    """

    def __init__(self, layout: PeerLayout, rank: int, memory: Tensor, bases: Sequence[int], status: Tensor, timeout_s: float):
        self.layout = layout
        self.rank = rank
        self.size = layout.ranks
        self._memory = memory
        self.status = status
        self.timeout_ms = timeout_s * 1e3
        self._arrived = torch.zeros(1, dtype=torch.int32, device=memory.device)
        meetings = {
            "sums": (layout.rows, layout.sum_flags, layout.sums),
            "best": (1, 0, layout.best),
            "logits": (1, _FLAG_BYTES, layout.logits),
            "tokens": (1, 2 * _FLAG_BYTES, layout.tokens),
        }
        self._meetings = {
            name: (
                torch.zeros(counts, dtype=torch.int32, device=memory.device),
                torch.tensor([flags, parts, *bases], dtype=torch.int64),
            )
            for name, (counts, flags, parts) in meetings.items()
        }

    @property
    def logits(self) -> Tensor:
        """[rows, V] fp32 that `push_logits` fills; on rank 0 alone."""
        values = self._memory[self.layout.logits :][: self.layout.rows * self.layout.vocab * 4]
        return values.view(torch.float32).view(self.layout.rows, self.layout.vocab)

    def sum_projection(self, x: Tensor, bias: Tensor, residual: Tensor) -> None:
        """residual += bias + the sum of all ranks' x, in fp32 and in rank order: the same bits on every rank.

        Shapes: x, residual [B, C] bf16; bias [C] bf16
        Effects: writes residual; one kernel; capturable; sets the status where a rank does not come
        """
        self._sum(residual, x=x, bias=bias)

    def sum_experts_norm(
        self,
        pairs: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        eps: float,
        first_expert: int,
        num_local_experts: int,
        normed: Tensor,
        rows: Tensor | None = None,
    ) -> None:
        """As `kernels.decode_fused.combine_norm`, over the experts of all ranks. A rank's own sum travels as bf16."""
        self._sum(
            residual, pairs=pairs, expert_ids=expert_ids, rows=rows, expert_weights=expert_weights, norm_weight=norm_weight,
            normed=normed, eps=eps, first_expert=first_expert, num_local_experts=num_local_experts,
        )  # fmt: skip

    def _sum(
        self,
        residual,
        *,
        x=None,
        bias=None,
        pairs=None,
        expert_ids=None,
        rows=None,
        expert_weights=None,
        norm_weight=None,
        normed=None,
        eps=0.0,
        first_expert=0,
        num_local_experts=0,
    ) -> None:
        choices = 0 if expert_ids is None else expert_ids.shape[1]
        ids, is_sorted = (expert_ids, False) if rows is None else (rows, True)
        for first in range(0, residual.shape[0], self.layout.rows):
            piece = slice(first, first + self.layout.rows)
            own = pairs if is_sorted or pairs is None else pairs[piece]
            self._call(
                "sum_rows", "sums", *_rows_of(piece, x), own, *_rows_of(piece, ids, expert_weights), bias, *_rows_of(piece, residual),
                norm_weight, *_rows_of(piece, normed), self.layout.rows, *residual[piece].shape, choices, first_expert, num_local_experts,
                is_sorted, float(eps),
            )  # fmt: skip

    def meet_best(self, scratch: SamplingScratch, seq_lens: Tensor, tokens: Tensor, first_word: int) -> None:
        """Tokens of the ranks' own words, as `sample_tokens` with all_greedy left them, to the best of all words.

        Shapes: seq_lens, tokens [B] int32; tokens in: counted from this rank's first word, out: the same ids on every rank
        Effects: one kernel; capturable; a row that one rank could not judge is BAD_LOGITS
        """
        self._call("meet_best", "best", scratch.best, seq_lens, tokens, tokens.shape[0], scratch.best.shape[1], first_word)

    def push_logits(self, logits: Tensor, first_word: int) -> None:
        """This rank's part of the vocabulary into `logits` of rank 0, which has all of them when its kernel ends.

        Shapes: logits [B, words] fp32, contiguous
        Effects: one kernel; capturable; `spread_tokens` must follow, after rank 0 has read them
        """
        blocks = 2 * cuda_library.multiprocessors(logits.device.index or 0)
        self._call("push_logits", "logits", logits, self._arrived, *logits.shape, first_word, self.layout.vocab, blocks)

    def spread_tokens(self, tokens: Tensor) -> None:
        """Rank 0's tokens to every rank. Shapes: tokens [B] int32, in on rank 0 and out on the others. One kernel; capturable."""
        self._call("spread_tokens", "tokens", tokens, tokens.shape[0])

    def _call(self, function: str, meeting: str, *arguments) -> None:
        counts, places = self._meetings[meeting]
        cuda_library.call(
            "peers", f"tandem_{function}", counts, self.status, places, float(self.timeout_ms), self.rank, self.size, *arguments
        )  # fmt: skip


def _rows_of(piece: slice, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor[piece] for tensor in tensors]


def missing_rank(status: int) -> int | None:
    """What a status says: the rank that did not come to a meeting in time; None if all is well."""
    return status - 1 if status else None


def sum_rows_ref(
    parts: Tensor, residual: Tensor, *, bias: Tensor | None = None, norm_weight: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Plain twin of the sums, given all ranks' parts.

    Shapes: parts [R, B, C] bf16; residual [B, C] bf16
    Returns: new residual [B, C] bf16; RMSNorm of it, if there are weights
    """
    total = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
    for part in parts:
        total += part.float()
    if bias is not None:
        total += bias.float()
    summed = (total + residual.float()).to(residual.dtype)
    return summed, None if norm_weight is None else rms_norm_ref(summed, norm_weight, eps)
