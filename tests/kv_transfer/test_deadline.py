"""A deadline that is cut takes the deadlines of its parts along: an abort must not wait for a probe or a join under way."""

from __future__ import annotations

import threading

import pytest

from common.errors import TransferTimeout
from kv_transfer.deadline import Deadline
from kv_transfer.transports.choose import LinkOpener
from tests.support.pace import within


def test_a_part_ends_with_itself_or_with_the_whole():
    whole = Deadline(60.0)
    part = whole.part(5.0)
    assert 4.0 < part.left_s() <= 5.0
    assert 1.0 < Deadline(2.0).part(5.0).left_s() <= 2.0
    whole.cut(-1.0)
    with pytest.raises(TransferTimeout):
        part.check("probing")


class StalledLink:
    """Its probe waits for a peer that says nothing, in slices, as a socket does."""

    def __init__(self):
        self.is_probing, self._never = threading.Event(), threading.Event()

    def probe(self, deadline):
        self.is_probing.set()
        while True:
            deadline.check("waiting for an answer")
            self._never.wait(0.01)


def test_a_cut_ends_a_probe_under_way():
    link, whole, ended = StalledLink(), Deadline(60.0), threading.Event()

    def measure():
        with pytest.raises(TransferTimeout):
            LinkOpener._measure(None, link, whole)
        ended.set()

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    assert link.is_probing.wait(within(5.0))
    whole.cut(0.1)
    assert ended.wait(within(1.0))
    thread.join()
