"""The way of a first token through a frontend, leg by leg: stamps around the frontend's own objects, and what they come to.

A request is stamped where it passes between the frontend and what is outside of it, in the frontend's process and on both sides of it, with
CLOCK_MONOTONIC. The frontend's code knows nothing of it. Used by `benchmarks.frontend`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from benchmarks.frontend_load import Stream
from common.proto import router_pb2
from frontend.http.app import FrontendApp
from frontend.router_link import RouterLink, RouterStream

POINTS = ("connecting", "sent", "admitted", "rendered", "to_wire", "at_router", "from_router", "off_wire", "answered", "arrived", "read")
LEGS = {  # ends of each leg among the points, and whether it is the frontend's
    "client: connect": ("connecting", "sent", False),
    "request sent -> ASGI app called (accept, HTTP)": ("sent", "admitted", True),
    "-> rendered (JSON, checks, token ids)": ("admitted", "rendered", True),
    "-> gRPC write begins": ("rendered", "to_wire", True),
    "-> router has it (gRPC of both, router's wake-up)": ("to_wire", "at_router", True),
    "router: request to its first token's write": ("at_router", "from_router", False),
    "-> gRPC read returns (gRPC of both)": ("from_router", "off_wire", True),
    "-> first content to ASGI send (parser, SSE)": ("off_wire", "answered", True),
    "-> in the client's kernel (HTTP, socket)": ("answered", "arrived", True),
    "client: kernel to its read": ("arrived", "read", False),
}


@dataclass
class Stamps:
    """What a frontend's process has stamped [s]: by the request id that the client gave, and by call id on the router's stream."""

    admitted: dict[str, float] = field(default_factory=dict)
    rendered: dict[str, float] = field(default_factory=dict)
    answered: dict[str, float] = field(default_factory=dict)
    to_wire: dict[int, float] = field(default_factory=dict)
    off_wire: dict[int, float] = field(default_factory=dict)
    call_ids: dict[str, int] = field(default_factory=dict)


class StampedApp:
    """The frontend's application, stamped where uvicorn calls it and where it sends the first piece of a body."""

    def __init__(self, app: FrontendApp, stamps: Stamps):
        self.state = app.state
        self._app = app
        self._stamps = stamps

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = next(value.decode() for name, value in scope["headers"] if name == b"x-request-id")
        self._stamps.admitted[request_id] = monotonic()
        answered = self._stamps.answered

        async def stamped(message: Any) -> None:
            if request_id not in answered and message["type"] == "http.response.body":
                answered[request_id] = monotonic()
            await send(message)

        await self._app(scope, receive, stamped)


class StampedCall:
    """The gRPC stream to the router, stamped where a request is given to it and where a call's first event comes out."""

    def __init__(self, call: Any, stamps: Stamps):
        self.cancel, self.cancelled = call.cancel, call.cancelled
        self._call = call
        self._stamps = stamps

    async def write(self, frame: router_pb2.GenerateManyRequest) -> None:
        now_s = monotonic()
        for item in frame.items:
            if item.HasField("start"):
                self._stamps.to_wire[item.call_id] = now_s
                self._stamps.call_ids[router_pb2.GenerateRequest.FromString(item.start.request).request_id] = item.call_id
        await self._call.write(frame)

    async def read(self) -> Any:
        frame = await self._call.read()
        now_s = monotonic()
        for event in getattr(frame, "events", ()):
            self._stamps.off_wire.setdefault(event.call_id, now_s)
        return frame


class StampedLink(RouterLink):
    """The frontend's end of the stream, stamped where a rendered request reaches it."""

    def __init__(self, stamps: Stamps, call: Any):
        super().__init__(StampedCall(call, stamps))  # type: ignore[arg-type]
        self._stamps = stamps

    def start(self, request: router_pb2.GenerateRequest, *, timeout_s: float, traceparent: str = "") -> RouterStream:
        self._stamps.rendered[request.request_id] = monotonic()
        return super().start(request, timeout_s=timeout_s, traceparent=traceparent)


def points_s(number: int, stream: Stream, stamps: Stamps, router_s: dict[int, tuple[float, float]]) -> dict[str, float]:
    """The stamps of request `number` in the order of `POINTS` [s]."""
    request_id = str(number)
    call_id = stamps.call_ids[request_id]
    ways = (stream.begun_s, stream.sent_s, stamps.admitted[request_id], stamps.rendered[request_id], stamps.to_wire[call_id])
    back = (stamps.off_wire[call_id], stamps.answered[request_id], stream.arrived_s, stream.read_s)
    return dict(zip(POINTS, (*ways, *router_s[call_id], *back), strict=True))


def legs_ms(points: dict[str, float]) -> dict[str, float]:
    """Length of each leg of one request."""
    return {name: (points[end] - points[begin]) * 1e3 for name, (begin, end, _) in LEGS.items()}


def summary(requests: list[dict[str, float]]) -> dict:
    """Of the legs of all requests: each leg, the frontend's own sum and the client's.

    `slowest_ms`: mean of the leg over the 2% of the requests with the largest own sum; it tells which leg makes the tail.
    """
    own = [sum(legs[name] for name, (_, _, is_own) in LEGS.items() if is_own) for legs in requests]
    slowest = sorted(range(len(requests)), key=own.__getitem__)[-max(1, len(requests) // 50) :]
    table = {}
    for name in LEGS:
        values = [legs[name] for legs in requests]
        table[name] = {**_percentiles(values), "slowest_ms": sum(values[i] for i in slowest) / len(slowest)}
    return {"own": _percentiles(own), "seen_by_client": _percentiles([sum(legs.values()) for legs in requests]), "legs": table}


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}_ms": ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))] for share in (50, 90, 99)} | {
        "max_ms": ordered[-1]
    }


def table_of(run: dict) -> str:
    """`summary`'s figures as text, one line per leg; an asterisk marks the frontend's own."""
    rows = [(f"{'*' if LEGS[name][2] else ' '} {name}", leg) for name, leg in run["legs"].items()]
    rows += [("* the frontend's own", run["own"]), ("  seen by the client", run["seen_by_client"])]
    keys = ("p50_ms", "p90_ms", "p99_ms", "max_ms", "slowest_ms")
    lines = [f"{'':56}" + "".join(f"{key:>12}" for key in keys)]
    for name, figures in rows:
        lines.append(f"{name:56}" + "".join(f"{figures[key]:12.3f}" if key in figures else f"{'':12}" for key in keys))
    return "\n".join(lines)


def pooled(rounds: list[list[dict[str, float]]]) -> dict:
    """`summary` of all rounds together, and each round's own p99."""
    each = [summary(requests)["own"]["p99_ms"] for requests in rounds]
    return {"samples": sum(map(len, rounds)), "own_p99_ms_of_rounds": each, **summary(list(itertools.chain(*rounds)))}
