"""Renders a conversation as token ids in Harmony.

Owns framing (special tokens, headers) and forced calls; what the messages are is `frontend.harmony.conversation`'s. The
ids are openai-harmony's own: it too encodes header words and each text apart, so only the framing is written here and
the text goes through a linear encoder. CPU-bound: callers keep it outside the event loop. Called by `HarmonyFormat`.
"""

from __future__ import annotations

import functools

from common.errors import InvalidRequestError
from frontend.chat_format import ChatInput, RenderedPrompt
from frontend.harmony import tokens
from frontend.harmony.conversation import HarmonyMessage, to_harmony
from frontend.text_encoder import TextEncoder

_CACHED_HEADERS = 4096
_CACHED_SYSTEM_TEXTS = 64  # there is one per day, effort, and with or without tools


class HarmonyRenderer:
    """Conversation to ids; thread-safe."""

    def __init__(self, encoder: TextEncoder):
        self._encoder = encoder
        self._header = functools.lru_cache(maxsize=_CACHED_HEADERS)(self._encode_header)
        self._system_text = functools.lru_cache(maxsize=_CACHED_SYSTEM_TEXTS)(self._words)

    def render(self, chat: ChatInput) -> RenderedPrompt:
        """The prompt up to and including `<|start|>assistant`, and the header of a call that `tool_choice` forces.

        Raises: InvalidRequestError naming the field.
        """
        if not chat.messages:
            raise InvalidRequestError("messages", "must hold at least one message")
        messages = to_harmony(chat)
        self._encoder.check_size(sum(len(text) for message in messages for text in message.texts), "messages")
        ids: list[int] = []
        for message in messages:
            ids += self._message(message)
        ids += [tokens.START, *self._words(tokens.ASSISTANT)]
        names = frozenset() if chat.tool_choice.mode == "none" else frozenset(tool["name"] for tool in chat.tools)
        forced = self._forced_call(chat, names)
        return RenderedPrompt([*ids, *forced], forced, names)

    def _message(self, message: HarmonyMessage) -> list[int]:
        ids = list(self._header(message.author, message.recipient, message.channel, message.is_constrained))
        for text in message.texts:
            is_ours = message.author == tokens.SYSTEM  # what clients call system instructions is the developer's
            ids += self._system_text(text) if is_ours else self._encoder.encode(text, field=message.field)
        is_call = message.author == tokens.ASSISTANT and message.recipient is not None
        ids.append(tokens.CALL if is_call else tokens.END)
        return ids

    def _encode_header(self, author: str, recipient: str | None, channel: str | None, is_constrained: bool) -> tuple[int, ...]:
        ids = [tokens.START, *self._words(author)]
        if recipient is not None:
            ids += self._words(f" to={recipient}")
        if channel is not None:
            ids += [tokens.CHANNEL, *self._words(channel)]
        if is_constrained:
            ids += [*self._words(" "), tokens.CONSTRAIN, *self._words("json")]
        return (*ids, tokens.MESSAGE)

    def _forced_call(self, chat: ChatInput, names: frozenset[str]) -> tuple[int, ...]:
        """Header ids that follow `<|start|>assistant` so that the reply can only be a call."""
        choice = chat.tool_choice
        if choice.mode not in ("required", "function"):
            return ()
        if not names:
            raise InvalidRequestError("tool_choice", "asks for a call, but the request has no tools")
        name = choice.name if choice.mode == "function" else next(iter(names)) if len(names) == 1 else None
        if name is not None and name not in names:
            raise InvalidRequestError("tool_choice.function.name", f"{name[:64]!r} is not among the tools")
        if name is None:  # the model goes on with the dot and a name of its choice
            return tuple(self._words(" to=" + tokens.FUNCTIONS.removesuffix(".")))
        start = len(self._header(tokens.ASSISTANT, None, None, False)) - 1
        return self._header(tokens.ASSISTANT, tokens.FUNCTIONS + name, tokens.COMMENTARY, True)[start:]

    def _words(self, text: str) -> list[int]:
        return self._encoder.encode(text, field="messages")
