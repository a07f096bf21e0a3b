"""The request of /v1/chat/completions: which fields exist, and how they become a conversation to render.

Messages are checked by the chat format, which knows what it can say; here they are only objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from common.errors import InvalidRequestError
from frontend.chat_format import ChatInput, ReasoningEffort, ToolChoice
from frontend.http import fields
from frontend.http.fields import RequestModel, StreamOptions

EFFORTS: Mapping[str, ReasoningEffort] = {"minimal": "low", "low": "low", "medium": "medium", "high": "high"}


class ChatRequest(RequestModel):
    """Supported fields of a chat completion."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity"}
    )
    REFUSED: ClassVar[Mapping[str, str]] = {
        "functions": "is not supported; use tools",
        "function_call": "is not supported; use tool_choice",
        "audio": "is not supported; this model writes text",
        "modalities": "is not supported beyond text",
        "prediction": "is not supported",
        "web_search_options": "is not supported",
        "response_format": "is not supported beyond text: the engine can't constrain its output",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "functions": ([],),
        "function_call": ("none",),
    }

    messages: fields.Objects
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: fields.TokenCount | None = None
    max_tokens: fields.TokenCount | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Any] | None = None
    stop: fields.StopStrings | None = None
    seed: fields.Seed | None = None
    n: fields.ChoiceCount = 1
    logprobs: bool = False
    top_logprobs: fields.TopLogprobs | None = None
    reasoning_effort: str | None = None
    tools: fields.Objects = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True

    def chat_input(self, current_date: str | None) -> ChatInput:
        """The conversation to render. Raises: InvalidRequestError naming the field."""
        return ChatInput(
            messages=self.messages,
            tools=[function_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)],
            tool_choice=read_tool_choice(self.tool_choice),
            reasoning_effort=read_effort(self.reasoning_effort, "reasoning_effort"),
            current_date=current_date,
        )

    def token_limit(self) -> int | None:
        """Most output tokens; None for the rest of the context. Raises: InvalidRequestError if two limits differ."""
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidRequestError("max_tokens", "differs from max_completion_tokens; give one of them")
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def num_logprobs(self) -> int | None:
        """Alternatives per token, 0 for the chosen token alone, None for no log probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


def read_effort(effort: Any, field: str) -> ReasoningEffort:
    """`minimal` is served as low, the least that the model knows. Raises: InvalidRequestError for other names."""
    if effort is None:
        return "medium"
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise InvalidRequestError(field, f"{str(effort)[:40]!r} is not supported; use one of {', '.join(EFFORTS)}")
    return EFFORTS[effort]


def function_tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The function of a chat tool. Raises: InvalidRequestError for other kinds of tools."""
    if tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise InvalidRequestError(field, 'must be {"type": "function", "function": {...}}; other tools are not supported')
    return dict(tool["function"])


def read_tool_choice(choice: str | Mapping[str, Any]) -> ToolChoice:
    """Chat's form of `tool_choice`. Raises: InvalidRequestError for unknown ones."""
    modes: dict[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none", "required": "required"}
    if isinstance(choice, str):
        if choice not in modes:
            raise InvalidRequestError("tool_choice", f"{choice[:40]!r} is not supported; use auto, none, required or a function")
        return ToolChoice(modes[choice])
    function = choice.get("function") if choice.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("tool_choice", 'must be {"type": "function", "function": {"name": ...}}')
    return ToolChoice("function", function["name"])
