"""One request in a prefill group, as its engine sees it, and what the engine tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.errors import ServingError
from common.output import Output
from common.proto import types_pb2, worker_pb2
from model.sampling import SamplingState


@dataclass(frozen=True)
class FirstToken:
    """`output`: what the client may see of it; `token_id`, `logprobs`: what a hand-over carries on.

    `seconds`: from the start of the first chunk to the sampled token; `num_tokens`: that were computed
    """

    output: worker_pb2.SequenceOutput
    token_id: int
    logprobs: types_pb2.TokenLogprobs | None
    seconds: float
    num_tokens: int


class Listener(Protocol):
    """Called from the engine thread; must not block. `on_started`, `may_begin`, then exactly one of the two ends."""

    def on_started(self) -> None:
        """The first chunk is about to be computed."""

    def may_begin(self) -> bool:
        """Asked once before ranks are told to write for the job's transfer. False: it was given up. After True every rank will report
        how its push ended."""

    def on_first_token(self, first: FirstToken) -> None:
        """The last chunk is computed, and the push will end by itself."""

    def on_failed(self, error: ServingError) -> None:
        """Nothing more is computed. A push that was begun goes on until it is stopped."""


@dataclass
class PrefillJob:
    """Owned by the engine thread once submitted. `token_ids`: prompt and tokens sent before, all to be computed.

    Units: deadline_s: on the engine's clock, None for none
    """

    key: str
    token_ids: tuple[int, ...]
    state: SamplingState
    output: Output
    reservation: worker_pb2.Reservation | None
    deadline_s: float | None
    listener: Listener
    is_begun: bool = False
    started_s: float = 0.0

    @property
    def pushed_transfer_id(self) -> int:
        """0 if nothing is being pushed."""
        return self.reservation.transfer_id if self.reservation is not None and self.is_begun else 0
