"""A model without weights whose next token is a hash of the KV that its pools hold: a wrong, stale or foreign block gives a wrong token.

`expected_tokens` computes the same without any pool, so tests know what every request must answer. Can be slow, fail or go NaN on demand.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.errors import KernelError, ServingError
from common.rank_spec import RankSpec
from common.requests import SamplingParams
from model.batch import AttentionTables, StepBatch
from model.build import BuiltModel
from model.config import ModelConfig
from model.decode_step import PlainDecodeStep, StepRows
from model.kv_cache import KVCache
from model.parallel import ParallelGroup
from model.sampling import SamplingState, TokenChoice, sample

CONFIG = ModelConfig(
    num_layers=4,
    hidden_size=64,
    intermediate_size=64,
    num_experts=8,
    experts_per_token=4,
    num_qo_heads=16,
    num_kv_heads=8,
    head_dim=8,
    vocab_size=997,
    window_tokens=128,
    sliding=(True, False, True, False),
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    rope_factor=32.0,
    rope_original_context=4096,
    rope_beta_fast=32.0,
    rope_beta_slow=1.0,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    max_position=131072,
    eos_token_ids=(2,),
)
NEVER_SAMPLED = 950
_MODULUS = 8191
_KV_VALUES = 251  # small whole numbers, exact in bfloat16


@dataclass(frozen=True)
class FakeModelBuilder:
    """Builds the fake in place of `model.build.build_model`. Picklable, for ranks in processes of their own.

    `prefill_s_per_token`: what a chunk's token takes besides its computation; `decode_s`: what a decode step takes, unless computing it
    takes longer: steps keep their pace whatever is in them, as a GPU's do. `fail_token`: a forward pass over it raises.
    `nan_token`: logits after it are NaN. `sleep_token`: a forward pass over it takes 3 s longer. `ahead`: decode steps run like those of a
    GPU, one ahead of what the host knows.
    """

    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0
    fail_token: int | None = None
    nan_token: int | None = None
    sleep_token: int | None = None
    ahead: bool = False

    def __call__(self, spec: RankSpec, group: ParallelGroup) -> BuiltModel:
        model = FakeModel(self, group)
        return BuiltModel(CONFIG, model, decode=(lambda kv: AheadStep(model, kv, group)) if self.ahead else None)


class FakeModel:
    """One rank of it."""

    def __init__(self, settings: FakeModelBuilder, group: ParallelGroup):
        self._settings = settings
        self._group = group

    def forward(self, batch: StepBatch, kv: KVCache, on_layer: Callable[[int], None] | None = None) -> Tensor | None:
        settings, tokens, began = self._settings, batch.token_ids.tolist(), time.monotonic()
        if settings.fail_token in tokens:
            raise KernelError(f"token {settings.fail_token} makes this model fail")
        is_decode = len(tokens) == len(batch.seq_lens)
        time.sleep((0.0 if is_decode else settings.prefill_s_per_token * len(tokens)) + 3 * (settings.sleep_token in tokens))
        logits = self._compute(batch, kv, on_layer, tokens)
        if is_decode:
            time.sleep(max(0.0, settings.decode_s - (time.monotonic() - began)))
        return logits

    def _compute(self, batch: StepBatch, kv: KVCache, on_layer: Callable[[int], None] | None, tokens: list[int]) -> Tensor | None:
        for layer, slides in enumerate(CONFIG.sliding):
            _write(layer, batch, batch.sliding if slides else batch.full, kv)
            if on_layer:
                on_layer(layer)
        ends = [end - 1 for end in batch.cu_seqlens_q[1:].tolist()]
        sequences = [ends.index(row) for row in batch.logits_rows.tolist()]
        sums = self._group.all_reduce(torch.tensor([_pool_hash(batch, kv, b) for b in sequences], dtype=torch.float32))
        if self._group.rank > 0:
            return None
        logits = torch.stack([logits_for(int(s)) for s in sums]) if sequences else torch.empty(0, CONFIG.vocab_size)
        for row, b in enumerate(sequences):
            if self._settings.nan_token is not None and tokens[ends[b]] == self._settings.nan_token:
                logits[row, 5] = float("nan")
        return logits


class AheadStep:
    """Decode steps as on a GPU: a step's tokens go into the next on the device. A step is carried out when it is waited for, as late as
    can be: what it writes then must still be nobody else's."""

    lookahead = 1

    def __init__(self, model: FakeModel, kv: KVCache, group: ParallelGroup):
        self._group = group
        self._plain = PlainDecodeStep(model, kv, "cpu")
        self._under_way: deque[tuple[StepRows, Sequence[SamplingState] | None]] = deque()
        self._tokens: dict[int, int] = {}

    def launch(self, rows: StepRows, states: Sequence[SamplingState] | None) -> None:
        self._under_way.append((rows, states))

    def finish(self) -> list[TokenChoice | ServingError] | None:
        rows, states = self._under_way.popleft()
        views = [
            replace(view, token_ids=(self._tokens[key],)) if follows else view
            for view, key, follows in zip(rows.views, rows.keys, rows.follows, strict=True)
        ]
        self._plain.launch(replace(rows, views=views), states)
        choices = self._plain.finish()
        picked = [choice.token_id if isinstance(choice, TokenChoice) else 0 for choice in choices or [None] * len(views)]
        tokens = self._group.all_reduce(torch.tensor(picked, dtype=torch.float32))  # rank 0's, to all ranks
        self._tokens = dict(zip(rows.keys, map(int, tokens), strict=True))
        return choices


def logits_for(kv_hash: int) -> Tensor:
    """Returns: [V] fp32; token 3 + kv_hash % 887 is the likeliest by far, tokens from NEVER_SAMPLED on come only by bias"""
    ids = torch.arange(CONFIG.vocab_size)
    logits = -((ids * 7919 + kv_hash) % 1009).float() / 100
    logits[3 + kv_hash % 887] = 5.0
    logits[NEVER_SAMPLED:] = -60.0
    return logits


def expected_tokens(prompt_ids: Sequence[int], count: int) -> list[int]:
    """Greedy output of a right path, stop tokens ignored."""
    truth = _Truth(prompt_ids)
    for _ in range(count):
        truth.append(3 + truth.hash() % 887)
    return truth.tokens[len(prompt_ids) :]


def seeded_tokens(prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
    """What a right path answers for any sampling parameters without stop strings, stop tokens ignored."""
    state = SamplingState(params, prompt_ids, (), frozenset(), CONFIG.vocab_size)
    truth = _Truth(prompt_ids)
    for _ in range(params.max_tokens):
        (choice,) = sample(logits_for(truth.hash())[None], [state])
        assert isinstance(choice, TokenChoice)
        state.record(choice.token_id)
        truth.append(choice.token_id)
    return truth.tokens[len(prompt_ids) :]


class _Truth:
    """The hash of a sequence that grows, by one running sum per layer and head."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens: list[int] = []
        self._sums = np.zeros((CONFIG.num_layers, CONFIG.num_kv_heads), np.int64)
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        position = len(self.tokens)
        self.tokens.append(token)
        self._sums += _share(token, position)
        left = position - CONFIG.window_tokens
        if left >= 0:
            self._sums -= _share(self.tokens[left], left) * np.array(CONFIG.sliding)[:, None]

    def hash(self) -> int:
        return int((self._sums % _MODULUS).sum())


def _share(token: int, position: int) -> np.ndarray:
    """What one token adds to the sum of each layer and head. Returns: [L, K] int64"""
    layers, heads = np.arange(CONFIG.num_layers)[:, None], np.arange(CONFIG.num_kv_heads)
    return ((token * 31 + position * 17 + layers * 7 + heads * 3) % _KV_VALUES) * (position * 13 + layers * 5 + heads * 11 + 1)


def _kv_values(tokens: Tensor, positions: Tensor, layer: int, heads: Tensor) -> Tensor:
    """Shapes: tokens, positions [T]; heads [K, 1]. Returns: [K, T]"""
    return (tokens * 31 + positions * 17 + layer * 7 + heads * 3) % _KV_VALUES


def _weigh(values: Tensor, positions: Tensor, layer: int, heads: Tensor) -> int:
    """Shapes: values [K, T]; the hash of each head counts"""
    return int(((values.long() * (positions * 13 + layer * 5 + heads * 11 + 1)).sum(1) % _MODULUS).sum())


def _heads(kv: KVCache) -> Tensor:
    return torch.arange(kv.head_range.start, kv.head_range.start + kv.head_range.count)[:, None]


def _write(layer: int, batch: StepBatch, tables: AttentionTables, kv: KVCache) -> None:
    pool, size = kv.layer(layer), kv.geometry.block_size_tokens
    keep = tables.slot_mapping >= 0
    slots = tables.slot_mapping[keep]
    values = _kv_values(batch.token_ids[keep], batch.positions[keep], layer, _heads(kv)).T[:, :, None]  # [T, K, 1]
    for part, shift in ((0, 0), (1, 1)):
        pool[slots // size, part, :, slots % size] = ((values + shift) % _KV_VALUES).to(pool.dtype).expand(-1, -1, pool.shape[-1])


def _pool_hash(batch: StepBatch, kv: KVCache, b: int) -> int:
    """The sum over this rank's heads. A V that does not belong to its K spoils it."""
    length, size, total = int(batch.seq_lens[b]), kv.geometry.block_size_tokens, 0
    for layer, slides in enumerate(CONFIG.sliding):
        tables = batch.sliding if slides else batch.full
        first = max(0, length - CONFIG.window_tokens) if slides else 0
        positions = torch.arange(first, length)
        blocks = tables.block_table[b].long()[(positions - int(tables.kv_start[b])) // size]
        k, v = (kv.layer(layer)[blocks, part, :, positions % size].float() for part in (0, 1))  # [T, K, D]
        spoilt = (((k + 1) % _KV_VALUES != v) | (k != k[:, :, :1])).any(2).any(0)  # [K]
        total += _weigh(k[:, :, 0].T, positions, layer, _heads(kv)) + 4999 * int(spoilt.sum())
    return total
