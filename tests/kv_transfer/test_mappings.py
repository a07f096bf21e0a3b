"""Memory of another process that several users of this process share: mapped once, unmapped after the last of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import NotSupportedError, TransferTimeout
from kv_transfer.deadline import Deadline
from kv_transfer.mappings import MappingTable
from tests.support.emulated_device import EmulatedDevice, EmulatedMapping
from tests.support.kv_groups import DecodeGroup, PrefillGroup, assert_handed_over, geometry, joined
from tests.support.pace import within

TOKENS = 80


def history(handle: bytes) -> list[str]:
    return [what for what, of in EmulatedMapping.history if of == handle]


def test_two_ranks_of_one_process_share_the_mapping_of_one_pool() -> None:
    before = len(EmulatedMapping.history)
    prefill, decode = PrefillGroup(geometry(2), 2, TOKENS, "cuda_ipc"), DecodeGroup(geometry(2), 1, ("cuda_ipc",))
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        assert [result.error for result in prefill.finish(1)] == [None, None]
        assert_handed_over(prefill, decode, 1)
        decode.release(1)
        prefill.senders[0].close()
        assert [what for what, _ in EmulatedMapping.history[before:]] == ["mapped"], "the other rank still writes"
    assert [what for what, _ in EmulatedMapping.history[before:]] == ["mapped", "unmapped"]


def test_it_is_unmapped_after_the_last_user_and_can_be_mapped_again() -> None:
    table, device = MappingTable(), EmulatedDevice()
    buffer = device.allocate(64)  # lives as long as its handle is used
    handle = buffer.handle()
    one, two = (table.open(device, handle, Deadline(5.0)) for _ in range(2))
    assert one.address == two.address
    one.close()
    one.close()
    assert history(handle) == ["mapped"], "one user that closes twice takes nothing from the other"
    two.close()
    assert history(handle) == ["mapped", "unmapped"]
    table.open(device, handle, Deadline(5.0)).close()
    assert history(handle) == ["mapped", "unmapped"] * 2


def test_handles_and_gpus_have_mappings_of_their_own() -> None:
    table, devices = MappingTable(), [EmulatedDevice(), EmulatedDevice()]
    devices[1].index = 1
    buffers = [devices[0].allocate(64) for _ in range(2)]
    users = [table.open(devices[0], buffer.handle(), Deadline(5.0)) for buffer in buffers]
    assert users[0].address != users[1].address
    with pytest.raises(NotSupportedError, match="already mapped"):  # asks this GPU, which the emulation does not tell apart
        table.open(devices[1], buffers[0].handle(), Deadline(5.0))
    for user in users:
        user.close()
    assert not {buffer.handle() for buffer in buffers} & EmulatedMapping.mapped


def test_threads_that_come_and_go_never_map_twice() -> None:
    table, device = MappingTable(), EmulatedDevice()
    buffer = device.allocate(64)  # lives as long as its handle is used
    handle = buffer.handle()

    def come_and_go(_: int) -> None:
        for _ in range(50):
            table.open(device, handle, Deadline(within(10.0))).close()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(come_and_go, range(8)))
    found = history(handle)
    assert found == ["mapped", "unmapped"] * (len(found) // 2)


def test_a_refusal_leaves_nothing_behind() -> None:
    table = MappingTable()
    buffer = EmulatedDevice().allocate(64)
    with pytest.raises(NotSupportedError):
        table.open(EmulatedDevice(allows_mapping=False), buffer.handle(), Deadline(5.0))
    table.open(EmulatedDevice(), buffer.handle(), Deadline(5.0)).close()


def test_a_device_that_maps_for_ever_holds_nobody_longer_than_the_deadline() -> None:
    table, entered, go_on = MappingTable(), threading.Event(), threading.Event()

    class StuckDevice(EmulatedDevice):
        def map(self, handle: bytes) -> EmulatedMapping:
            entered.set()
            go_on.wait()
            return super().map(handle)

    device = StuckDevice()
    buffers = [device.allocate(64) for _ in range(2)]
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(table.open, device, buffers[0].handle(), Deadline(within(10.0)))
        assert entered.wait(within(10.0))
        try:
            with pytest.raises(TransferTimeout, match="mapped or unmapped"):
                table.open(device, buffers[1].handle(), Deadline(0.05))
        finally:
            go_on.set()
        first.result().close()
