"""An agent's loop with the real openai client through the real frontend, router and trained model: calls, results, answers, three turns.

What reached the model is compared with openai-harmony's own rendering of the same conversation, token by token.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    ToolDescription,
)

from frontend.chat_format import ChatInput, RenderedPrompt
from frontend.harmony.format import HarmonyFormat
from frontend.settings import FrontendSettings
from frontend.vocab import Vocabulary, load_vocabulary
from tests.frontend.support.stack import running_frontend

pytestmark = pytest.mark.slow
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TURNS = (
    ("Paris", '{"temperature":21,"sky":"sunny"}'),
    ("Rome", '{"temperature":8,"sky":"rainy"}'),
    ("Oslo", '{"temperature":3,"sky":"cloudy"}'),
)


class RecordingFormat(HarmonyFormat):
    """Harmony; `prompts` are the ids as they went to the router."""

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        self.prompts: list[list[int]] = []

    def render(self, chat: ChatInput) -> RenderedPrompt:
        prompt = super().render(chat)
        self.prompts.append(prompt.token_ids)
        return prompt


def reference(vocabulary: Vocabulary, messages: list[dict[str, Any]]) -> list[int]:
    """The library's ids for the messages that the client sent. Thoughts before the last final answer are dropped, as the format says."""
    tool = ToolDescription.new(WEATHER["name"], WEATHER["description"], WEATHER["parameters"])
    system = SystemContent.new().with_reasoning_effort(ReasoningEffort.MEDIUM)
    out = [
        Message.from_role_and_content(Role.SYSTEM, system),
        Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_function_tools([tool])),
    ]
    finals = [i for i, message in enumerate(messages) if message["role"] == "assistant" and not message.get("tool_calls")]
    for index, message in enumerate(messages):
        if message["role"] == "user":
            out.append(Message.from_role_and_content(Role.USER, message["content"]))
        elif message["role"] == "tool":
            result = Message.from_author_and_content(Author.new(Role.TOOL, "functions.get_weather"), message["content"])
            out.append(result.with_channel("commentary").with_recipient("assistant"))
        else:
            if message.get("reasoning_content") and (not finals or index > finals[-1]):
                out.append(Message.from_role_and_content(Role.ASSISTANT, message["reasoning_content"]).with_channel("analysis"))
            for call in message.get("tool_calls", []):
                arguments = Message.from_role_and_content(Role.ASSISTANT, call["function"]["arguments"]).with_channel("commentary")
                name = f"functions.{call['function']['name']}"
                out.append(arguments.with_recipient(name).with_content_type("<|constrain|>json"))
            if message.get("content"):
                out.append(Message.from_role_and_content(Role.ASSISTANT, message["content"]).with_channel("final"))
    config = RenderConversationConfig(auto_drop_analysis=False)
    return vocabulary.harmony.render_conversation_for_completion(Conversation.from_messages(out), Role.ASSISTANT, config)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_three_turns_of_call_result_and_answer(trained_router: str, stream: bool):
    vocabulary = load_vocabulary()
    chat_format = RecordingFormat(vocabulary)
    messages: list[dict[str, Any]] = []
    sent: list[list[dict[str, Any]]] = []
    settings = FrontendSettings(router=trained_router, port=0, includes_date=False)
    async with (
        running_frontend(chat_format, settings) as (_, _, url),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        model = (await client.models.list()).data[0].id

        async def ask() -> Any:
            sent.append(list(messages))
            fields: dict[str, Any] = {
                "model": model,
                "messages": list(messages),
                "tools": [{"type": "function", "function": WEATHER}],
                "temperature": 0,
                "max_completion_tokens": 96,
            }
            if not stream:
                return (await client.chat.completions.create(**fields)).choices[0]
            async with client.chat.completions.stream(**fields) as running:
                return (await running.get_final_completion()).choices[0]

        for city, result in TURNS:
            messages.append({"role": "user", "content": f"What is the weather in {city}?"})
            choice = await ask()
            assert choice.finish_reason == "tool_calls", choice
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": city})
            messages.append(choice.message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            choice = await ask()
            assert choice.finish_reason == "stop"
            assert str(json.loads(result)["temperature"]) in choice.message.content
            messages.append(choice.message.model_dump(exclude_none=True))
    assert len(chat_format.prompts) == 2 * len(TURNS)
    for prompt, history in zip(chat_format.prompts, sent, strict=True):
        assert prompt == reference(vocabulary, history)
