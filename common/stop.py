"""Decides after each token whether an output ends, and which tokens may be sent: stop tokens, stop strings, max_tokens.

Pure and per request. Both workers use it: prefill for the first token, decode for the rest.

Text is matched over the bytes of ordinary tokens in a row. A control token has no text and breaks a match: the text before it and after it
are never joined. The first stop string to be completed wins, byte by byte, so the result does not depend on how the text was cut into
tokens; of two completed by the same byte the longer one wins. Nothing of the winning string is sent: tokens are held back while they may
still turn out to be part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.proto import types_pb2


@dataclass(frozen=True)
class StopRules:
    """When a request ends. `stop_token_ids`: the request's own and, unless it ignores them, the model's.

    `min_tokens`: stop strings that are completed by one of the first `min_tokens` tokens do not count; the sampler keeps stop tokens
    away until then.
    """

    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    stop: tuple[bytes, ...]


class _Needle:
    """One stop string and how many of its bytes the text ends with at present (Knuth-Morris-Pratt)."""

    def __init__(self, text: bytes):
        self.text = text
        self.matched = 0
        self._border = _borders(text)

    def push(self, byte: int) -> bool:
        """Returns: whether this byte completes the string; the search then goes on as if it had not."""
        k = self.matched
        while k and self.text[k] != byte:
            k = self._border[k - 1]
        if self.text[k] == byte:
            k += 1
        complete = k == len(self.text)
        self.matched = self._border[k - 1] if complete else k
        return complete


class StopMatcher:
    """The state of one output.

    Attributes: `num_tokens` taken so far; `num_released` of them, the oldest ones, may be sent. The rest is held back: a held token is
    released when its match dies or the output ends otherwise, and stays unreleased when it lies in the completed stop string.
    """

    def __init__(self, rules: StopRules, token_bytes: Callable[[int], bytes | None] | None):
        """`token_bytes` may be None only if there are no stop strings."""
        self._rules = rules
        self._token_bytes = token_bytes
        self._needles = [_Needle(text) for text in rules.stop]
        self._held: list[bytes] = []  # bytes of each held token; together they end with the longest partial match
        self.num_tokens = 0

    @property
    def num_released(self) -> int:
        return self.num_tokens - len(self._held)

    def replay(self, token_ids: Iterable[int]) -> None:
        """Brings a fresh matcher to the state after `token_ids`, which an earlier attempt has sent without coming to an end."""
        for token_id in token_ids:
            self._push_text(token_id)

    def push(self, token_id: int) -> types_pb2.Finish | None:
        """Takes the next token; not to be called after a finish. Returns: set if the output ends with this token"""
        if token_id in self._rules.stop_token_ids:
            self.num_tokens += 1
            self._held.clear()
            return types_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP, stop_token_id=token_id)
        finish = self._push_text(token_id)
        if finish is None and self.num_tokens >= self._rules.max_tokens:
            self._held.clear()
            return types_pb2.Finish(reason=types_pb2.FINISH_REASON_LENGTH)
        return finish

    def _push_text(self, token_id: int) -> types_pb2.Finish | None:
        self.num_tokens += 1
        if not self._needles or self._token_bytes is None:
            return None
        text = self._token_bytes(token_id)
        if text is None:
            self._held.clear()
            for needle in self._needles:
                needle.matched = 0
            return None
        self._held.append(text)
        may_stop = self.num_tokens > self._rules.min_tokens
        for position, byte in enumerate(text):
            complete = [needle.text for needle in self._needles if needle.push(byte)]
            if complete and may_stop:
                return self._stop(max(complete, key=len), unread=len(text) - position - 1)
        self._settle(sum(map(len, self._held)) - max(needle.matched for needle in self._needles))
        return None

    def _stop(self, stop: bytes, unread: int) -> types_pb2.Finish:
        """The output ends where `stop` begins, which itself ends `unread` bytes before the end of the held text."""
        visible = self._settle(sum(map(len, self._held)) - unread - len(stop))
        trailing = self._held[0][:visible]
        return types_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP, stop=stop.decode(), trailing_text=trailing)

    def _settle(self, num_bytes: int) -> int:
        """Releases the oldest held tokens that lie within the first `num_bytes`. Returns: bytes of the next one that do too"""
        count = 0
        while count < len(self._held) and num_bytes >= len(self._held[count]):
            num_bytes -= len(self._held[count])
            count += 1
        del self._held[:count]
        return num_bytes


def _borders(text: bytes) -> list[int]:
    """Per prefix the length of its longest proper prefix that is also its suffix."""
    border = [0] * len(text)
    k = 0
    for i in range(1, len(text)):
        while k and text[i] != text[k]:
            k = border[k - 1]
        if text[i] == text[k]:
            k += 1
        border[i] = k
    return border
