"""The seam between the HTTP frontend and a chat format: what is rendered, what is parsed, and the events between.

Owns the types that both sides share; it knows no special token and no HTTP. `frontend.harmony` and `frontend.raw`
implement `ChatFormat`; `frontend.http` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

ReasoningEffort = Literal["low", "medium", "high"]
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)  # not frozen, as ContentDelta: one is made per token, and a frozen one takes twice as long
class ReasoningDelta:
    """A piece of the chain of thought. `message_index` counts the messages of one reply, from 0."""

    text: str
    message_index: int


@dataclass(slots=True)
class ContentDelta:
    """A piece of the visible answer. `message_index` counts the messages of one reply, from 0."""

    text: str
    message_index: int


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `call_index` counts the calls of one reply, from 0; `name` has no namespace."""

    call_index: int
    name: str
    message_index: int


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments of call `call_index`, as the model wrote them (usually JSON)."""

    call_index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of call `call_index` are complete."""

    call_index: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of a reply.

    Attributes: `is_content_missing` tokens were produced, yet there is neither content nor a call (the client has to be
    told); `repairs` how often each kind of malformed input was mended, by kind; `num_reasoning_tokens` of the reply.
    """

    reason: FinishReason
    is_content_missing: bool = False
    repairs: Mapping[str, int] = field(default_factory=dict)
    num_reasoning_tokens: int = 0


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | Finish


@dataclass(frozen=True)
class ToolChoice:
    """`mode` as in OpenAI's `tool_choice`; `name` is set exactly for mode "function"."""

    mode: Literal["auto", "none", "required", "function"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class ChatInput:
    """One conversation to render, in OpenAI's chat-completions form.

    Attributes: `messages` dicts with role, content, tool_calls, ...; `tools` function tools (`{"name", "description",
    "parameters"}`); `current_date` YYYY-MM-DD or None to leave the date out of the prompt.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = ToolChoice()
    reasoning_effort: ReasoningEffort = "medium"
    current_date: str | None = None


@dataclass(frozen=True)
class RenderedPrompt:
    """What the engine gets, and what the parser has to know of it.

    Attributes: `token_ids` the whole prompt; `reply_prefix` its last ids that already belong to the reply (a forced
    call); `tool_names` tools the reply may call, without namespace, None if unknown.
    """

    token_ids: list[int]
    reply_prefix: tuple[int, ...] = ()
    tool_names: frozenset[str] | None = None


class ReplyParser(Protocol):
    """Turns the token ids of one reply into events; ids come in chunks of any size, and the size changes nothing."""

    @property
    def is_done(self) -> bool:
        """The reply has ended by a stop token of the format; later ids are ignored."""

    @property
    def is_in_content(self) -> bool:
        """An ordinary token fed next would be a part of the visible answer."""

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        """Events of these ids, adjacent deltas joined. Never raises on any id."""

    def finish(self, reason: FinishReason) -> list[Event]:
        """Flushes what is held and ends with one `Finish`; `reason` is the engine's. Call it once."""


class ChatFormat(Protocol):
    """A way to write conversations as token ids and to read replies; instances may be shared between threads."""

    name: str
    stop_token_ids: tuple[int, ...]

    def render(self, chat: ChatInput) -> RenderedPrompt:
        """CPU-bound: call it outside the event loop. Raises InvalidRequestError naming the field."""

    def reply_parser(self, prompt: RenderedPrompt) -> ReplyParser:
        """A fresh parser for the reply to `prompt`."""

    def encode_text(self, text: str, *, field: str) -> list[int]:
        """Ids of plain text; special-token text stays text. Raises InvalidRequestError naming `field`."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for special and unknown ids."""
