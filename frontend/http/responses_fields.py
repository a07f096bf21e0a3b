"""The request of /v1/responses and its input items, turned into a conversation in chat form.

The API is served without a store: every request brings its whole conversation, as `input` items.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from common.errors import InvalidRequestError
from frontend.chat_format import ChatInput
from frontend.http import fields
from frontend.http.chat_fields import read_effort, read_tool_choice
from frontend.http.fields import RequestModel

LOGPROBS = "message.output_text.logprobs"  # of what `include` may ask for, the one thing that exists here
_NO_STORE = "is not supported: nothing is stored here; send the conversation as input items"
# A field of the chat: of a message, or of one of its calls.
_OF_MESSAGE = re.compile(r"messages\[(?P<index>\d+)\](?:\.tool_calls\[(?P<call>\d+)\](?:\.function(?P<call_field>.*))?|(?P<field>.*))")
_ITEM_FIELDS = {
    ("function_call_output", ".content"): ".output",
    ("function_call_output", ".tool_call_id"): ".call_id",
    ("reasoning", ".reasoning_content"): ".content",
}


class ResponsesRequest(RequestModel):
    """Supported fields of a response."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
        | {"max_tool_calls", "stream_options"}
    )
    REFUSED: ClassVar[Mapping[str, str]] = {
        "previous_response_id": _NO_STORE,
        "conversation": _NO_STORE,
        "prompt": "is not supported: there are no stored prompts",
        "background": "is not supported",
        "truncation": "is not supported; shorten the input",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"background": (False,), "truncation": ("disabled",)}

    input: str | list[Any]
    model: str
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: fields.TokenCount | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Probability | None = None
    top_logprobs: fields.TopLogprobs | None = None
    include: list[str] = Field(default_factory=list)
    seed: fields.Seed | None = None
    reasoning: dict[str, Any] = Field(default_factory=dict)
    text: dict[str, Any] = Field(default_factory=dict)
    tools: fields.Objects = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    metadata: fields.Metadata = Field(default_factory=dict)

    def chat_input(self, current_date: str | None) -> ChatInput:
        """The conversation to render. Raises: InvalidRequestError naming the field."""
        self._check_text()
        choice = self.tool_choice
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
        return ChatInput(
            messages=[message for message, _ in self._messages()],
            tools=[_function_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)],
            tool_choice=read_tool_choice(choice),
            reasoning_effort=read_effort(self.reasoning.get("effort"), "reasoning.effort"),
            current_date=current_date,
        )

    def field_of(self, name: str) -> str:
        """What the request calls a field of the chat that it became."""
        found = _OF_MESSAGE.fullmatch(name)
        if found is None:
            return "input" if name == "messages" else name
        message, origins = self._messages()[int(found["index"])]
        if found["call"] is not None:  # the calls of a message are its last items
            return f"{origins[int(found['call']) - len(message['tool_calls'])]}{found['call_field'] or ''}"
        if not isinstance(self.input, list) or not origins[0].endswith("]"):
            return origins[0]
        kind = self.input[int(origins[0][len("input[") : -1])].get("type", "message")
        return origins[0] + _ITEM_FIELDS.get((kind, found["field"]), found["field"])

    def num_logprobs(self) -> int | None:
        """Alternatives per token, 0 for the chosen token alone, None for no log probabilities."""
        return self.top_logprobs or (0 if LOGPROBS in self.include else None)

    def _messages(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Returns: each message of the chat, and the fields that it was made of, calls last"""
        messages: list[tuple[dict[str, Any], list[str]]] = []
        if self.instructions:
            messages.append(({"role": "system", "content": self.instructions}, ["instructions"]))
        if isinstance(self.input, str):
            return [*messages, ({"role": "user", "content": self.input}, ["input"])]
        for number, item in enumerate(self.input):
            name = f"input[{number}]"
            message = _message(item, name)
            before, origins = messages[-1] if messages else ({}, [])
            if "tool_calls" in message and before.get("role") == "assistant" and before.get("content"):
                # Words right before a call are its preamble, not a final answer: chat says so by one message.
                before.setdefault("tool_calls", []).extend(message["tool_calls"])
                origins.append(name)
            else:
                messages.append((message, [name]))
        return messages

    def _check_text(self) -> None:
        for name, value in self.text.items():
            if name == "format" and value in (None, {"type": "text"}):
                continue
            if name != "verbosity":
                raise InvalidRequestError(f"text.{name[:60]}", "is not supported beyond plain text")


def _function_tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequestError(f"{field}.type", f"{str(tool.get('type'))[:40]!r} is not supported; only function tools are")
    return {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}


def _message(item: Any, field: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise InvalidRequestError(field, "must be an object")
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if kind == "reasoning":
        return {"role": "assistant", "content": None, "reasoning_content": _reasoning_text(item, field)}
    raise InvalidRequestError(f"{field}.type", f"{str(kind)[:40]!r} is not supported")


def _reasoning_text(item: Mapping[str, Any], field: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    found = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    texts = [text for text in found if isinstance(text, str)]
    if not texts or len(texts) < len(parts):
        raise InvalidRequestError(f"{field}.content", "must hold reasoning_text parts; encrypted reasoning is not supported")
    return "\n".join(texts)
