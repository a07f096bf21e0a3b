"""A reply parser without any chat: every ordinary token is content. For text completions, in any format's vocabulary."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence

from frontend.chat_format import ContentDelta, Event, Finish, FinishReason


class PlainReplyParser:
    """Implements `ReplyParser`; special tokens have no text, and one of `stop_token_ids` ends the reply."""

    def __init__(self, token_bytes: Callable[[int], bytes], stop_token_ids: Collection[int]):
        self._token_bytes = token_bytes
        self._stop_token_ids = frozenset(stop_token_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_tokens = 0
        self._has_content = False
        self.is_done = False

    @property
    def is_in_content(self) -> bool:
        """An ordinary token fed next would be content."""
        return not self.is_done

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        """See `ReplyParser.feed`."""
        raw = bytearray()
        for token_id in token_ids:
            if self.is_done:
                break
            self._num_tokens += 1
            self.is_done = token_id in self._stop_token_ids
            raw += self._token_bytes(token_id)
        return self._content(self._decoder.decode(bytes(raw)))

    def finish(self, reason: FinishReason) -> list[Event]:
        """See `ReplyParser.finish`."""
        events = self._content(self._decoder.decode(b"", True))
        is_missing = self._num_tokens > 0 and not self._has_content
        return [*events, Finish("stop" if self.is_done else reason, is_missing)]

    def _content(self, text: str) -> list[Event]:
        self._has_content = self._has_content or bool(text)
        return [ContentDelta(text, 0)] if text else []
