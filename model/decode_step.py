"""What a decode rank does with its running sequences between two tokens: one interface, and the step of a plain forward pass behind it.

Called by `decode_worker/executor.py`; the GPU's step is `model/decode_step_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from common.errors import ServingError
from model.batch import SequenceView, StepBatch, build_decode_batch
from model.kv_cache import KVCache
from model.sampling import SamplingState, TokenChoice, sample


class Forward(Protocol):
    """One rank's forward pass; `GptOss.forward` says what it takes and returns."""

    def forward(self, batch: StepBatch, kv: KVCache, on_layer: Callable[[int], None] | None = None) -> Tensor | None: ...


@dataclass(frozen=True)
class StepRows:
    """The running sequences of one step, at least one, each with one new token.

    `views`: their full blocks may go on past the new token; `keys`: what tells a sequence from all others, past ones too;
    `follows`: whether the new token is the one that the step launched before picks, so that its id is not known yet;
    `is_greedy`: every token is the likeliest, and nobody wants logits
    """

    views: Sequence[SequenceView]
    keys: Sequence[int]
    follows: Sequence[bool]
    is_greedy: bool


class DecodeStep(Protocol):
    """Steps of all running sequences, on every rank of a group in the same order.

    `lookahead`: steps that may be launched while the oldest one has not been finished; 0: each is finished before the next
    """

    @property
    def lookahead(self) -> int: ...

    def launch(self, rows: StepRows, states: Sequence[SamplingState] | None) -> None:
        """Computes the rows' new KV and picks their next tokens, or has a device begin to.

        Units: states: what row r is sampled by, on rank 0; None on the others
        """
        ...

    def finish(self) -> list[TokenChoice | ServingError] | None:
        """Waits for the oldest step that was launched and not finished.

        Returns: per row its token or the error that it alone fails with; None on ranks above 0
        Raises: WorkerLost if another rank of the group did not take part
        """
        ...


class PlainDecodeStep:
    """A step of a forward pass that gives logits, sampled on the CPU."""

    lookahead = 0

    def __init__(self, model: Forward, kv: KVCache, device: str):
        self._model = model
        self._kv = kv
        self._device = device
        self._choices: list[TokenChoice | ServingError] | None = None

    def launch(self, rows: StepRows, states: Sequence[SamplingState] | None) -> None:
        geometry = self._kv.geometry
        views = [replace(view, full_blocks=view.full_blocks[: geometry.blocks_for(view.start + 1)]) for view in rows.views]
        logits = self._model.forward(build_decode_batch(views, geometry.block_size_tokens, self._device), self._kv)
        self._choices = None if states is None or logits is None else sample(logits.float(), states)

    def finish(self) -> list[TokenChoice | ServingError] | None:
        return self._choices
