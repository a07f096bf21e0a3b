"""What the event loop (service, mailboxes, fences) asks of a decode group's engine thread.

Futures are set by the engine, by way of `answer` and `refuse`: the one who waits may have cancelled in any moment.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from common.errors import ServingError
from common.proto import types_pb2, worker_pb2

T = TypeVar("T")


@dataclass(frozen=True)
class Reserve:
    work: worker_pb2.Work
    router_id: str
    writer: types_pb2.GroupDescription
    done: Future[worker_pb2.Reservation] = field(default_factory=Future)


@dataclass(frozen=True)
class Renew:
    transfer_ids: list[int]
    done: Future[list[int]] = field(default_factory=Future)


@dataclass(frozen=True)
class Commit:
    request: worker_pb2.CommitRequest
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True)
class Abandon:
    transfer_id: int


@dataclass(frozen=True)
class Abort:
    """`done`: whether the request was here."""

    internal_id: str
    reason: str
    done: Future[bool] = field(default_factory=Future)


@dataclass(frozen=True)
class WriterStopped:
    """A prefill group has promised not to write for this transfer any more."""

    transfer_id: int


@dataclass(frozen=True)
class WritersDied:
    """Every process of these prefill groups is known to be gone."""

    incarnations: list[int]


@dataclass(frozen=True)
class RouterGone:
    """A router stayed away for a whole lease: nobody reads its requests' tokens."""

    router_id: str


@dataclass(frozen=True)
class Drain:
    drain: bool


@dataclass(frozen=True)
class ShutDown:
    pass


Command = Reserve | Renew | Commit | Abandon | Abort | WriterStopped | WritersDied | RouterGone | Drain | ShutDown


def answer(done: Future[T], result: T) -> None:
    """Sets the result, unless nobody waits for it any more."""
    if done.set_running_or_notify_cancel():
        done.set_result(result)


def refuse(done: Future, error: ServingError) -> None:
    """Sets the error, unless nobody waits for it any more."""
    if done.set_running_or_notify_cancel():
        done.set_exception(error)
