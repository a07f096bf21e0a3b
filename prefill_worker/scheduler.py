"""Which prompt a prefill group computes next, in which chunks, on which blocks.

Pure: no tensors, no clock, no I/O. Owned by the leader's engine thread. First in, first out, one prompt at a time; a prompt's source blocks
stay taken after its last chunk until its push is over, while the next prompt computes.

    WAITING --next_chunk--> COMPUTING --finish--> PUSHING --release--> (free)
       |                        |
       +--------release---------+--> (free)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common.block_pool import KVPools
from common.errors import CapacityError
from common.kv_layout import KVGeometry


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a prompt, and all the blocks that the forward pass over them may touch."""

    key: str
    start: int
    end: int
    is_last: bool
    full_blocks: tuple[int, ...]
    sliding_first: int
    sliding_blocks: tuple[int, ...]


@dataclass
class _Prompt:
    key: str
    num_tokens: int
    num_done: int = 0
    full: tuple[int, ...] = ()
    sliding_first: int = 0
    sliding: deque[int] = field(default_factory=deque)  # of logical blocks sliding_first, sliding_first + 1, ...


class PrefillScheduler:
    """Units: chunk_tokens: most new tokens per forward pass"""

    def __init__(self, geometry: KVGeometry, full_blocks: int, sliding_blocks: int, chunk_tokens: int):
        self._geometry = geometry
        self.pools = KVPools.of(full_blocks, sliding_blocks)
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[_Prompt] = deque()
        self._computing: _Prompt | None = None
        self._pushing: dict[str, _Prompt] = {}

    def submit(self, key: str, num_tokens: int) -> None:
        """Raises: CapacityError if the prompt is longer than the pool will ever hold"""
        if self._geometry.blocks_for(num_tokens) > self.pools.full.num_blocks:
            most = self.pools.full.num_blocks * self._geometry.block_size_tokens
            raise CapacityError(f"a prompt of {num_tokens} tokens; this prefill group holds {most}")
        self._waiting.append(_Prompt(key, num_tokens))

    def next_chunk(self) -> Chunk | None:
        """The chunk to compute now; None if nothing waits or the next prompt's blocks are not free yet."""
        if self._computing is None and not self._begin_next():
            return None
        prompt, g = self._current(), self._geometry
        start, end = prompt.num_done, min(prompt.num_done + self._chunk_tokens, prompt.num_tokens)
        self._drop_sliding(prompt, g.first_live_block(start))
        missing = g.blocks_for(end) - prompt.sliding_first - len(prompt.sliding)
        prompt.sliding.extend(self.pools.sliding.allocate(missing, prompt.key).block_ids)
        is_last = end == prompt.num_tokens
        return Chunk(prompt.key, start, end, is_last, prompt.full[: g.blocks_for(end)], prompt.sliding_first, tuple(prompt.sliding))

    def full_blocks(self, key: str) -> tuple[int, ...]:
        """All full-layer blocks of the prompt that is being computed."""
        prompt = self._current()
        assert prompt.key == key
        return prompt.full

    def chunk_done(self) -> None:
        """The forward pass over the last chunk given out is over."""
        prompt = self._current()
        prompt.num_done = min(prompt.num_done + self._chunk_tokens, prompt.num_tokens)

    def finish(self) -> None:
        """COMPUTING -> PUSHING, keeping only what is handed over."""
        prompt, self._computing = self._current(), None
        self._drop_sliding(prompt, self._geometry.handover_blocks(prompt.num_tokens, sliding=True)[0])
        self._pushing[prompt.key] = prompt

    def release(self, key: str) -> None:
        """Forgets a prompt in any state and frees its blocks; unknown keys are fine. Nobody may read or write the blocks any more."""
        prompt = self._pushing.pop(key, None)
        if self._computing is not None and self._computing.key == key:
            prompt, self._computing = self._computing, None
        if prompt is not None:
            self.pools.full.free(prompt.full, key)
            self.pools.sliding.free(tuple(prompt.sliding), key)
        else:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.key != key)

    @property
    def computing(self) -> str | None:
        return self._computing.key if self._computing else None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_pushing(self) -> int:
        return len(self._pushing)

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of waiting and computing prompts that no forward pass has seen."""
        left = sum(prompt.num_tokens for prompt in self._waiting)
        return left + (self._computing.num_tokens - self._computing.num_done if self._computing else 0)

    def _current(self) -> _Prompt:
        assert self._computing is not None
        return self._computing

    def _begin_next(self) -> bool:
        """WAITING -> COMPUTING if all blocks that the prompt will ever need are free."""
        if not self._waiting:
            return False
        prompt, g = self._waiting[0], self._geometry
        full = g.blocks_for(prompt.num_tokens)
        if full > self.pools.full.num_free or min(full, g.sliding_blocks_worst(self._chunk_tokens)) > self.pools.sliding.num_free:
            return False
        self._computing = self._waiting.popleft()
        prompt.full = self.pools.full.allocate(full, prompt.key).block_ids
        return True

    def _drop_sliding(self, prompt: _Prompt, first_kept: int) -> None:
        """Frees the sliding blocks before logical block `first_kept`."""
        dropped = []
        while prompt.sliding and prompt.sliding_first < first_kept:
            dropped.append(prompt.sliding.popleft())
            prompt.sliding_first += 1
        self.pools.sliding.free(dropped, prompt.key)


def sliding_blocks_for(geometry: KVGeometry, chunk_tokens: int, pushes: int) -> int:
    """Sliding blocks of a group that computes one prompt while up to `pushes` others are handed over."""
    handed_over = geometry.sliding_blocks_worst(1)
    return geometry.sliding_blocks_worst(chunk_tokens) + pushes * handed_over
