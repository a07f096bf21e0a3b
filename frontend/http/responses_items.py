"""Builds a response object and its stream of events from a reply's events; the stream and the whole answer agree.

Owns the output items (reasoning, message, function_call) and the numbering of events. Called by
`frontend.http.responses`.
"""

from __future__ import annotations

from typing import Any

from common.errors import ServingError
from frontend.chat_format import (
    ChatFormat,
    ContentDelta,
    Event,
    Finish,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from frontend.choice import ChoiceUpdate, VisibleToken
from frontend.generation import Outcome
from frontend.http.shape import flags_of, logprobs_of, new_id

_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseBuilder:
    """One response as it grows. `response` is the object to answer with once `end` was called."""

    def __init__(self, chat_format: ChatFormat, response: dict[str, Any], *, has_parallel_calls: bool):
        self.response = {**response, "status": "in_progress", "output": [], "error": None, "incomplete_details": None, "usage": None}
        self._format = chat_format
        self._has_parallel_calls = has_parallel_calls
        self._sequence = 0
        self._open: dict[str, Any] | None = None
        self._message_index = -1
        self._visible: list[VisibleToken] = []
        self._finish: Finish | None = None
        self._is_cut = False

    def begin(self) -> list[dict[str, Any]]:
        """Events that open the stream. What they show stays as it is, though they are encoded with later ones."""
        empty = {**self.response, "output": []}
        return [self._event("response.created", response=empty), self._event("response.in_progress", response=empty)]

    def update(self, update: ChoiceUpdate) -> list[dict[str, Any]]:
        """Events of what one update added."""
        self._visible += update.visible
        self._is_cut = any(isinstance(event, Finish) and event.reason == "length" for event in update.events)
        out = []
        for event in update.events:
            out += self._on(event)
        return out

    def end(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Closes what is open and completes the response."""
        out = self._close()
        finish = self._finish or Finish("stop")
        is_cut = finish.reason == "length"
        self.response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": response_usage(outcome),
            **flags_of(finish),
        }
        return [*out, self._event("response.incomplete" if is_cut else "response.completed", response=self.response)]

    def fail(self, error: ServingError) -> dict[str, Any]:
        """The event of a response that failed after its stream had begun."""
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
        return self._event("response.failed", response=self.response)

    def _on(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case ContentDelta(text, message_index) | ReasoningDelta(text, message_index):
                kind = "message" if isinstance(event, ContentDelta) else "reasoning"
                return [*self._switch(kind, message_index), *self._text(text)]
            case ToolCallStart(call_index, name, message_index):
                if call_index and not self._has_parallel_calls:
                    return self._close()
                return self._switch("function_call", message_index, name)
            case ToolCallArguments(_, text) if self._open is not None and self._open["type"] == "function_call":
                self._open["arguments"] += text
                return [self._item_event("response.function_call_arguments.delta", delta=text)]
            case ToolCallEnd():
                return self._close()
            case Finish():
                self._finish = event
        return []

    def _switch(self, kind: str, message_index: int, name: str = "") -> list[dict[str, Any]]:
        """Makes the open item one of this kind and message."""
        if self._open is not None and self._open["type"] == kind and message_index == self._message_index:
            return []
        out = self._close()
        self._message_index = message_index
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"id": new_id("msg_"), "role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"id": new_id("rs_"), "summary": [], "content": []}
        else:
            item |= {"id": new_id("fc_"), "call_id": new_id("call_"), "name": name, "arguments": ""}
        self._open = item
        self.response["output"].append(item)
        out.append(self._event("response.output_item.added", output_index=self._output_index, item=dict(item)))
        if kind in _TEXT_EVENTS:
            item["content"] = [_empty_part(kind)]
            out.append(self._item_event("response.content_part.added", content_index=0, part=_empty_part(kind)))
        return out

    def _text(self, text: str) -> list[dict[str, Any]]:
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        extra: dict[str, Any] = {}
        if self._open["type"] == "message":
            extra["logprobs"] = logprobs_of(self._format, self._visible)
            part["logprobs"] += extra["logprobs"]
            self._visible = []
        return [self._item_event(f"{_TEXT_EVENTS[self._open['type']]}.delta", content_index=0, delta=text, **extra)]

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        item = self._open
        out = []
        if item["type"] in _TEXT_EVENTS:
            part = item["content"][0]
            extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            out.append(self._item_event(f"{_TEXT_EVENTS[item['type']]}.done", content_index=0, text=part["text"], **extra))
            out.append(self._item_event("response.content_part.done", content_index=0, part=part))
        else:
            done = {"arguments": item["arguments"], "name": item["name"]}
            out.append(self._item_event("response.function_call_arguments.done", **done))
        item["status"] = "incomplete" if self._is_cut else "completed"
        out.append(self._event("response.output_item.done", output_index=self._output_index, item=item))
        self._open = None
        return out

    @property
    def _output_index(self) -> int:
        return len(self.response["output"]) - 1

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=self._output_index, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}


def _empty_part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def response_usage(outcome: Outcome) -> dict[str, Any]:
    """`usage` as in responses."""
    return {
        "input_tokens": outcome.prompt_tokens,
        "input_tokens_details": {"cached_tokens": outcome.cached_tokens},
        "output_tokens": outcome.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens},
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
    }
