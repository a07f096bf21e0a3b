"""What a router holds is what runs: nothing of a request that has ended waits for the collector."""

from __future__ import annotations

import gc
from collections import Counter

from cluster.router.attempt import Attempt
from cluster.router.job import Job
from cluster.router.streams import ClientStream
from cluster.router.waiter import Waiter
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup
from tests.support.router_bed import bed, request_of, until

OF_A_REQUEST = (Attempt, Job, ClientStream, Waiter)


def left() -> Counter[str]:
    """By type itself: some objects of other packages answer to `isinstance` with a warning."""
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in OF_A_REQUEST)


async def test_a_request_that_has_ended_leaves_nothing_for_the_collector():
    async with bed(FakePrefillGroup("p", "p0"), FakeDecodeGroup("d", "d0")) as b:
        gc.collect()
        gc.disable()  # what refers to itself stays from now on
        try:
            for n in range(20):
                await b.generate(request_of(max_tokens=4, request_id=f"r{n}"))
            # the last one stays in the hands of who read its last frame; a prefill call may take a moment to end after its request
            await until(lambda: max(left().values(), default=0) <= 1)
        finally:
            gc.enable()
