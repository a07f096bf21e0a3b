"""What routers have yet to get: one mailbox per router, and the watch over routers that stay away.

Lives on the leader's event loop; nothing here is touched from another thread. Producer: the engine, once per step, by way of
`DecodeService.publish`. Consumer: that router's Subscribe call.

A broken stream may have lost frames that were sent already. So a mailbox keeps the whole output of each live request, and of one that ended
less than a lease ago, and a new subscription begins with one frame of all that: the router drops what it has by `first_index`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable

from common.proto import types_pb2, worker_pb2


class Mailbox:
    """Outputs for one router."""

    def __init__(self, keep_ended_s: float):
        self._keep_ended_s = keep_ended_s
        self._history: dict[str, worker_pb2.SequenceOutput] = {}
        self._ended: dict[str, float] = {}  # internal id -> when, oldest first
        self._pending: list[worker_pb2.SequenceOutput] = []
        self._step = 0
        self._load = types_pb2.GroupLoad()
        self._changed = asyncio.Event()
        self.num_subscriptions = 0
        self.num_subscriptions = 0
        self.has_subscriber = False

    def put(self, step: int, outputs: Iterable[worker_pb2.SequenceOutput], load: types_pb2.GroupLoad, now_s: float) -> None:
        """Adds one step's outputs; `now_s` on any monotonic clock."""
        self._step, self._load = step, load
        for output in outputs:
            self._remember(output, now_s)
            if self.has_subscriber:
                self._pending.append(output)
        self._changed.set()

    async def frames(self) -> AsyncGenerator[worker_pb2.StepFrame, None]:
        """Frames from now on, the first one with everything live; steps that came while the router was slow are joined. A later
        subscription ends this one."""
        self._changed.set()  # ends the one before
        self._changed = changed = asyncio.Event()
        self.num_subscriptions += 1
        mine = self.num_subscriptions
        self.has_subscriber = True
        self._pending = []
        outputs = list(self._history.values())
        try:
            while mine == self.num_subscriptions:
                yield worker_pb2.StepFrame(step=self._step, outputs=outputs, load=self._load)
                await changed.wait()
                changed.clear()
                outputs, self._pending = self._pending, []
        finally:
            if mine == self.num_subscriptions:
                self.has_subscriber = False

    def _remember(self, output: worker_pb2.SequenceOutput, now_s: float) -> None:
        for internal_id, ended_s in list(self._ended.items()):
            if now_s - ended_s < self._keep_ended_s:
                break
            del self._ended[internal_id], self._history[internal_id]
        known = self._history.get(output.internal_id)
        if known is None:
            known = self._history[output.internal_id] = worker_pb2.SequenceOutput()
            known.CopyFrom(output)
        else:
            known.token_ids.extend(output.token_ids)
            known.logprobs.extend(output.logprobs)
            if output.HasField("finish"):
                known.finish.CopyFrom(output.finish)
            known.error_status, known.error_message = output.error_status, output.error_message
        if output.HasField("finish") or output.error_status:
            self._ended[output.internal_id] = now_s


class Mailboxes:
    """All routers' mailboxes. `on_absent(router_id)` is called when a router had no subscription for a whole lease."""

    def __init__(self, lease_s: float, on_absent: Callable[[str], None]):
        self._lease_s = lease_s
        self._on_absent = on_absent
        self._boxes: dict[str, Mailbox] = {}

    def open(self, router_id: str) -> Mailbox:
        """The router's mailbox, new if need be; its lease runs until it subscribes."""
        box = self._boxes.get(router_id)
        if box is None:
            box = self._boxes[router_id] = Mailbox(self._lease_s)
            self._expect(router_id, box)
        return box

    def publish(self, step: int, outputs: dict[str, list[worker_pb2.SequenceOutput]], load: types_pb2.GroupLoad) -> None:
        now_s = asyncio.get_running_loop().time()
        for router_id, mine in outputs.items():
            box = self._boxes.get(router_id)
            if box is not None:  # else it was absent for too long, and its requests are being aborted
                box.put(step, mine, load, now_s)

    async def subscribe(self, router_id: str) -> AsyncGenerator[worker_pb2.StepFrame, None]:
        box = self.open(router_id)
        try:
            async with contextlib.aclosing(box.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            if not box.has_subscriber:
                self._expect(router_id, box)

    def _expect(self, router_id: str, box: Mailbox) -> None:
        """Gives the router one lease from now to subscribe."""
        asyncio.get_running_loop().call_later(self._lease_s, self._check, router_id, box, box.num_subscriptions)

    def _check(self, router_id: str, box: Mailbox, num_subscriptions: int) -> None:
        if box.num_subscriptions == num_subscriptions and not box.has_subscriber and self._boxes.get(router_id) is box:
            del self._boxes[router_id]
            self._on_absent(router_id)
