"""Turns a conversation in OpenAI's chat form into Harmony messages: who speaks, on which channel, and what is dropped.

Owns validation of messages and tools and the rule for old chains of thought; it encodes nothing. Called by
`frontend.harmony.render`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from frontend.chat_format import ChatInput
from frontend.harmony.tokens import ANALYSIS, ASSISTANT, COMMENTARY, FINAL, FUNCTIONS, SYSTEM
from frontend.harmony.tool_schema import format_function_tools

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MODEL_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_KNOWLEDGE_CUTOFF = "2024-06"


@dataclass(frozen=True)
class HarmonyMessage:
    """One message before encoding. `author`: a role or, for a tool's result, `functions.NAME`; `texts` are encoded one
    by one; `is_constrained`: the content type is `<|constrain|>json`; `field`: where it came from, for errors."""

    author: str
    texts: tuple[str, ...]
    channel: str | None = None
    recipient: str | None = None
    is_constrained: bool = False
    field: str = "messages"


def to_harmony(chat: ChatInput) -> list[HarmonyMessage]:
    """All messages of the prompt, system and developer ones first.

    Chains of thought before the last final answer are dropped; those after it belong to a tool loop that still runs and
    are kept. Raises: InvalidRequestError naming the field.
    """
    tools = () if chat.tool_choice.mode == "none" else chat.tools
    leading = 0
    while leading < len(chat.messages) and _role(chat.messages[leading], leading) in ("system", "developer"):
        leading += 1
    instructions = [_joined(message, f"messages[{i}]") for i, message in enumerate(chat.messages[:leading])]
    converted = [_system_message(chat, has_tools=bool(tools))]
    converted += _developer_message([text for text in instructions if text], tools)
    call_names: dict[str, str] = {}
    for index in range(leading, len(chat.messages)):
        converted += _convert(chat.messages[index], index, call_names)
    return _drop_old_reasoning(converted)


def _system_message(chat: ChatInput, *, has_tools: bool) -> HarmonyMessage:
    top = [_MODEL_IDENTITY, f"Knowledge cutoff: {_KNOWLEDGE_CUTOFF}"]
    if chat.current_date is not None:
        top.append(f"Current date: {chat.current_date}")
    channels = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    if has_tools:
        channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
    text = "\n\n".join(("\n".join(top), f"Reasoning: {chat.reasoning_effort}", channels))
    return HarmonyMessage(SYSTEM, (text,))


def _developer_message(instructions: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> list[HarmonyMessage]:
    sections = []
    if instructions:
        sections += ["# Instructions", "\n\n".join(instructions)]
    if tools:
        for index, tool in enumerate(tools):
            _check_tool(tool, f"tools[{index}]")
        sections.append(format_function_tools(tools))
    return [HarmonyMessage("developer", ("\n\n".join(sections),), field="tools")] if sections else []


def _convert(message: Mapping[str, Any], index: int, call_names: dict[str, str]) -> list[HarmonyMessage]:
    field = f"messages[{index}]"
    role = _role(message, index)
    if role in ("system", "developer"):
        return [HarmonyMessage("developer", ("# Instructions\n\n" + _joined(message, field),), field=field)]
    if role == "user":
        return [HarmonyMessage("user", _texts(message.get("content"), f"{field}.content"), field=field)]
    if role == "tool":
        texts = _texts(message.get("content"), f"{field}.content")
        author = FUNCTIONS + _result_name(message, field, call_names)
        return [HarmonyMessage(author, texts, COMMENTARY, ASSISTANT, field=field)]
    return _convert_assistant(message, field, call_names)


def _convert_assistant(message: Mapping[str, Any], field: str, call_names: dict[str, str]) -> list[HarmonyMessage]:
    out = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        if not isinstance(reasoning, str):
            raise InvalidRequestError(f"{field}.reasoning_content", "must be a string")
        out.append(HarmonyMessage(ASSISTANT, (reasoning,), ANALYSIS, field=field))
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{field}.tool_calls", "must be a list")
    content = message.get("content")
    if content is None and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    if content is not None and content != []:
        # Words beside a call are what Harmony calls a preamble: shown to the user, but not the final answer.
        channel = COMMENTARY if calls else FINAL
        texts = _texts(content, f"{field}.content")
        if any(texts) or not calls:
            out.append(HarmonyMessage(ASSISTANT, texts, channel, field=field))
    for number, call in enumerate(calls):
        out.append(_convert_call(call, f"{field}.tool_calls[{number}]", call_names))
    if not out:
        raise InvalidRequestError(field, "an assistant message needs content, tool_calls or reasoning_content")
    return out


def _convert_call(call: Any, field: str, call_names: dict[str, str]) -> HarmonyMessage:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function", "must be an object with name and arguments")
    name = _tool_name(function.get("name"), f"{field}.function.name")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        raise InvalidRequestError(f"{field}.function.arguments", "must be a string that holds JSON")
    if isinstance(call.get("id"), str):
        call_names[call["id"]] = name
    return HarmonyMessage(ASSISTANT, (arguments,), COMMENTARY, FUNCTIONS + name, is_constrained=True, field=field)


def _drop_old_reasoning(messages: list[HarmonyMessage]) -> list[HarmonyMessage]:
    finals = [i for i, message in enumerate(messages) if message.author == ASSISTANT and message.channel == FINAL]
    last_final = finals[-1] if finals else -1
    return [m for i, m in enumerate(messages) if i > last_final or m.author != ASSISTANT or m.channel != ANALYSIS]


def _role(message: Any, index: int) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("system", "developer", "user", "assistant", "tool"):
        shown = "no role" if role is None else f"role {str(role)[:40]!r}"
        raise InvalidRequestError(f"messages[{index}].role", f"{shown}; expected system, developer, user, assistant or tool")
    return role


def _result_name(message: Mapping[str, Any], field: str, call_names: Mapping[str, str]) -> str:
    call_id = message.get("tool_call_id")
    if isinstance(call_id, str) and call_id in call_names:
        return call_names[call_id]
    if message.get("name") is not None:
        return _tool_name(message["name"], f"{field}.name")
    raise InvalidRequestError(f"{field}.tool_call_id", "matches no tool call of an earlier assistant message")


def _tool_name(name: Any, field: str) -> str:
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise InvalidRequestError(field, "must be 1 to 64 letters, digits, underscores, dots or dashes")
    return name


def _check_tool(tool: Mapping[str, Any], field: str) -> None:
    _tool_name(tool.get("name"), f"{field}.function.name")
    if not isinstance(tool.get("description", ""), str | None):
        raise InvalidRequestError(f"{field}.function.description", "must be a string")
    if not isinstance(tool.get("parameters", {}), Mapping | None):
        raise InvalidRequestError(f"{field}.function.parameters", "must be a JSON schema object")


def _joined(message: Mapping[str, Any], field: str) -> str:
    return "".join(_texts(message.get("content"), f"{field}.content"))


def _texts(content: Any, field: str) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise InvalidRequestError(field, "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS | {"refusal"}:
            raise InvalidRequestError(f"{field}[{index}].type", f"{str(kind)[:40]!r} is not supported; only text parts are")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{field}[{index}].text", "must be a string")
        texts.append(text)
    return tuple(texts)
