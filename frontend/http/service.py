"""What every endpoint shares: reading and admitting a request, running it until the client leaves, ending it once.

Owns the count of running requests, the drain, and the one place where an unexpected error is logged and answered. The
endpoints only translate. Made by `frontend.http.app`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from common.errors import OverloadedError, ServingError, WorkerLost
from common.tracing import make_tracing
from frontend import trace
from frontend.generation import Generator, Outcome
from frontend.http.auth import Caller, Keys
from frontend.http.disconnect import ClientGone, run_until_disconnect
from frontend.http.errors import HttpError, error_response, status_and_body
from frontend.http.fields import RequestModel
from frontend.http.sampling import ServingHeaders, read_headers
from frontend.http.shape import new_id, route_headers
from frontend.http.sse import EventStream
from frontend.settings import FrontendSettings

logger = logging.getLogger(__name__)
_LARGE_BODY_BYTES = 32 << 10
_Request = TypeVar("_Request", bound=RequestModel)
_LABEL = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class Call:
    """One admitted HTTP request. `created`: Unix time [s]; `cleanup` runs when the last byte is sent or given up."""

    request_id: str
    caller: Caller
    headers: ServingHeaders
    body: bytes
    created: int
    cleanup: contextlib.AsyncExitStack


Endpoint = Callable[["Service", Call], Coroutine[Any, Any, Response]]


class Service:
    """State of one frontend process."""

    def __init__(self, settings: FrontendSettings, generator: Generator, keys: Keys):
        self.settings = settings
        self.generator = generator
        self.keys = keys
        self.metrics = generator.metrics
        self.tracing = make_tracing(settings.tracing, "frontend")
        self.is_draining = False
        self._num_running = 0
        self._model: str | None = None

    async def answer(self, request: Request, path: str, handle: Endpoint) -> Response:
        """Admits a request, runs `handle`, maps what it raises, counts. Never raises."""
        request_id = _request_id(request)
        response = await self._answer(request, path, request_id, handle)
        response.headers["x-request-id"] = request_id
        self.metrics.requests.labels(path, str(response.status_code)).inc()
        return response

    async def parse(self, model: type[_Request], body: bytes) -> _Request:
        """The checked request; a large body is read in a thread, so that the loop goes on. Raises: as `RequestModel.parse`."""
        if len(body) <= _LARGE_BODY_BYTES:
            return model.parse(body)
        return await self.generator.encode(functools.partial(model.parse, body), len(body))

    async def model_name(self, wanted: str | None = None) -> str:
        """The name to answer with. Raises: HttpError 404 if `wanted` is not served here."""
        names = await self.model_names()
        if wanted is not None and wanted not in names:
            raise HttpError(404, f"model {wanted[:100]!r} is not served here; {', '.join(names)} is", code="model_not_found", param="model")
        return wanted or names[0]

    async def model_names(self) -> tuple[str, ...]:
        """Names that requests may give: the configured ones, else the router's. Raises: ServingError if it is away."""
        if self.settings.model_names:
            return self.settings.model_names
        if self._model is None:
            self._model = (await self.generator.router.model_info()).model
        short = self._model.rstrip("/").rsplit("/", 1)[-1]
        return (short,) if short == self._model else (short, self._model)

    def current_date(self) -> str | None:
        """Today in UTC as YYYY-MM-DD, if prompts are to hold it."""
        return datetime.datetime.now(datetime.UTC).date().isoformat() if self.settings.includes_date else None

    def drain(self) -> None:
        """From now on new requests are refused; running ones go on for at most `settings.drain_s`."""
        self.is_draining = True

    def end_running(self) -> None:
        """Ends every running reply with an error that its client gets."""
        count = self.generator.router.fail_all(WorkerLost("the frontend is shutting down"))
        if count:
            logger.warning("shutdown ended %d running replies after %.0f s", count, self.settings.drain_s)

    async def _answer(self, request: Request, path: str, request_id: str, handle: Endpoint) -> Response:
        cleanup = contextlib.AsyncExitStack()
        try:
            caller = self.keys.caller(request.headers)
            headers = read_headers(request.headers)
            self.admit(cleanup, caller)
            trace.begin(self.tracing, request.headers, path, request_id, cleanup)
            body = await self._read_body(request)
            call = Call(request_id, caller, headers, body, int(time.time()), cleanup)
            response = await run_until_disconnect(request.receive, handle(self, call))
        except ServingError as exc:
            await cleanup.aclose()
            if status_and_body(exc)[0] >= 500:
                logger.warning("request %s failed: %s", request_id, exc)
            return error_response(exc, path)
        except ClientGone:
            await cleanup.aclose()
            self.metrics.disconnects.inc()
            return Response(status_code=499)  # nobody reads it; nginx's status for metrics
        except Exception:  # the outermost loop: whatever it is, the client gets an answer and the log the trace
            await cleanup.aclose()
            logger.exception("request %s failed unexpectedly", request_id)
            return error_response(ServingError("internal error", request_id=request_id))
        except BaseException:
            await cleanup.aclose()
            raise
        if not isinstance(response, EventStream):
            await cleanup.aclose()
        return response

    def admit(self, cleanup: contextlib.AsyncExitStack, caller: Caller) -> None:
        """Counts a request until `cleanup` runs. Raises: WorkerLost while draining, OverloadedError beyond a limit."""
        if self.is_draining:
            raise WorkerLost("the frontend is shutting down")
        if self._num_running >= self.settings.max_streams:
            raise OverloadedError(f"{self._num_running} requests are running, at most {self.settings.max_streams} are taken")
        cleanup.enter_context(self.keys.running(caller))
        self._num_running += 1
        self.metrics.running.inc()
        cleanup.callback(self._release)

    def _release(self) -> None:
        self._num_running -= 1
        self.metrics.running.dec()

    async def _read_body(self, request: Request) -> bytes:
        most = self.settings.max_body_bytes
        too_large = HttpError(413, f"the body is larger than {most} bytes", code="request_too_large")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with contextlib.aclosing(request.stream()) as stream:
                async for part in stream:
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except ClientDisconnect:
            raise ClientGone from None
        return b"".join(parts)


async def event_stream(service: Service, call: Call, events: AsyncGenerator[bytes, None], outcome: Outcome) -> Response:
    """A streaming answer, once its first event exists: what fails before it still has a status of its own.

    The call stays admitted until the stream's end. Raises: ServingError from the first event.
    """
    first = await anext(events)
    return EventStream(
        first,
        events,
        route_headers(outcome),
        call.cleanup,
        on_disconnect=service.metrics.disconnects.inc,
        stalled_s=service.settings.stalled_client_s,
    )


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if _LABEL.fullmatch(given) else new_id("req_")
