"""The Harmony `ChatFormat`: one vocabulary, one renderer, a parser per reply. Built once by whoever starts a frontend."""

from __future__ import annotations

from frontend.chat_format import ChatInput, RenderedPrompt
from frontend.harmony import tokens
from frontend.harmony.parse import HarmonyReplyParser
from frontend.harmony.render import HarmonyRenderer
from frontend.text_encoder import TextEncoder, TextLimits
from frontend.vocab import Vocabulary


class HarmonyFormat:
    """Implements `frontend.chat_format.ChatFormat` for gpt-oss; thread-safe."""

    name = "harmony"
    stop_token_ids = tuple(sorted(tokens.REPLY_ENDS))

    def __init__(self, vocabulary: Vocabulary, limits: TextLimits | None = None):
        self.vocabulary = vocabulary
        self._encoder = TextEncoder(vocabulary, limits or TextLimits())
        self._renderer = HarmonyRenderer(self._encoder)

    def render(self, chat: ChatInput) -> RenderedPrompt:
        """See `ChatFormat.render`."""
        return self._renderer.render(chat)

    def reply_parser(self, prompt: RenderedPrompt) -> HarmonyReplyParser:
        """See `ChatFormat.reply_parser`."""
        return HarmonyReplyParser(self.vocabulary.token_bytes, tool_names=prompt.tool_names, reply_prefix=prompt.reply_prefix)

    def encode_text(self, text: str, *, field: str) -> list[int]:
        """See `ChatFormat.encode_text`."""
        return self._encoder.encode(text, field=field)

    def token_bytes(self, token_id: int) -> bytes:
        """See `ChatFormat.token_bytes`."""
        return self.vocabulary.token_bytes[token_id] if 0 <= token_id < len(self.vocabulary.token_bytes) else b""
