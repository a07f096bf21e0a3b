"""Runs one request against the router and turns its responses into updates of choices.

Owns the request's way from a rendered prompt to its last event, and what is known of it at the end (usage, route). HTTP
is `frontend.http`'s. Rendering of large bodies runs in threads: the encoder releases the GIL, so the event loop stays free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from common.errors import ServingError, WorkerLost
from common.proto import router_pb2, types_pb2
from frontend.chat_format import ChatFormat, Finish, FinishReason, ReplyParser
from frontend.choice import Choice, ChoiceUpdate
from frontend.metrics import FrontendMetrics
from frontend.router_client import RouterClient
from frontend.router_link import RouterStream
from frontend.trace import TRACEPARENT

SMALL_BODY_BYTES = 4096  # rendered in a millisecond or so, whatever they hold

_T = TypeVar("_T")


@dataclass(frozen=True)
class Job:
    """One request to run. `new_parser` makes the parser of a choice; `stops` act on visible text, in the frontend."""

    request: router_pb2.GenerateRequest
    new_parser: Callable[[], ReplyParser]
    stops: Sequence[str] = ()
    timeout_s: float = 600.0


@dataclass
class Outcome:
    """What is known of a request so far. `decision`: as sent ahead by the router; `report`: with what it took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    decision: router_pb2.RouteDecision | None = None
    report: router_pb2.RouteReport | None = None
    repairs: dict[str, int] = field(default_factory=dict)


class Generation:
    """A running job: iterate it once for updates; `outcome` is complete afterwards."""

    def __init__(self, router: RouterClient, metrics: FrontendMetrics, job: Job):
        self._router = router
        self._metrics = metrics
        self._job = job
        self._traceparent = TRACEPARENT.get()
        params = job.request.sampling_params
        self._choices = [Choice(i, job.new_parser(), job.stops) for i in range(params.n if params.HasField("n") else 1)]
        self._num_open = len(self._choices)
        self._counted: dict[int, int] = {}
        self.outcome = Outcome(prompt_tokens=len(job.request.tokenized.input_ids))

    async def __aiter__(self) -> AsyncGenerator[ChoiceUpdate, None]:
        """Updates, each choice ending with one that holds `Finish`. Raises: ServingError from the router."""
        started = time.monotonic()
        self._metrics.prompt_tokens.inc(self.outcome.prompt_tokens)
        stream = self._router.generate(self._job.request, timeout_s=self._job.timeout_s, traceparent=self._traceparent)
        is_first = True
        try:
            while self._num_open:
                responses = await self._take(stream)
                if not responses:
                    for choice in self._choices:
                        if not choice.is_finished:
                            yield self._note_finish(choice.finish("stop"))
                    break
                if is_first:
                    is_first = False
                    self._metrics.ttft.observe(time.monotonic() - started)
                    if stream.route:
                        self.outcome.decision = router_pb2.RouteDecision.FromString(stream.route)
                for response in responses if len(responses) == 1 else _joined(responses):
                    update = self._on_response(response)
                    if update is not None:
                        yield update
        finally:
            stream.cancel()
            self._metrics.output_tokens.inc(sum(choice.num_tokens for choice in self._choices))
            self.outcome.completion_tokens = sum(self._counted.get(c.index, c.num_tokens) for c in self._choices)

    async def _take(self, stream: RouterStream) -> list[router_pb2.GenerateResponse]:
        """The next responses; none at an end after the last token of every choice: those are answers, however the stream ended.

        Raises: ServingError from the router, or WorkerLost, while a reply is not complete
        """
        is_complete = all(choice.is_satisfied for choice in self._choices)
        try:
            responses = await stream.take()
        except ServingError:
            if is_complete:
                return []
            raise
        if not responses and not is_complete:
            raise WorkerLost("the router ended the stream before the reply was complete")
        return responses

    def _on_response(self, response: router_pb2.GenerateResponse) -> ChoiceUpdate | None:
        chunk = response.chunk
        token_ids = chunk.token_ids
        if not token_ids:
            return self._on_complete(response.complete) if response.HasField("complete") else None
        if chunk.index >= len(self._choices):
            return None
        choice = self._choices[chunk.index]
        if choice.is_satisfied:  # the engine runs on past the end of the reply: nothing of that is ours
            return self._note_finish(choice.finish("stop"))
        update = choice.feed(token_ids, chunk.logprobs)
        return self._note_finish(update) if choice.is_finished else update

    def _on_complete(self, complete: router_pb2.GenerateComplete) -> ChoiceUpdate | None:
        if complete.HasField("route"):
            self.outcome.report = complete.route
        self.outcome.cached_tokens = max(self.outcome.cached_tokens, complete.usage.cached_tokens)
        if complete.index >= len(self._choices):
            return None
        choice = self._choices[complete.index]
        self._counted[choice.index] = complete.usage.completion_tokens
        matched = complete.finish_reason
        if matched.HasField("stop_token_id") and not choice.is_satisfied:  # an engine that keeps stop tokens to itself
            choice.feed((matched.stop_token_id,))
        is_length = matched.reason == types_pb2.FINISH_REASON_LENGTH
        reason: FinishReason = "length" if is_length else "stop"
        return self._note_finish(choice.finish(reason))

    def _note_finish(self, update: ChoiceUpdate) -> ChoiceUpdate:
        """Counts what the choice's last event tells; harmless for any other update."""
        last = update.events[-1] if update.events else None
        if isinstance(last, Finish):
            self._num_open -= 1
            self.outcome.reasoning_tokens += last.num_reasoning_tokens
            if last.is_content_missing:
                self._metrics.content_missing.inc()
            for kind, count in last.repairs.items():
                self._metrics.repairs.labels(kind).inc(count)
                self.outcome.repairs[kind] = self.outcome.repairs.get(kind, 0) + count
        return update


def _joined(responses: list[router_pb2.GenerateResponse]) -> list[router_pb2.GenerateResponse]:
    """The same with neighbouring chunks of one choice joined: several tokens that came together go out together."""
    out: list[router_pb2.GenerateResponse] = []
    for response in responses:
        last = out[-1] if out else None
        if last is not None and last.HasField("chunk") and response.HasField("chunk") and last.chunk.index == response.chunk.index:
            last.chunk.token_ids.extend(response.chunk.token_ids)
            last.chunk.logprobs.extend(response.chunk.logprobs)
        else:
            out.append(response)
    return out


class Generator:
    """Starts jobs; one per process, shared by all requests."""

    def __init__(self, router: RouterClient, chat_format: ChatFormat, metrics: FrontendMetrics, *, encoder_threads: int = 4):
        self.router = router
        self.chat_format = chat_format
        self.metrics = metrics
        self._threads = ThreadPoolExecutor(encoder_threads, thread_name_prefix="encode")

    async def encode(self, work: Callable[[], _T], body_bytes: int) -> _T:
        """Runs CPU-bound rendering or encoding of a body; of a large one in a thread, so that the loop goes on. A small one waits for no
        large ones. Raises what `work` raises."""
        started = time.monotonic()
        try:
            if body_bytes <= SMALL_BODY_BYTES:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.metrics.render.observe(time.monotonic() - started)

    def start(self, job: Job) -> Generation:
        """A generation that begins when it is iterated."""
        return Generation(self.router, self.metrics, job)

    def close(self) -> None:
        """Waits for no one; threads end with their current piece of work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
