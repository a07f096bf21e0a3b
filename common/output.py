"""One request's output on its way to the router: which tokens it has, which were sent, and the message with the next ones.

Shared by both workers, so that the decode group goes on exactly where the prefill group's first token left off.
"""

from __future__ import annotations

from collections.abc import Callable

from common.proto import types_pb2, worker_pb2
from common.requests import SamplingParams
from common.stop import StopMatcher, StopRules


def stop_rules(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> StopRules:
    own = sampling.stop_token_ids
    return StopRules(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=own if sampling.ignore_eos else own | eos_token_ids,
        stop=tuple(text.encode() for text in sampling.stop),
    )


class Output:
    """The tokens of one request, its stop matcher, and how many tokens the client has.

    Indices count from the start of the output, over all attempts. A stop token is sent; a stop string is not.
    """

    def __init__(self, internal_id: str, output_ids: tuple[int, ...], rules: StopRules, token_bytes: Callable[[int], bytes | None] | None):
        """`output_ids`: tokens that the client has from earlier attempts."""
        self._internal_id = internal_id
        self._matcher = StopMatcher(rules, token_bytes)
        self._matcher.replay(output_ids)
        self._num_sent = len(output_ids)
        self._unsent: list[int] = []
        self._unsent_logprobs: list[types_pb2.TokenLogprobs] = []

    @property
    def num_tokens(self) -> int:
        """Tokens so far = the index of the next one."""
        return self._matcher.num_tokens

    def push(self, token_id: int, logprobs: types_pb2.TokenLogprobs | None) -> worker_pb2.SequenceOutput:
        """Takes the next token. Returns: what may be sent now (possibly no token at all); `finish` set if the output ends"""
        self._unsent.append(token_id)
        if logprobs is not None:
            self._unsent_logprobs.append(logprobs)
        finish = self._matcher.push(token_id)
        count = max(0, self._matcher.num_released - self._num_sent)
        output = worker_pb2.SequenceOutput(
            internal_id=self._internal_id,
            first_index=self._num_sent,
            token_ids=self._unsent[:count],
            logprobs=self._unsent_logprobs[:count],
        )
        if finish is not None:
            if self._matcher.num_released < self._num_sent:
                finish.trailing_text = b""  # a resumed request took another way: the client has that token already
            output.finish.CopyFrom(finish)
        del self._unsent[:count], self._unsent_logprobs[:count]
        self._num_sent += count
        return output
