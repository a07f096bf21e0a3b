"""Chunks of a streamed chat completion, as bytes ready to send.

Owns their JSON. A chunk goes out for every token of every stream, so what never changes is written once and only the
text is escaped anew. Called by `frontend.http.chat`.
"""

from __future__ import annotations

import functools
import json
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from frontend.chat_format import (
    ChatFormat,
    ContentDelta,
    Event,
    Finish,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.choice import ChoiceUpdate, VisibleToken
from frontend.generation import Outcome
from frontend.http.shape import COMPACT, MessageJoiner, flags_of, logprobs_of, new_id, usage_of

DONE = b"data: [DONE]\n\n"
_dump = functools.partial(json.dumps, separators=COMPACT)


class ChatChunks:
    """Writes the chunks of one stream, of all its choices."""

    def __init__(
        self,
        chat_format: ChatFormat,
        identity: dict[str, Any],
        includes_usage: bool,
        num_choices: int,
        has_parallel_calls: bool,
    ):
        self._format = chat_format
        self._identity = {**identity, "object": "chat.completion.chunk"}
        self._includes_usage = includes_usage
        self._num_choices = num_choices
        self._has_parallel_calls = has_parallel_calls
        self._joiners = [MessageJoiner() for _ in range(num_choices)]
        self._visible: list[list[VisibleToken]] = [[] for _ in range(num_choices)]
        self._head = f'data: {_dump(self._identity)[:-1]},"choices":[{{"index":'
        self._content_heads = [f'{self._head}{index},"delta":{{"content":' for index in range(num_choices)]
        self._tail = '}],"usage":null}\n\n' if includes_usage else "}]}\n\n"
        self._content_tail = f'}},"logprobs":null,"finish_reason":null{self._tail}'

    def route(self, route: dict[str, Any]) -> bytes:
        """The route decision, ahead of the tokens."""
        return f"data: {_dump({**self._identity, 'choices': [], 'tandem': {'route': route}})}\n\n".encode()

    def roles(self) -> bytes:
        """The first chunk of every choice."""
        delta = '{"role":"assistant","content":"","refusal":null}'
        return "".join(self._chunk(index, delta) for index in range(self._num_choices)).encode()

    def update(self, update: ChoiceUpdate) -> bytes:
        """Chunks of what one update added; empty if nothing can be sent yet."""
        events, index = update.events, update.index
        if len(events) == 1 and type(events[0]) is ContentDelta and not update.visible and not self._visible[index]:
            text = quote(self._joiners[index].text(events[0]))
            return f"{self._content_heads[index]}{text}{self._content_tail}".encode()
        self._visible[index] += update.visible
        return "".join([self._event(index, event) for event in events]).encode()

    def end(self, outcome: Outcome, route: dict[str, Any] | None) -> bytes:
        """Usage and route, if asked for, and the end mark."""
        last: dict[str, Any] = {**self._identity, "choices": []}
        if self._includes_usage:
            last["usage"] = usage_of(outcome)
        if route is not None:
            last["tandem"] = {"route": route}
        if len(last) == len(self._identity) + 1:
            return DONE
        return f"data: {_dump(last)}\n\n".encode() + DONE

    def _event(self, index: int, event: Event) -> str:
        match event:
            case ContentDelta():
                return self._chunk(index, f'{{"content":{quote(self._joiners[index].text(event))}}}', self._logprobs(index))
            case ReasoningDelta():
                text = quote(self._joiners[index].text(event))
                return self._chunk(index, f'{{"reasoning_content":{text},"reasoning":{text}}}')
            case ToolCallStart(call_index, name, _) if self._is_shown(call_index):
                function = {"name": name, "arguments": ""}
                call = {"index": call_index, "id": new_id("call_"), "type": "function", "function": function}
                return self._chunk(index, _dump({"tool_calls": [call]}))
            case ToolCallArguments(call_index, text) if self._is_shown(call_index):
                call = {"index": call_index, "function": {"arguments": text}}
                return self._chunk(index, _dump({"tool_calls": [call]}))
            case Finish():
                flags = _dump(flags_of(event))[1:-1]
                end = f',"finish_reason":"{event.reason}"{"," + flags if flags else ""}'
                return self._chunk(index, "{}", self._logprobs(index), end)
        return ""

    def _chunk(self, index: int, delta: str, logprobs: str = "null", end: str = ',"finish_reason":null') -> str:
        return f'{self._head}{index},"delta":{delta},"logprobs":{logprobs}{end}{self._tail}'

    def _logprobs(self, index: int) -> str:
        """Those of the tokens seen since the last chunk that carried some."""
        if not self._visible[index]:
            return "null"
        tokens, self._visible[index] = self._visible[index], []
        return _dump({"content": logprobs_of(self._format, tokens), "refusal": None})

    def _is_shown(self, call_index: int) -> bool:
        return call_index == 0 or self._has_parallel_calls
