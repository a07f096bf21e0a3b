"""The thread that carries out pushes for one decode rank, in order: digest, write, and at a transfer's end wait for the last ack.

One per destination, so that a peer that stalls holds up nobody else. Owns the link: makes it at the first push, drops it after an
error, and ends by itself when idle or when the peer is gone. Started by the sender, which puts work in `queue`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.errors import KVTransferError, PeerLost, ServingError
from kernels.digest import DigestKey, kv_digest
from kv_transfer.deadline import Deadline
from kv_transfer.outgoing import Outgoing
from kv_transfer.push import Push
from kv_transfer.transports.base import DeviceLink, Link

logger = logging.getLogger(__name__)

_TICK_S = 0.05  # while a dropped link has not settled
_WATCH_S = 1.0  # how often an idle peer looks whether the other side is gone


@dataclass(frozen=True)
class Job:
    """`push` None: the transfer's last job for this peer."""

    outgoing: Outgoing
    push: Push | None


class Peer:
    """One destination rank.

    Units: connect(deadline) makes a link; retire(peer) is asked when idle for idle_s and says whether the thread may end
    """

    def __init__(self, name: str, dst_rank: int, connect: Callable[[Deadline], Link], retire: Callable[[Peer], bool], idle_s: float):
        self.name = name
        self.queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._dst_rank = dst_rank
        self._connect = connect
        self._retire = retire
        self._idle_s = idle_s
        self.is_lost = False  # the other side was gone when it was last reached for
        self._link: Link | None = None
        self._current: Outgoing | None = None  # whose writes the link may still hold unacknowledged
        self._unsettled: list[tuple[Link, Outgoing]] = []
        self._ending: list[Outgoing] = []  # last job done, but a dropped link of theirs has not settled
        self._thread = threading.Thread(target=self._run, name=f"kv-push-{name}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            try:
                job = self.queue.get(timeout=_TICK_S if self._unsettled else _WATCH_S)
            except queue.Empty:
                self._settle()
                is_busy = bool(self._unsettled) or self._current is not None
                if not is_busy and self._is_idle(time.monotonic() - idle_since) and self._retire(self):
                    break
                continue
            if job is None:
                break
            if job.push is None:
                self._end(job.outgoing)
            else:
                self._push(job.outgoing, job.push)
                if self.queue.empty():
                    self._submit()
            self._settle()
            idle_since = time.monotonic()
        self._drop_link()

    def _is_idle(self, seconds: float) -> bool:
        if self._link is not None:
            self.is_lost = self._link.is_lost()
        return self.is_lost or seconds > self._idle_s

    def _push(self, outgoing: Outgoing, push: Push) -> None:
        if outgoing.error is not None:
            return
        if self._unsettled:
            outgoing.fail(PeerLost(f"{self.name} stalled on an earlier transfer that is not over yet"))
            return
        if self._current is not outgoing:
            self._flush()
            self._current = outgoing
        self._guard(outgoing, lambda: self._carry_out(outgoing, push))

    def _carry_out(self, outgoing: Outgoing, push: Push) -> None:
        if self._link is None:
            self._link = self._connect(outgoing.deadline)
        digest = 0 if isinstance(self._link, DeviceLink) else _digest(push, outgoing.digest_key)
        started_s = time.monotonic()
        self._link.write(push, outgoing.deadline)
        outgoing.used(self._link.transport, push.nbytes, time.monotonic() - started_s)
        outgoing.add(self._dst_rank, push.nbytes, digest)

    def _submit(self) -> None:
        link = self._link
        if self._current is not None and isinstance(link, DeviceLink):
            self._guard(self._current, link.submit)

    def _end(self, outgoing: Outgoing) -> None:
        if self._current is outgoing:
            self._flush()
        if any(owner is outgoing for _, owner in self._unsettled):
            self._ending.append(outgoing)
        else:
            outgoing.peer_ended()

    def _flush(self) -> None:
        """Waits for the acks of the current transfer, if any, and leaves none current."""
        current, self._current = self._current, None
        if current is not None and self._link is not None:
            link, started_s = self._link, time.monotonic()
            self._guard(current, lambda: self._await_acks(link, current))
            current.used(link.transport, 0, time.monotonic() - started_s)

    def _await_acks(self, link: Link, outgoing: Outgoing) -> None:
        link.flush(outgoing.deadline)
        if isinstance(link, DeviceLink):
            outgoing.add(self._dst_rank, 0, link.take_digest())

    def _guard(self, outgoing: Outgoing, operation: Callable[[], None]) -> None:
        try:
            operation()
        except ServingError as exc:
            self._fail(outgoing, exc)
        except Exception as exc:  # outermost loop of this thread: the transfer fails, the thread goes on
            logger.exception("kv transfer to %s: unexpected error", self.name)
            self._fail(outgoing, KVTransferError(f"push to {self.name}: {type(exc).__name__}: {exc}"))

    def _fail(self, outgoing: Outgoing, error: ServingError) -> None:
        outgoing.fail(error)
        self.is_lost = isinstance(error, PeerLost)
        self._current = None
        if self._link is not None:
            self._unsettled.append((self._link, outgoing))
            self._link = None

    def _settle(self) -> None:
        """Closes dropped links that can do no more harm, and ends the transfers that waited for that."""
        still = []
        for link, outgoing in self._unsettled:
            if link.settle():
                link.close()
            else:
                still.append((link, outgoing))
        self._unsettled = still
        ready = [outgoing for outgoing in self._ending if all(owner is not outgoing for _, owner in still)]
        self._ending = [outgoing for outgoing in self._ending if outgoing not in ready]
        for outgoing in ready:
            outgoing.peer_ended()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _digest(push: Push, key: DigestKey) -> int:
    return kv_digest(
        push.source[:, :, push.source_head : push.source_head + push.num_heads],
        torch.from_numpy(push.source_ids),
        first_logical=push.first_logical,
        tokens=push.tokens,
        layer=push.layer,
        first_head=push.first_head,
        key=key,
    )
