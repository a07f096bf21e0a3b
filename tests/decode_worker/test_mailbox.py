"""What routers get: every token once in order, whatever happens to their streams; and what happens to routers that stay away."""

import asyncio
import random

from common.proto import types_pb2, worker_pb2
from decode_worker.mailbox import Mailboxes
from tests.support.pace import within

LOAD = types_pb2.GroupLoad(running=1)


def output(internal_id: str, first: int, *tokens: int, finish: bool = False) -> worker_pb2.SequenceOutput:
    message = worker_pb2.SequenceOutput(internal_id=internal_id, first_index=first, token_ids=tokens)
    if finish:
        message.finish.reason = types_pb2.FINISH_REASON_LENGTH
    return message


class Router:
    """Reads frames, and drops by index what it has, as a router does."""

    def __init__(self, boxes: Mailboxes, name: str = "a"):
        self.boxes, self.name = boxes, name
        self.tokens: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.frames: list[worker_pb2.StepFrame] = []
        self.task: asyncio.Task | None = None

    def connect(self) -> None:
        self.task = asyncio.create_task(self._read())

    async def disconnect(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _read(self) -> None:
        async for frame in self.boxes.subscribe(self.name):
            self.frames.append(frame)
            for out in frame.outputs:
                mine = self.tokens.setdefault(out.internal_id, [])
                assert out.first_index <= len(mine), "tokens are missing"
                mine += out.token_ids[len(mine) - out.first_index :]
                if out.HasField("finish"):
                    self.finished.add(out.internal_id)


async def test_one_frame_per_step_while_the_router_keeps_up():
    boxes = Mailboxes(1.0, lambda _: None)
    router = Router(boxes)
    router.connect()
    await asyncio.sleep(0.01)
    for step in range(1, 6):
        boxes.publish(step, {"a": [output("x", step - 1, step), output("y", step - 1, 10 * step)], "b": []}, LOAD)
        await asyncio.sleep(0.002)
    assert [frame.step for frame in router.frames[1:]] == [1, 2, 3, 4, 5]
    assert all(len(frame.outputs) == 2 and frame.load == LOAD for frame in router.frames[1:])
    await router.disconnect()


async def test_steps_are_joined_when_the_router_is_slow_or_away_and_nothing_is_lost():
    """Streams break at random moments, frames that were under way are lost; the router has every token exactly once."""
    rng = random.Random(1)
    boxes = Mailboxes(5.0, lambda _: None)
    boxes.open("a")  # as the first Reserve does
    router = Router(boxes)
    router.connect()
    for step in range(300):
        last = step == 299
        boxes.publish(step, {"a": [output("x", step, step, finish=last)]}, LOAD)
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        if rng.random() < 0.05:
            await router.disconnect()
            for lost in router.frames[-2:]:  # sent, never arrived
                for out in lost.outputs:
                    router.tokens[out.internal_id] = router.tokens[out.internal_id][: out.first_index]
            router.connect()
    await asyncio.sleep(0.02)
    assert router.tokens["x"] == list(range(300))
    assert router.finished == {"x"}
    await router.disconnect()


async def test_routers_get_only_their_own():
    boxes = Mailboxes(1.0, lambda _: None)
    first, second = Router(boxes, "a"), Router(boxes, "b")
    for router in (first, second):
        router.connect()
    await asyncio.sleep(0.01)
    boxes.publish(1, {"a": [output("x", 0, 1)]}, LOAD)
    boxes.publish(2, {"b": [output("y", 0, 2)]}, LOAD)
    await asyncio.sleep(0.01)
    assert (first.tokens, second.tokens) == ({"x": [1]}, {"y": [2]})
    for router in (first, second):
        await router.disconnect()


async def test_ended_requests_are_repeated_for_a_lease_and_forgotten_then():
    boxes = Mailboxes(0.1, lambda _: None)
    router = Router(boxes)
    boxes.open("a")
    boxes.publish(1, {"a": [output("x", 0, 1, finish=True)]}, LOAD)
    router.connect()
    await asyncio.sleep(0.02)
    assert router.finished == {"x"}
    await asyncio.sleep(0.15)
    boxes.publish(2, {"a": [output("y", 0, 1)]}, LOAD)
    again = Router(boxes)
    again.connect()
    await asyncio.sleep(0.02)
    assert list(again.tokens) == ["y"]
    await again.disconnect()
    await router.disconnect()


async def test_router_is_absent_after_a_lease_without_subscription():
    absent = []
    boxes = Mailboxes(0.1, absent.append)
    never = boxes.open("never")
    assert boxes.open("never") is never
    kept, left = Router(boxes, "kept"), Router(boxes, "left")
    for router in (kept, left):
        router.connect()
    await asyncio.sleep(0.05)
    await left.disconnect()
    await asyncio.sleep(0.08)
    assert absent == ["never"]
    await asyncio.sleep(0.08)
    assert absent == ["never", "left"]
    await kept.disconnect()
    kept.connect()
    await asyncio.sleep(0.15)
    assert "kept" not in absent
    await kept.disconnect()


async def test_second_subscription_ends_the_first():
    boxes = Mailboxes(1.0, lambda _: None)
    first, second = Router(boxes), Router(boxes)
    first.connect()
    await asyncio.sleep(0.01)
    second.connect()
    await asyncio.wait_for(first.task, within(1))
    boxes.publish(1, {"a": [output("x", 0, 1)]}, LOAD)
    await asyncio.sleep(0.01)
    assert (first.tokens, second.tokens) == ({}, {"x": [1]})
    await second.disconnect()
