"""The last act of a decode step on an H200: from the normed hidden states to the next token of every row.

Owns the vocabulary's two copies, bf16 and 8 bits, and the buffers of logits and choice. Alone, rows take words by screening wherever nobody
needs all logits; in a group every rank judges its own words, and rank 0 samples from all of them. Called by `model/decode_cuda.py` inside
the step's graph. Legend: B rows of a bucket, V local rows of the vocabulary, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.decode_fused import MAX_STREAMED_TOKENS, vocabulary_logits
from kernels.peers import Peers
from kernels.sampling_cuda import SamplingRows, SamplingScratch, sample_tokens
from kernels.vocabulary import MAX_SCREENED_TOKENS, Screen, ScreenScratch, choose_words, make_screen, settle_ties


@dataclass(frozen=True)
class Vocabulary:
    """Shapes: weight [V, C] bf16, the rows of the output matrix from `start` on"""

    weight: Tensor
    screen: Screen
    start: int


def pack_vocabulary(weight: Tensor, start: int) -> Vocabulary:
    return Vocabulary(weight, make_screen(weight), start)


@dataclass(frozen=True)
class WordScratch:
    """Shapes: logits [at least 16 and B, V] fp32; also the bounds of screened rows"""

    logits: Tensor
    sampling: SamplingScratch
    screen: ScreenScratch

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device | str) -> WordScratch:
        return cls(
            torch.empty(max(rows, MAX_STREAMED_TOKENS), vocab, dtype=torch.float32, device=device),
            SamplingScratch.allocate(rows, device),
            ScreenScratch.allocate(min(rows, MAX_SCREENED_TOKENS), device),
        )


class NextWords:
    """`peers`: the other ranks, which have the other words; None: there are none.

    Shapes: logits [max_batch, V] fp32 of this rank, after a step with `needs_logits`
    """

    def __init__(self, vocabulary: Vocabulary, scratch: WordScratch, max_batch: int, device: torch.device | str, peers: Peers | None):
        self._vocabulary = vocabulary
        self._scratch = scratch
        self._greedy = SamplingRows.greedy(max_batch, device)
        self._peers = peers
        self.logits = scratch.logits[:max_batch]

    def pick(self, normed: Tensor, sampling: SamplingRows, seq_lens: Tensor, tokens: Tensor, *, needs_logits: bool) -> None:
        """Shapes: normed [at least 16 and B, C] bf16, rows past B are stale; sampling, seq_lens [B] as in `sample_tokens`; tokens [B] out

        Units: needs_logits: as `CudaDecode.step` says. Effects: kernels on the current stream; capturable
        """
        if self._peers is None:
            self._choose(normed, sampling, seq_lens, tokens, needs_logits)
            return
        self._choose(normed, self._greedy.first(len(tokens)), seq_lens, tokens, needs_logits)
        self._peers.meet_best(self._scratch.sampling, seq_lens, tokens, self._vocabulary.start)
        if needs_logits:
            self._sample_together(self._peers, sampling, seq_lens, tokens)

    def _choose(self, normed: Tensor, sampling: SamplingRows, seq_lens: Tensor, tokens: Tensor, needs_logits: bool) -> None:
        """Among this rank's words. Up to 16 rows a row without filters gets its word from the same sums, screened or beside rows with
        filters."""
        s, vocabulary, rows = self._scratch, self._vocabulary, len(tokens)
        x, logits, best = normed[:rows], s.logits[:rows], s.sampling.best[:rows]
        is_small = rows <= MAX_SCREENED_TOKENS
        if is_small and not needs_logits:
            choose_words(
                x, vocabulary.weight, vocabulary.screen, sampling, seq_lens, bounds=logits, scratch=s.screen, tokens=tokens, best=best
            )  # fmt: skip
            return
        # Up to 16 rows are one product to the library, so that a row's logits don't depend on its bucket; rows past it are stale.
        computed = max(rows, MAX_STREAMED_TOKENS)
        vocabulary_logits(normed[:computed], vocabulary.weight, s.logits[:computed])
        unfiltered = not needs_logits or self._peers is not None
        sample_tokens(logits, sampling, seq_lens, tokens, s.sampling, unfiltered=unfiltered)
        if is_small:
            settle_ties(x, vocabulary.weight, vocabulary.screen, logits, sampling, seq_lens, scratch=s.screen, tokens=tokens, best=best)

    def _sample_together(self, peers: Peers, sampling: SamplingRows, seq_lens: Tensor, tokens: Tensor) -> None:
        """Rank 0 gets all logits and tells the tokens; greedy rows keep those that the ranks agreed on."""
        rows = len(tokens)
        peers.push_logits(self._scratch.logits[:rows], self._vocabulary.start)
        if peers.rank == 0:
            sample_tokens(
                peers.logits[:rows], sampling, seq_lens, tokens, self._scratch.sampling, unfiltered=False, keep_greedy=True
            )  # fmt: skip
        peers.spread_tokens(tokens)
