"""POST /v1/chat/completions: renders, runs, and answers whole or as a stream; both from the same events.

Owns the endpoint and the whole answer; the stream's chunks are `frontend.http.chat_chunks`'s.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response

from frontend.chat_format import (
    ChatFormat,
    ContentDelta,
    Finish,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.choice import ChoiceUpdate, VisibleToken
from frontend.generation import Generation, Job
from frontend.http.chat_chunks import ChatChunks
from frontend.http.chat_fields import ChatRequest
from frontend.http.sampling import router_request
from frontend.http.service import Call, Service, event_stream
from frontend.http.shape import MessageJoiner, flags_of, logprobs_of, new_id, route_headers, route_of, usage_of


async def chat_completions(service: Service, call: Call) -> Response:
    """The endpoint. Raises: ServingError for whatever goes wrong before the first byte."""
    request = await service.parse(ChatRequest, call.body)
    model = await service.model_name(request.model)
    generation = await start_chat(service, call, request)
    identity = {"id": new_id("chatcmpl-"), "created": call.created, "model": model}
    if not request.stream:
        answer = await _collect(service, request, generation)
        outcome = generation.outcome
        body = {**identity, "object": "chat.completion", **answer, "usage": usage_of(outcome)}
        if call.headers.wants_route:
            body["tandem"] = {"route": route_of(outcome)}
        return JSONResponse(body, headers=route_headers(outcome))
    includes_usage = request.stream_options is not None and request.stream_options.include_usage
    chunks = ChatChunks(service.generator.chat_format, identity, includes_usage, request.n, request.parallel_tool_calls)
    events = _stream(generation, chunks, wants_route=call.headers.wants_route)
    return await event_stream(service, call, events, generation.outcome)


async def start_chat(service: Service, call: Call, request: ChatRequest) -> Generation:
    """Renders the conversation and makes the generation, not yet running. Raises: InvalidRequestError."""
    generator = service.generator
    date = service.current_date()
    prompt = await generator.encode(lambda: generator.chat_format.render(request.chat_input(date)), len(call.body))
    router = router_request(
        request,
        prompt.token_ids,
        call.headers,
        request_id=call.request_id,
        max_tokens=request.token_limit(),
        logprobs=request.num_logprobs(),
        stop_token_ids=generator.chat_format.stop_token_ids,
        logit_bias=request.logit_bias,
        priority=call.caller.priority_for(call.headers.priority),
    )
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    timeout_s = call.headers.deadline_s or service.settings.default_deadline_s
    return generator.start(Job(router, functools.partial(generator.chat_format.reply_parser, prompt), stops, timeout_s))


async def _stream(generation: Generation, chunks: ChatChunks, *, wants_route: bool) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(aiter(generation)) as updates:
        opening = chunks.roles()
        async for update in updates:  # the response begins with the first token, so that errors before it have a status
            data = chunks.update(update)
            if opening:
                decision = route_of(generation.outcome) if wants_route else None
                data = (chunks.route(decision) if decision is not None else b"") + opening + data
                opening = b""
            if data:
                yield data
    yield chunks.end(generation.outcome, route_of(generation.outcome) if wants_route else None)


@dataclass
class CollectedChoice:
    """One choice of a whole answer as it grows."""

    joiner: MessageJoiner = field(default_factory=MessageJoiner)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    visible: list[VisibleToken] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, update: ChoiceUpdate) -> None:
        self.visible += update.visible
        for event in update.events:
            match event:
                case ContentDelta():
                    self.content.append(self.joiner.text(event))
                case ReasoningDelta():
                    self.reasoning.append(self.joiner.text(event))
                case ToolCallStart(_, name, _):
                    function = {"name": name, "arguments": ""}
                    self.calls.append({"id": new_id("call_"), "type": "function", "function": function})
                case ToolCallArguments(call_index, text):
                    self.calls[call_index]["function"]["arguments"] += text
                case Finish():
                    self.finish = event

    def shape(self, index: int, chat_format: ChatFormat, request: ChatRequest) -> dict[str, Any]:
        calls = self.calls if request.parallel_tool_calls else self.calls[:1]
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self.reasoning)
        if calls:
            message["tool_calls"] = calls
        finish = self.finish or Finish("stop")
        logprobs = {"content": logprobs_of(chat_format, self.visible), "refusal": None} if request.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish.reason, **flags_of(finish)}


async def _collect(service: Service, request: ChatRequest, generation: Generation) -> dict[str, Any]:
    choices = [CollectedChoice() for _ in range(request.n)]
    async with contextlib.aclosing(aiter(generation)) as updates:
        async for update in updates:
            choices[update.index].add(update)
    return {"choices": [choice.shape(i, service.generator.chat_format, request) for i, choice in enumerate(choices)]}
