"""How a rank's loop starts and ends."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Iterator

import pytest

from model.rank_life import EXIT_FAILED, RankLife
from tests.support.pace import within


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_leaves_alone_what_a_rank_started_with():
    life, before, found = RankLife(), [object()], []

    def loop() -> None:
        during = [object()]
        looked_at = {id(one) for one in gc.get_objects()}
        found.extend((id(before) in looked_at, id(during) in looked_at))

    life.start(loop, lambda: None)
    assert life.wait_ended(within(5.0)) == ""
    assert found == [False, True]


def test_after_a_loop_that_failed_the_rest_is_cleaned_up_and_the_process_ends():
    exits: queue.SimpleQueue[int] = queue.SimpleQueue()
    life, cleaned = RankLife(exits.put), threading.Event()

    def loop() -> None:
        raise RuntimeError("the device is gone")

    life.start(loop, cleaned.set)
    assert "the device is gone" in life.wait_ended(within(5.0))
    assert cleaned.is_set()
    assert exits.get(timeout=within(5.0)) == EXIT_FAILED
