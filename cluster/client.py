"""Client side of the router and the controller for the CLI: finds their addresses, turns gRPC errors into ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from cluster.credentials import client_wire
from cluster.state import load_state
from common.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    NotSupportedError,
    ServingError,
    WorkerLost,
)
from common.proto import control_pb2_grpc, router_pb2_grpc

_ERRORS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAVAILABLE: WorkerLost,
    grpc.StatusCode.UNIMPLEMENTED: NotSupportedError,
    grpc.StatusCode.NOT_FOUND: ConfigError,
    grpc.StatusCode.FAILED_PRECONDITION: ConfigError,
    grpc.StatusCode.UNAUTHENTICATED: ConfigError,
    grpc.StatusCode.PERMISSION_DENIED: ConfigError,
}


def router_address(name: str, given: str | None) -> str:
    """`given`, else the address that `tandem up` left behind.

    Raises: ConfigError if there is none
    """
    if given:
        return given
    state = load_state(name)
    if state is None or state.router_address is None:
        raise ConfigError(f"no cluster {name!r} is up on this machine; give --router host:port")
    return state.router_address


@contextmanager
def router_stub(name: str, given: str | None) -> Iterator[router_pb2_grpc.RouterStub]:
    """Raises: ServingError of the kind that fits a gRPC status"""
    wire = client_wire(name)
    with wire.blocking_channel(router_address(name, given)) as channel, mapped_errors():
        yield wire.stub(router_pb2_grpc.RouterStub(channel))


@contextmanager
def controller_stub(name: str, given: str | None) -> Iterator[control_pb2_grpc.DirectoryStub]:
    """`given`: host:port of the controller's directory; None = the one of this machine's cluster `name`.

    Raises: ConfigError if there is none; ServingError of the kind that fits a gRPC status
    """
    if given is None:
        state = load_state(name)
        if state is None or state.controller_address is None:
            raise ConfigError(f"no cluster {name!r} is up on this machine; give --controller host:port")
        given = state.controller_address
    wire = client_wire(name)
    with wire.blocking_channel(given) as channel, mapped_errors():
        yield wire.stub(control_pb2_grpc.DirectoryStub(channel))


@contextmanager
def mapped_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as exc:
        code, details = exc.code(), exc.details() or exc.code().name
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            field, _, message = details.partition(": ")
            raise InvalidRequestError(field, message) from exc
        raise _ERRORS.get(code, ServingError)(details) from exc
