"""POST /v1/completions: text or token ids in, plain text out; no chat format, special tokens have no text.

Owns its request model, the runs of several prompts side by side, and both forms of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.responses import JSONResponse, Response

from common.errors import InvalidRequestError
from common.requests import MAX_N
from frontend.chat_format import ChatFormat, ContentDelta, Finish
from frontend.choice import ChoiceUpdate, VisibleToken
from frontend.generation import Generation, Job, Outcome
from frontend.http import fields
from frontend.http.fields import RequestModel, StreamOptions
from frontend.http.sampling import router_request
from frontend.http.service import Call, Service, event_stream
from frontend.http.shape import COMPACT, finite, flags_of, new_id, route_headers, route_of, token_of, usage_of
from frontend.plain import PlainReplyParser

_UINT32_MAX = 2**32 - 1


class CompletionRequest(RequestModel):
    """Supported fields of a text completion."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"user"})
    REFUSED: ClassVar[Mapping[str, str]] = {
        "suffix": "is not supported",
        "echo": "is not supported",
        "best_of": "is not supported beyond 1",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",), "echo": (False,), "best_of": (1,)}

    model: str
    prompt: str | list[Any]
    stream: bool = False
    stream_options: StreamOptions | None = None
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
    logprobs: fields.TopLogprobs | None = None
    return_token_ids: bool = False

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or ids. Raises: InvalidRequestError if the list mixes kinds or holds no ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("prompt", "must not be empty")
        if all(type(item) is int for item in self.prompt):
            return [_checked_ids(self.prompt, "prompt")]
        if len(self.prompt) * self.n > MAX_N:
            raise InvalidRequestError("prompt", f"{len(self.prompt)} prompts times n = {self.n}; at most {MAX_N} choices in all")
        prompts: list[str | list[int]] = []
        for number, item in enumerate(self.prompt):
            prompts.append(item if isinstance(item, str) else _checked_ids(item, f"prompt[{number}]"))
        return prompts


def _checked_ids(ids: Any, field: str) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i <= _UINT32_MAX for i in ids):
        raise InvalidRequestError(field, "must be text or a list of token ids")
    return ids


async def completions(service: Service, call: Call) -> Response:
    """The endpoint. Raises: ServingError for whatever goes wrong before the first byte."""
    request = await service.parse(CompletionRequest, call.body)
    model = await service.model_name(request.model)
    generations = [
        _start(service, call, request, await _encode(service, call, prompt, number)) for number, prompt in enumerate(request.prompts())
    ]
    identity = {"id": new_id("cmpl-"), "object": "text_completion", "created": call.created, "model": model}
    if request.stream:
        events = _stream(service, call, request, generations, identity)
        return await event_stream(service, call, events, generations[0].outcome)
    choices = [_Choice(service.generator.chat_format, request) for _ in range(len(generations) * request.n)]
    async with contextlib.aclosing(_merge(generations)) as updates:
        async for number, update in updates:
            choices[number * request.n + update.index].add(update)
    outcome = _total(generations)
    body = {**identity, "choices": [choice.shape(i) for i, choice in enumerate(choices)], "usage": usage_of(outcome)}
    if call.headers.wants_route:
        body["tandem"] = {"routes": [route_of(generation.outcome) for generation in generations]}
    return JSONResponse(body, headers=route_headers(generations[0].outcome))


async def _encode(service: Service, call: Call, prompt: str | list[int], number: int) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    encode = service.generator.chat_format.encode_text
    ids = await service.generator.encode(functools.partial(encode, prompt, field="prompt"), len(call.body))
    if not ids:
        raise InvalidRequestError("prompt", f"prompt {number} is empty")
    return ids


def _start(service: Service, call: Call, request: CompletionRequest, ids: list[int]) -> Generation:
    chat_format = service.generator.chat_format
    router = router_request(
        request,
        ids,
        call.headers,
        request_id=call.request_id,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        stop_token_ids=chat_format.stop_token_ids,
        logit_bias=request.logit_bias,
        priority=call.caller.priority_for(call.headers.priority),
    )
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    parser = functools.partial(PlainReplyParser, chat_format.token_bytes, chat_format.stop_token_ids)
    return service.generator.start(Job(router, parser, stops, call.headers.deadline_s or service.settings.default_deadline_s))


async def _merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, ChoiceUpdate], None]:
    """Updates of all generations as they come. The first error ends them all."""
    if len(generations) == 1:
        async with contextlib.aclosing(aiter(generations[0])) as updates:
            async for update in updates:
                yield 0, update
        return
    queue: asyncio.Queue[tuple[int, ChoiceUpdate | asyncio.Task[None]]] = asyncio.Queue()

    async def pump(number: int) -> None:
        async for update in generations[number]:
            queue.put_nowait((number, update))

    tasks = [asyncio.ensure_future(pump(number)) for number in range(len(generations))]
    for number, task in enumerate(tasks):
        task.add_done_callback(functools.partial(_put_end, queue, number))
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, ChoiceUpdate):
                yield number, item
            else:
                item.result()
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _put_end(queue: asyncio.Queue[Any], number: int, task: asyncio.Task[None]) -> None:
    queue.put_nowait((number, task))


def _total(generations: Sequence[Generation]) -> Outcome:
    total = Outcome()
    for outcome in (generation.outcome for generation in generations):
        total.prompt_tokens += outcome.prompt_tokens
        total.completion_tokens += outcome.completion_tokens
        total.cached_tokens += outcome.cached_tokens
    return total


@dataclass
class _Choice:
    """One choice of a whole answer, or of one chunk of a stream."""

    chat_format: ChatFormat
    request: CompletionRequest
    text: list[str] = field(default_factory=list)
    visible: list[VisibleToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, update: ChoiceUpdate) -> None:
        self.visible += update.visible
        self.token_ids += update.token_ids
        for event in update.events:
            if isinstance(event, ContentDelta):
                self.text.append(event.text)
            elif isinstance(event, Finish):
                self.finish = event

    def shape(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": "".join(self.text),
            "logprobs": _legacy_logprobs(self.chat_format, self.visible) if self.request.logprobs is not None else None,
            "finish_reason": self.finish.reason if self.finish else None,
            **(flags_of(self.finish) if self.finish else {}),
        }
        return choice | ({"token_ids": self.token_ids} if self.request.return_token_ids else {})


def _legacy_logprobs(chat_format: ChatFormat, tokens: Sequence[VisibleToken]) -> dict[str, Any]:
    shaped = [token_of(chat_format, token.token_id, token.logprobs.logprob) for token in tokens]
    offsets, offset = [], 0
    for token in shaped:
        offsets.append(offset)
        offset += len(token["token"]) if token["bytes"] else 0
    return {
        "tokens": [token["token"] for token in shaped],
        "token_logprobs": [token["logprob"] for token in shaped],
        "top_logprobs": [
            {token_of(chat_format, top.token_id, 0.0)["token"]: finite(top.logprob) for top in token.logprobs.top} for token in tokens
        ],
        "text_offset": offsets,
    }


async def _stream(
    service: Service, call: Call, request: CompletionRequest, generations: Sequence[Generation], identity: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    includes_usage = request.stream_options is not None and request.stream_options.include_usage
    usage = {"usage": None} if includes_usage else {}
    async with contextlib.aclosing(_merge(generations)) as updates:
        async for number, update in updates:
            choice = _Choice(service.generator.chat_format, request)
            choice.add(update)
            if choice.text or choice.finish or choice.visible or (request.return_token_ids and choice.token_ids):
                chunk = {**identity, "choices": [choice.shape(number * request.n + update.index)], **usage}
                yield f"data: {json.dumps(chunk, separators=COMPACT)}\n\n".encode()
    last: dict[str, Any] = {**identity, "choices": []}
    if includes_usage:
        last["usage"] = usage_of(_total(generations))
    if call.headers.wants_route:
        last["tandem"] = {"routes": [route_of(generation.outcome) for generation in generations]}
    if len(last) > len(identity) + 1:
        yield f"data: {json.dumps(last, separators=COMPACT)}\n\n".encode()
    yield b"data: [DONE]\n\n"
