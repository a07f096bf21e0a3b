"""Chooses the next tokens on the GPU: greedy, or temperature with top-k, top-p and min-p, seeded per row.

Owns the kernels' buffers and the plain twin. Masks, penalties and log-probabilities are `model/sampling.py`'s, on the CPU. Called by
`model/decode_cuda.py` inside the step's graph.

Random numbers are Philox4x32-10 of (seed, position, token id); the choice is the largest logit / temperature + Gumbel noise. A row's token
depends on its logits, parameters, seed and position alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cuda_library

PARTS = 64
BAD_LOGITS = -1
LARGEST_INVERSE = 1e30  # of a temperature: logits times it are finite, and noise is nothing beside them


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of each row, on the device; the host writes them when a sequence is admitted.

    Shapes: all [B]: temperature, top_p, min_p fp32; top_k int32; seed int64
    Units: temperature 0 for greedy; top_k 0, top_p 1 and min_p 0 switch a filter off
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor

    @classmethod
    def greedy(cls, rows: int, device: torch.device | str) -> SamplingRows:
        def full(value, dtype):
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            full(0.0, torch.float32),
            full(0, torch.int32),
            full(1.0, torch.float32),
            full(0.0, torch.float32),
            full(0, torch.int64),
        )

    def first(self, rows: int) -> SamplingRows:
        return SamplingRows(self.temperature[:rows], self.top_k[:rows], self.top_p[:rows], self.min_p[:rows], self.seed[:rows])


@dataclass(frozen=True)
class SamplingScratch:
    """Shapes: best [B, 64] fp32; best_id [B, 64] int32; arrived [B] int32, zero between launches."""

    best: Tensor
    best_id: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> SamplingScratch:
        return cls(
            torch.empty(rows, PARTS, dtype=torch.float32, device=device),
            torch.empty(rows, PARTS, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


def sample_tokens(
    logits: Tensor,
    rows: SamplingRows,
    seq_lens: Tensor,
    tokens: Tensor,
    scratch: SamplingScratch,
    *,
    unfiltered: bool,
    keep_greedy: bool = False,
) -> Tensor:
    """The next token of each row.

    Shapes: logits [B, V] fp32; seq_lens [B] int32: position of the new token, 0 for a padded row; tokens [B] int32 out
    Units: unfiltered: no row has a filter; the second kernel is left out. keep_greedy: rows without a temperature keep their token
    Returns: tokens: an id below V; BAD_LOGITS (-1) where a logit is NaN or infinite; 0 for padded rows
    Effects: one kernel, two if not `unfiltered`; no host sync; capturable
    Source: filters and their order as in model/sampling.py; equal logits share a filter's fate
    """
    if not cuda_library.runs(logits):
        chosen = sample_ref(logits, rows, seq_lens).to(tokens.device)
        tokens.copy_(torch.where(rows.temperature > 0, chosen, tokens) if keep_greedy else chosen)
        return tokens
    launch_sample(logits, rows, seq_lens, tokens, scratch, unfiltered, keep_greedy)
    return tokens


def launch_sample(
    logits, rows: SamplingRows, seq_lens, tokens, scratch: SamplingScratch, unfiltered: bool, keep_greedy: bool = False
) -> None:
    """The launch alone; arguments as in `sample_tokens`."""
    cuda_library.call(
        "sampling", "tandem_sample", logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, seq_lens, tokens,
        scratch.best, scratch.best_id, scratch.arrived, logits.shape[0], logits.shape[1], PARTS, unfiltered, keep_greedy,
    )  # fmt: skip


def philox_ref(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """First word of Philox4x32-10 with counter (token id, position, 0, 0) and key seed. Returns: int64 in [0, 2^32)."""
    mask = 0xFFFFFFFF
    c = [
        token_ids.long(),
        torch.full_like(token_ids.long(), position & mask),
        torch.zeros_like(token_ids.long()),
        torch.zeros_like(token_ids.long()),
    ]
    k = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        (h0, l0), (h1, l1) = _wide_product(0xD2511F53, c[0]), _wide_product(0xCD9E8D57, c[2])
        c = [h1 ^ c[1] ^ k[0], l1, h0 ^ c[3] ^ k[1], l0]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0]


def _wide_product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, both below 2^32, without leaving int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel_ref(seed: int, position: int, vocab: int) -> Tensor:
    """Gumbel noise of every token of one row: [vocab] fp32."""
    u = ((philox_ref(seed, position, torch.arange(vocab)) >> 8).float() + 0.5) / 16777216.0
    return -torch.log(-torch.log(u))


def sample_ref(logits: Tensor, rows: SamplingRows, seq_lens: Tensor) -> Tensor:
    """Plain twin of `sample_tokens`: [B] int32."""
    out = torch.zeros(logits.shape[0], dtype=torch.int32)
    for b, position in enumerate(seq_lens.tolist()):
        x = logits[b].float().cpu()
        if position == 0:
            continue
        if not x.isfinite().all():
            out[b] = BAD_LOGITS
            continue
        temperature = float(rows.temperature[b])
        if temperature > 0:
            x = _filtered(x, temperature, int(rows.top_k[b]), float(rows.top_p[b]), float(rows.min_p[b]))
            x = x * min(1.0 / temperature, LARGEST_INVERSE) + gumbel_ref(int(rows.seed[b]), position, x.shape[0])
        out[b] = int(x.argmax())
    return out


def _filtered(x: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    floor = torch.tensor(-torch.inf)
    if 0 < top_k < x.shape[0]:
        floor = x.topk(top_k).values[-1]
    if top_p < 1.0:
        values = x[x >= floor].sort(descending=True).values
        mass = ((values - values[0]).double() / temperature).exp()
        reached = mass.cumsum(0) >= top_p * mass.sum()
        floor = torch.maximum(floor, values[int(reached.int().argmax())])
    if min_p > 0.0:
        floor = torch.maximum(floor, x.max() + torch.tensor(min_p).log() * temperature)
    return x.masked_fill(x < floor, -torch.inf)
