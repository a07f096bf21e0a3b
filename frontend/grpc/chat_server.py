"""The gRPC server of `tandem.chat.v1.Chat`, beside HTTP in the same process: the same keys, limits, drain and generation.

Owns its port and the translation of updates into messages. Started and closed by `frontend.http.app`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from common.errors import ConfigError, OverloadedError, ServingError
from common.proto import chat_pb2, chat_pb2_grpc, router_pb2, types_pb2
from common.tls import Tls, TlsFiles
from frontend.chat_format import ContentDelta, Event, Finish, ReasoningDelta, ToolCallArguments, ToolCallStart
from frontend.generation import Generation, Job, Outcome
from frontend.grpc.chat_request import chat_input, router_request
from frontend.http.errors import HttpError
from frontend.http.service import Service
from frontend.http.shape import MessageJoiner, new_id
from frontend.settings import FrontendSettings

logger = logging.getLogger(__name__)
_SERVICE = chat_pb2.DESCRIPTOR.services_by_name["Chat"].full_name
_MAX_LABEL_BYTES = 128
_STATUS = {401: grpc.StatusCode.UNAUTHENTICATED, 404: grpc.StatusCode.NOT_FOUND, 413: grpc.StatusCode.RESOURCE_EXHAUSTED}


class ChatServicer(chat_pb2_grpc.ChatServicer):
    """The one method."""

    def __init__(self, service: Service):
        self._service = service

    async def Complete(
        self, request: chat_pb2.CompleteRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[chat_pb2.CompleteResponse]:
        """See chat.proto. Ends with a status that fits the error."""
        error: ServingError
        try:
            async with contextlib.aclosing(self._complete(request, context)) as responses:
                async for response in responses:
                    yield response
            return
        except ServingError as exc:
            error = exc
        except Exception:  # the outermost loop of a call: the client gets a status, the log the trace
            logger.exception("a chat call failed unexpectedly")
            error = ServingError("internal error")
        retry = (("retry-after-ms", str(round(error.retry_after_s * 1e3))),) if isinstance(error, OverloadedError) else ()
        await context.abort(_status_of(error), str(error), retry)

    async def _complete(self, request: chat_pb2.CompleteRequest, context: grpc.aio.ServicerContext):
        service, generator = self._service, self._service.generator
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        caller = service.keys.caller(headers)
        label = request.request_id if 0 < len(request.request_id.encode()) <= _MAX_LABEL_BYTES else new_id("req_")
        async with contextlib.AsyncExitStack() as running:
            service.admit(running, caller)
            date = service.current_date()
            prompt = await generator.encode(lambda: generator.chat_format.render(chat_input(request, date)), request.ByteSize())
            priority = caller.priority_for(request.priority if request.HasField("priority") else None)
            stops = generator.chat_format.stop_token_ids
            router = router_request(request, prompt.token_ids, stops, request_id=label, priority=priority)
            remaining_s = context.time_remaining()
            timeout_s = service.settings.default_deadline_s if remaining_s is None else max(remaining_s, 1e-3)
            new_parser = functools.partial(generator.chat_format.reply_parser, prompt)
            generation = generator.start(Job(router, new_parser, tuple(request.sampling_params.stop), timeout_s))
            async for response in _responses(generation):
                yield response


async def _responses(generation: Generation) -> AsyncIterator[chat_pb2.CompleteResponse]:
    joiners: dict[int, MessageJoiner] = {}
    has_route = False
    async with contextlib.aclosing(aiter(generation)) as updates:
        async for update in updates:
            if not has_route and generation.outcome.decision is not None:
                has_route = True
                yield chat_pb2.CompleteResponse(route=generation.outcome.decision)
            for event in update.events:
                response = _response(event, joiners.setdefault(update.index, MessageJoiner()))
                if response is not None:
                    response.index = update.index
                    yield response
    yield chat_pb2.CompleteResponse(summary=_summary(generation.outcome))


def _response(event: Event, joiner: MessageJoiner) -> chat_pb2.CompleteResponse | None:
    match event:
        case ContentDelta():
            return chat_pb2.CompleteResponse(content=joiner.text(event))
        case ReasoningDelta():
            return chat_pb2.CompleteResponse(reasoning=joiner.text(event))
        case ToolCallStart(call_index, name, _):
            return chat_pb2.CompleteResponse(tool_call_start=chat_pb2.ToolCallStart(call_index=call_index, name=name))
        case ToolCallArguments(call_index, text):
            return chat_pb2.CompleteResponse(tool_call_arguments=chat_pb2.ToolCallArguments(call_index=call_index, text=text))
        case Finish():
            finish = chat_pb2.Finish(reason=event.reason, content_missing=event.is_content_missing, repairs=event.repairs)
            return chat_pb2.CompleteResponse(finish=finish)
    return None


def _summary(outcome: Outcome) -> chat_pb2.Summary:
    usage = types_pb2.Usage(
        prompt_tokens=outcome.prompt_tokens, completion_tokens=outcome.completion_tokens, cached_tokens=outcome.cached_tokens
    )
    route = outcome.report or router_pb2.RouteReport(decision=outcome.decision)
    return chat_pb2.Summary(usage=usage, reasoning_tokens=outcome.reasoning_tokens, route=route)


def _status_of(error: ServingError) -> grpc.StatusCode:
    if isinstance(error, HttpError):
        return _STATUS.get(error.status, grpc.StatusCode.INVALID_ARGUMENT)
    return grpc.StatusCode[error.grpc_status]


async def start_chat_server(service: Service, listen: str) -> tuple[grpc.aio.Server, int]:
    """Returns: the running server and its port. Raises: ConfigError if the address or the certificate can't be had."""
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", service.settings.max_body_bytes), ("grpc.so_reuseport", 0)))
    chat_pb2_grpc.add_ChatServicer_to_server(ChatServicer(service), server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((_SERVICE, reflection.SERVICE_NAME), server)
    try:
        port = _bind(server, listen, service.settings)
    except (RuntimeError, OSError) as exc:
        raise ConfigError(f"can't listen on {listen} for gRPC: {exc}") from exc
    for name in ("", _SERVICE):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    return server, port


def _bind(server: grpc.aio.Server, listen: str, settings: FrontendSettings) -> int:
    if settings.certificate is None:
        return server.add_insecure_port(listen)
    cert, key = settings.certificate
    files = TlsFiles(settings.client_ca_file or cert, cert, key, "all" if settings.client_ca_file else "none")
    return server.add_secure_port(listen, Tls(files).server_credentials(internal=False))
