"""POST /v1/responses: the same generation as chat, answered as output items. Stateless: nothing is stored."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from starlette.responses import JSONResponse, Response

from common.errors import InvalidRequestError, ServingError
from frontend.generation import Generation, Job
from frontend.http.responses_fields import ResponsesRequest
from frontend.http.responses_items import ResponseBuilder
from frontend.http.sampling import router_request
from frontend.http.service import Call, Service, event_stream
from frontend.http.shape import COMPACT, new_id, route_headers, route_of


async def responses(service: Service, call: Call) -> Response:
    """The endpoint. Raises: ServingError for whatever goes wrong before the first byte."""
    request = await service.parse(ResponsesRequest, call.body)
    model = await service.model_name(request.model)
    generation = await _start(service, call, request)
    builder = ResponseBuilder(
        service.generator.chat_format, _described(request, model, call.created), has_parallel_calls=request.parallel_tool_calls
    )
    if request.stream:
        events = _stream(generation, builder, wants_route=call.headers.wants_route)
        return await event_stream(service, call, events, generation.outcome)
    async with contextlib.aclosing(aiter(generation)) as updates:
        async for update in updates:
            builder.update(update)
    builder.end(generation.outcome)
    if call.headers.wants_route:
        builder.response["tandem_route"] = route_of(generation.outcome)
    return JSONResponse(builder.response, headers=route_headers(generation.outcome))


async def _start(service: Service, call: Call, request: ResponsesRequest) -> Generation:
    generator = service.generator
    date = service.current_date()
    try:
        prompt = await generator.encode(lambda: generator.chat_format.render(request.chat_input(date)), len(call.body))
    except InvalidRequestError as exc:
        field = request.field_of(exc.field)
        raise InvalidRequestError(field, exc.message.removeprefix(f"{exc.field}: ")) from exc
    router = router_request(
        request,
        prompt.token_ids,
        call.headers,
        request_id=call.request_id,
        max_tokens=request.max_output_tokens,
        logprobs=request.num_logprobs(),
        stop_token_ids=generator.chat_format.stop_token_ids,
        priority=call.caller.priority_for(call.headers.priority),
    )
    timeout_s = call.headers.deadline_s or service.settings.default_deadline_s
    return generator.start(Job(router, functools.partial(generator.chat_format.reply_parser, prompt), (), timeout_s))


def _described(request: ResponsesRequest, model: str, created: int) -> dict[str, Any]:
    """The fields of a response that the request settles."""
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": created,
        "model": model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "top_p": request.top_p,
        "truncation": "disabled",
    }


async def _stream(generation: Generation, builder: ResponseBuilder, *, wants_route: bool) -> AsyncGenerator[bytes, None]:
    is_begun = False
    try:
        async with contextlib.aclosing(aiter(generation)) as updates:
            async for update in updates:
                opening = [] if is_begun else builder.begin()
                is_begun = True
                data = _encode([*opening, *builder.update(update)])
                if data:
                    yield data
    except ServingError as exc:
        if not is_begun:
            raise
        yield _encode([builder.fail(exc)])
        return
    if wants_route:
        builder.response["tandem_route"] = route_of(generation.outcome)
    yield _encode(builder.end(generation.outcome))


def _encode(events: Iterable[dict[str, Any]]) -> bytes:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event, separators=COMPACT)}\n\n" for event in events).encode()
