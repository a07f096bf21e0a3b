"""A `ChatFormat` without chat: token ids are UTF-8 bytes, every message is a line, the whole reply is content.

Needs no vocabulary; for tests and for models whose vocabulary is bytes. It shows what a format has to provide.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

from common.errors import InvalidRequestError
from frontend.chat_format import ChatInput, ContentDelta, Event, Finish, FinishReason, RenderedPrompt
from frontend.text_encoder import replace_surrogates

STOP = 256


class RawReplyParser:
    """Implements `ReplyParser`: bytes to content, until `STOP`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_content = False
        self._num_tokens = 0
        self.is_done = False

    @property
    def is_in_content(self) -> bool:
        """A byte fed next would be a part of the answer."""
        return not self.is_done

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        """See `ReplyParser.feed`; ids that are no bytes are skipped."""
        if self.is_done:
            return []
        self._num_tokens += len(token_ids)
        self.is_done = STOP in token_ids
        heard = itertools.takewhile(lambda token: token != STOP, token_ids)
        return self._content(self._decoder.decode(bytes(token for token in heard if 0 <= token < STOP)))

    def finish(self, reason: FinishReason) -> list[Event]:
        """See `ReplyParser.finish`."""
        events = self._content(self._decoder.decode(b"", True))
        is_missing = self._num_tokens > 0 and not self._has_content
        return [*events, Finish("stop" if self.is_done else reason, is_missing)]

    def _content(self, text: str) -> list[Event]:
        self._has_content = self._has_content or bool(text)
        return [ContentDelta(text, 0)] if text else []


class RawFormat:
    """Implements `ChatFormat` with the 256 byte values as tokens."""

    name = "raw"
    stop_token_ids = (STOP,)

    def render(self, chat: ChatInput) -> RenderedPrompt:
        """Every message as `role: text` on a line. Raises InvalidRequestError on content that is no string."""
        lines = []
        for index, message in enumerate(chat.messages):
            if not isinstance(message.get("content"), str):
                raise InvalidRequestError(f"messages[{index}].content", "must be a string")
            lines.append(f"{message.get('role')}: {message['content']}\n")
        return RenderedPrompt(self.encode_text("".join(lines), field="messages"))

    def reply_parser(self, prompt: RenderedPrompt) -> RawReplyParser:
        """See `ChatFormat.reply_parser`."""
        return RawReplyParser()

    def encode_text(self, text: str, *, field: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(replace_surrogates(text).encode())

    def token_bytes(self, token_id: int) -> bytes:
        """See `ChatFormat.token_bytes`."""
        return bytes([token_id]) if 0 <= token_id < STOP else b""
