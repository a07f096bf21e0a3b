"""A plan is never overwritten before the device has copied it, however far the host is ahead."""

from __future__ import annotations

from kernels.flashinfer_plan import Planner


class SlowDevice:
    """A stream that does nothing until somebody waits for it, and a wrapper that plans as FlashInfer does: into one pinned buffer, whose
    copy it enqueues."""

    def __init__(self):
        self.pinned = None
        self.copied = []
        self._stream = []

    def plan(self, value):
        self.pinned = value
        self._stream.append(lambda: self.copied.append(self.pinned))

    def event(self):
        return Event(self._stream)

    def finish(self):
        Event(self._stream, len(self._stream)).synchronize()


class Event:
    def __init__(self, stream, place=0):
        self._stream, self._place = stream, place

    def record(self):
        self._place = len(self._stream)

    def synchronize(self):
        for step in range(self._place):
            work, self._stream[step] = self._stream[step], lambda: None
            work()


def test_every_plan_reaches_the_device_though_the_host_makes_them_all_at_once():
    device = SlowDevice()
    planner = Planner(device, device.event)
    for chunk in range(4):
        planner.plan(chunk)
    device.finish()
    assert device.copied == [0, 1, 2, 3]


def test_without_waiting_earlier_chunks_would_go_by_the_last_plan():
    device = SlowDevice()
    for chunk in range(4):
        device.plan(chunk)
    device.finish()
    assert device.copied == [3, 3, 3, 3]


def test_the_first_plan_waits_for_nothing_and_the_last_one_stands_in_the_stream():
    device = SlowDevice()
    Planner(device, device.event).plan(0)
    assert device.copied == []
