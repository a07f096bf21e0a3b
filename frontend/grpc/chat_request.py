"""`CompleteRequest` -> a conversation to render and the router's request. Wrong fields get their name in the message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequestError
from common.proto import chat_pb2, router_pb2, types_pb2
from common.requests import MAX_N, MAX_STOP_BYTES, MAX_STOP_STRINGS
from frontend.chat_format import ChatInput, ReasoningEffort, ToolChoice

_EFFORTS: Mapping[int, ReasoningEffort] = {
    chat_pb2.REASONING_EFFORT_UNSPECIFIED: "medium",
    chat_pb2.REASONING_EFFORT_LOW: "low",
    chat_pb2.REASONING_EFFORT_MEDIUM: "medium",
    chat_pb2.REASONING_EFFORT_HIGH: "high",
}
_CHOICES: Mapping[int, ToolChoice] = {
    chat_pb2.TOOL_CHOICE_AUTO: ToolChoice("auto"),
    chat_pb2.TOOL_CHOICE_NONE: ToolChoice("none"),
    chat_pb2.TOOL_CHOICE_REQUIRED: ToolChoice("required"),
}
_MAX_ITEMS = 20_000  # messages, and tools


def chat_input(request: chat_pb2.CompleteRequest, current_date: str | None) -> ChatInput:
    """The conversation to render. Raises: InvalidRequestError naming the field."""
    for name in ("messages", "tools"):
        if len(getattr(request, name)) > _MAX_ITEMS:
            raise InvalidRequestError(name, f"{len(getattr(request, name))} entries; at most {_MAX_ITEMS}")
    return ChatInput(
        messages=[_message(message) for message in request.messages],
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)],
        tool_choice=_tool_choice(request),
        reasoning_effort=_known(_EFFORTS, request.reasoning_effort, "reasoning_effort"),
        current_date=current_date,
    )


def router_request(
    request: chat_pb2.CompleteRequest, token_ids: Sequence[int], stop_token_ids: Sequence[int], *, request_id: str, priority: int
) -> router_pb2.GenerateRequest:
    """The router checks the ranges. Stop strings stay here: they act on visible text. Raises: InvalidRequestError naming the field."""
    params = request.sampling_params
    if params.stop_token_ids or params.allowed_token_ids or params.ignore_eos:
        raise InvalidRequestError("sampling_params", "stop_token_ids, allowed_token_ids and ignore_eos are the chat format's own")
    if params.HasField("logprobs"):
        raise InvalidRequestError("sampling_params.logprobs", "no event of this API carries them; use HTTP")
    if params.HasField("n") and not 1 <= params.n <= MAX_N:
        raise InvalidRequestError("sampling_params.n", f"{params.n}; must lie in [1, {MAX_N}]")
    if len(params.stop) > MAX_STOP_STRINGS or not all(0 < len(stop.encode()) <= MAX_STOP_BYTES for stop in params.stop):
        raise InvalidRequestError("sampling_params.stop", f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_BYTES} bytes")
    out = router_pb2.GenerateRequest(request_id=request_id, sampling_params=params, slo=request.slo, priority=priority)
    out.sampling_params.ClearField("stop")
    out.sampling_params.stop_token_ids.extend(stop_token_ids)
    out.tokenized.input_ids.extend(token_ids)
    if request.HasField("latency_weight"):
        out.latency_weight = request.latency_weight
    if not request.HasField("slo"):
        out.ClearField("slo")
    return out


def num_choices(params: types_pb2.SamplingParams) -> int:
    """How many replies are wanted."""
    return params.n if params.HasField("n") else 1


def _message(message: chat_pb2.Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["content"] = message.content or None
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls
        ]
    elif message.reasoning and not message.content:
        out["content"] = None
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    return out


def _tool(tool: chat_pb2.Tool, field: str) -> dict[str, Any]:
    out: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters:
        try:
            out["parameters"] = json.loads(tool.parameters)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequestError(f"{field}.parameters", f"is no JSON: {str(exc)[:200]}") from None
    return out


def _tool_choice(request: chat_pb2.CompleteRequest) -> ToolChoice:
    if request.tool_name:
        return ToolChoice("function", request.tool_name)
    return _known(_CHOICES, request.tool_choice, "tool_choice")


def _known(table: Mapping[int, Any], value: int, field: str) -> Any:
    if value not in table:
        raise InvalidRequestError(field, f"{value} is no value of this enum")
    return table[value]
