"""Runs a reply parser over ids and collects what a client would see; checks the invariants of any event stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from frontend.chat_format import (
    ContentDelta,
    Event,
    Finish,
    FinishReason,
    ReasoningDelta,
    ReplyParser,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass
class Reply:
    """What the events of one reply add up to. `messages`: (kind, tool name, text) in order of appearance."""

    messages: list[list[str]] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def content(self) -> str:
        return "".join(text for kind, _, text in self.messages if kind == "content")

    @property
    def reasoning(self) -> str:
        return "".join(text for kind, _, text in self.messages if kind == "reasoning")

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(name, text) for kind, name, text in self.messages if kind == "call"]

    @property
    def text(self) -> str:
        return "".join(text for _, _, text in self.messages)


def chunks(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def read(parser: ReplyParser, ids: Sequence[int], *, chunk: int = 1, reason: FinishReason = "stop") -> Reply:
    """Feeds `ids` in chunks, finishes, and returns the collected reply; asserts that the stream of events is sound."""
    events: list[Event] = []
    for piece in chunks(ids, chunk):
        events += parser.feed(piece)
    events += parser.finish(reason)
    return collect(events)


def collect(events: Sequence[Event]) -> Reply:
    reply = Reply()
    index_of: dict[tuple[str, int], int] = {}
    open_call: int | None = None
    for event in events:
        assert reply.finish is None, "an event after Finish"
        match event:
            case ReasoningDelta(text, message_index) | ContentDelta(text, message_index):
                assert text, "an empty delta"
                assert open_call is None, "text inside a call"
                kind = "content" if isinstance(event, ContentDelta) else "reasoning"
                if (kind, message_index) not in index_of:
                    index_of[kind, message_index] = len(reply.messages)
                    reply.messages.append([kind, "", ""])
                reply.messages[index_of[kind, message_index]][2] += text
            case ToolCallStart(call_index, name, _):
                assert open_call is None
                assert call_index == sum(kind == "call" for kind, _, _ in reply.messages)
                open_call = call_index
                reply.messages.append(["call", name, ""])
            case ToolCallArguments(call_index, text):
                assert call_index == open_call
                reply.messages[-1][2] += text
            case ToolCallEnd(call_index):
                assert call_index == open_call
                open_call = None
            case Finish():
                reply.finish = event
    assert open_call is None
    assert reply.finish is not None
    return reply
