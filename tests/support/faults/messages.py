"""Faults of control messages: a client interceptor that loses, delays, repeats, cuts or flips the calls between groups."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tests.support.faults.plan import FaultPlan


class FaultyCalls(grpc.aio.UnaryUnaryClientInterceptor):
    """A lost answer looks to the caller like a lost call; calls that overtake each other are reordered by being delayed."""

    def __init__(self, plan: FaultPlan):
        self._plan = plan

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        method = client_call_details.method
        method = (method.decode() if isinstance(method, bytes) else method).rpartition("/")[2]
        kind = self._plan.draw(method)
        match kind:
            case "drop" if self._plan.below(2):
                raise _unavailable("the call was lost")
            case "drop":
                await (await continuation(client_call_details, request))
                raise _unavailable("the answer was lost")
            case "delay" | "reorder":
                await asyncio.sleep(self._plan.delay_s())
            case "duplicate":
                await asyncio.wait((asyncio.ensure_future(_answer(continuation, client_call_details, request)),))
            case "truncate" | "flip":
                spoilt = _spoilt(request, kind, self._plan)
                if spoilt is None:
                    raise _unavailable("the message could not be read")
                request = spoilt
        return await continuation(client_call_details, request)


async def _answer(continuation: Any, details: Any, request: Any) -> None:
    try:
        await (await continuation(details, request))
    except grpc.RpcError:
        return


def _spoilt(request: Any, kind: str, plan: FaultPlan) -> Any:
    """The message as it would be read at the other end, None if it can't be."""
    data = bytearray(request.SerializeToString())
    if not data:
        return request
    if kind == "truncate":
        data = data[: plan.below(len(data))]
    else:
        data[plan.below(len(data))] ^= 1 << plan.below(8)
    try:
        return type(request).FromString(bytes(data))
    except (DecodeError, UnicodeDecodeError):
        return None


def _unavailable(text: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=text)
