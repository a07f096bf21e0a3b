"""What a decode rank does with its running sequences between two tokens: one interface, and the step of a plain forward pass behind it.

Called by `decode_worker/executor.py`; the GPU's step is `model/decode_step_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from common.errors import ServingError
from model.batch import SequenceView, StepBatch, build_decode_batch
from model.kv_cache import KVCache
from model.sampling import SamplingState, TokenChoice, sample


class Forward(Protocol):
    """One rank's forward pass; `GptOss.forward` says what it takes and returns."""

    def forward(self, batch: StepBatch, kv: KVCache, on_layer: Callable[[int], None] | None = None) -> Tensor | None: ...


class DecodeStep(Protocol):
    """One step of all running sequences, on every rank of a group in the same order."""

    def step(
        self, views: Sequence[SequenceView], keys: Sequence[int], states: Sequence[SamplingState] | None
    ) -> list[TokenChoice | ServingError] | None:
        """Computes the views' new KV and picks their next tokens.

        Units: views: at least one, each with one new token; keys: what tells a view's sequence from all others, past ones too
        Returns: per view its token or the error that it alone fails with; None where `states` is None (ranks above 0)
        """
        ...


class PlainDecodeStep:
    """A step of a forward pass that gives logits, sampled on the CPU."""

    def __init__(self, model: Forward, kv: KVCache, device: str):
        self._model = model
        self._kv = kv
        self._device = device

    def step(
        self, views: Sequence[SequenceView], keys: Sequence[int], states: Sequence[SamplingState] | None
    ) -> list[TokenChoice | ServingError] | None:
        batch = build_decode_batch(views, self._kv.geometry.block_size_tokens, self._device)
        logits = self._model.forward(batch, self._kv)
        return None if states is None or logits is None else sample(logits.float(), states)
