"""One choice of one request while the router has it: what it asks, what the client already got, and the stamps of its life.

Data only. Made by `server.py`, driven by `dispatch.py` and `attempt.py`, read by `report.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.router.streams import ClientStream
from common.metrics import Value
from common.proto import types_pb2
from common.requests import Request


@dataclass
class Stamps:
    """Seconds of the loop's clock; 0 = has not happened. The last attempt's, but for `arrived_s`, `first_token_s` and `last_token_s`."""

    arrived_s: float
    granted_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0

    def saw_first(self, now_s: float) -> None:
        """The first token exists, though it may be held back as the possible start of a stop string."""
        self.first_token_s = self.first_token_s or now_s
        self.last_token_s = now_s


@dataclass(eq=False)
class Job:
    """`number`: unique in this router; `index`: which of n; `sampling`: complete, this choice's own seed in it.

    `delivered`: counts the tokens of all jobs; `kv_version`: of the checkpoint that the first tokens came from, once an attempt has failed
    after them: a stream is never continued by another model."""

    request: Request
    number: int
    index: int
    sampling: types_pb2.SamplingParams
    stream: ClientStream
    deadline_s: float
    stamps: Stamps
    delivered: Value
    traceparent: str = ""
    attempts: int = 0
    kv_version: str = ""
    tokens: list[int] = field(default_factory=list)

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens

    def deliver(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs], now_s: float) -> None:
        """The next tokens of this choice, towards the client."""
        first = len(self.tokens)
        self.stamps.last_token_s = now_s
        self.tokens.extend(token_ids)
        self.delivered.value += len(token_ids)
        self.stream.push_tokens(self.index, first, token_ids, logprobs)
