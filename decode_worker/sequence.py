"""One request in a decode group, from its reservation to its last token. Owned by the leader's engine thread; no tensors, no blocks."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import CapacityError, InvalidRequestError
from common.output import Output, stop_rules
from common.proto import types_pb2, worker_pb2
from common.requests import sampling_from_proto
from model.sampling import SamplingState, TokenChoice


class Sequence:
    """`next_token` stands at `position` and has no KV yet; both are set once the prefill group has handed over.

    Units: deadline_s: on the engine's clock, None for none
    """

    def __init__(
        self,
        work: worker_pb2.Work,
        router_id: str,
        *,
        transfer_id: int,
        vocab_size: int,
        max_len: int,
        eos_token_ids: frozenset[int],
        token_bytes: Callable[[int], bytes | None] | None,
        now_s: float,
    ):
        """Raises: InvalidRequestError, CapacityError: what the router lets through and this group can't serve"""
        sampling = sampling_from_proto(work.sampling)
        rules = stop_rules(sampling, eos_token_ids)
        if sampling.stop and token_bytes is None:
            raise InvalidRequestError("sampling_params.stop", "this deployment has no vocabulary (model.vocab) to match text with")
        self.max_total_tokens = len(work.prompt_ids) + sampling.max_tokens
        if self.max_total_tokens > max_len or len(work.output_ids) >= sampling.max_tokens:
            raise CapacityError(f"{len(work.prompt_ids)} prompt tokens and max_tokens {sampling.max_tokens}; the context is {max_len}")
        self.internal_id = work.internal_id
        self.label = work.label
        self.traceparent = work.traceparent
        self.admitted_s = 0.0
        self.router_id = router_id
        self.transfer_id = transfer_id
        self.num_handed_over = len(work.prompt_ids) + len(work.output_ids)
        self.deadline_s = now_s + work.deadline_ms / 1000 if work.deadline_ms else None
        self.position = self.num_handed_over
        self.next_token = -1
        self.state = SamplingState(sampling, work.prompt_ids, work.output_ids, rules.stop_token_ids, vocab_size)
        self._output = Output(work.internal_id, tuple(work.output_ids), rules, token_bytes)

    @property
    def tokens_left(self) -> int:
        """Tokens until `max_tokens` is reached."""
        return self.state.params.max_tokens - self.state.num_output

    def begin(self, first_token: int, logprobs: types_pb2.TokenLogprobs | None) -> None:
        """Takes over the token that the prefill group has sampled and sent, or held back as both sides' stop matchers do."""
        self._output.push(first_token, logprobs)
        self.state.record(first_token)
        self.next_token = first_token

    def advance(self, choice: TokenChoice) -> worker_pb2.SequenceOutput:
        """One decode step. Returns: what may be sent now; `finish` set if it was the last one"""
        self.position += 1
        self.next_token = choice.token_id
        self.state.record(choice.token_id)
        return self._output.push(choice.token_id, choice.logprobs)
