"""Sequences run through a model over paged KV as the workers would, with everything unused poisoned.

Block ids are shuffled, sliding blocks are given back as the window leaves them, and memory that belongs to nobody holds NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from model.batch import SequenceView, StepBatch, build_batch
from model.config import ModelConfig
from model.gpt_oss import GptOss
from model.kv_cache import KVCache

POISON = float("nan")


class PagedRun:
    """One rank's sequences. Every rank of a group makes the same calls and so arrives at the same block ids."""

    def __init__(
        self,
        config: ModelConfig,
        model: GptOss,
        *,
        tp: int = 1,
        rank: int = 0,
        num_sequences: int = 1,
        max_tokens: int = 1100,
        block_size: int = 16,
        kv_dtype: str = "float32",
        seed: int = 3,
    ):
        self.model = model
        self.block_size = block_size
        self.geometry = config.kv_geometry(block_size, kv_dtype)
        blocks = self.geometry.blocks_for(max_tokens)
        self.kv = KVCache(self.geometry, tp, rank, num_sequences * blocks + 3, num_sequences * blocks + 3, "cpu")
        self.kv.full.fill_(POISON)
        self.kv.sliding.fill_(POISON)
        shuffler = random.Random(seed)
        self._free_full = shuffler.sample(range(num_sequences * blocks + 3), num_sequences * blocks + 3)
        self._free_sliding = shuffler.sample(range(num_sequences * blocks + 3), num_sequences * blocks + 3)
        self.lengths = [0] * num_sequences
        self.full_blocks: list[list[int]] = [[] for _ in range(num_sequences)]
        self.sliding_first = [0] * num_sequences
        self.sliding_blocks: list[list[int]] = [[] for _ in range(num_sequences)]

    def step(
        self, new_tokens: Sequence[Sequence[int]], *, logits: str = "all", on_layer: Callable[[int], None] | None = None
    ) -> Tensor | None:
        """Appends each sequence's new tokens in one forward pass. Returns: what the model returns"""
        return self.model.forward(self.next_batch(new_tokens, logits), self.kv, on_layer)

    def next_batch(self, new_tokens: Sequence[Sequence[int]], logits: str = "all") -> StepBatch:
        views = [self._grow(i, tokens) for i, tokens in enumerate(new_tokens)]
        return build_batch(views, self.block_size, "cpu", logits)

    def _grow(self, i: int, tokens: Sequence[int]) -> SequenceView:
        start = self.lengths[i]
        self._drop_left_blocks(i, start)
        self.lengths[i] = start + len(tokens)
        wanted = self.geometry.blocks_for(self.lengths[i])
        while len(self.full_blocks[i]) < wanted:
            self.full_blocks[i].append(self._free_full.pop())
        while self.sliding_first[i] + len(self.sliding_blocks[i]) < wanted:
            self.sliding_blocks[i].append(self._free_sliding.pop())
        return SequenceView(tuple(tokens), start, tuple(self.full_blocks[i]), self.sliding_first[i], tuple(self.sliding_blocks[i]))

    def _drop_left_blocks(self, i: int, next_position: int) -> None:
        while self.sliding_blocks[i] and self.sliding_first[i] < self.geometry.first_live_block(next_position):
            block = self.sliding_blocks[i].pop(0)
            self.sliding_first[i] += 1
            self.kv.sliding[:, block] = POISON
            self._free_sliding.insert(0, block)


def greedy(run: PagedRun, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """Prefills all prompts in one ragged batch, then decodes them together. For a group of one rank."""
    logits = run.step(prompts, logits="last")
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_new):
        assert logits is not None
        chosen = logits.argmax(-1).tolist()
        for output, token in zip(outputs, chosen, strict=True):
            output.append(token)
        logits = run.step([[token] for token in chosen], logits="last")
    return outputs
