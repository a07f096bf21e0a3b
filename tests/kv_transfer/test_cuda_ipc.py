"""CUDA IPC on an emulated device: order after the layer's own work, quiescence after an abort, refusal, batching, measured choice."""

from __future__ import annotations

import json
import logging
import threading
import time

import pytest
import torch

from common.errors import KVTransferError, NotSupportedError, PeerLost
from kernels.digest import MASK
from kv_transfer.deadline import Deadline
from kv_transfer.push import Push
from kv_transfer.sender import PushResult
from kv_transfer.transports import cuda_ipc
from kv_transfer.transports.base import Target
from kv_transfer.transports.choose import FLOOR_GB_PER_S
from kv_transfer.transports.cuda_ipc import CudaIpcLink
from tests.support.emulated_device import EmulatedDevice, EmulatedMoment
from tests.support.kv_groups import KEY, DecodeGroup, PrefillGroup, assert_handed_over, geometry, joined
from tests.support.pace import within

TOKENS = 80


def groups(device: EmulatedDevice, **options) -> tuple[PrefillGroup, DecodeGroup]:
    g = geometry(2)
    options = {"transports": ("cuda_ipc",), "preference": "cuda_ipc"} | options
    prefill = PrefillGroup(g, 1, TOKENS, options["preference"], sender_options={"device": device})
    return prefill, DecodeGroup(g, 1, options["transports"], device=EmulatedDevice())


def test_nothing_is_read_before_its_layer_is_computed() -> None:
    device, ready = EmulatedDevice(), EmulatedMoment()
    device.computed = lambda: ready
    prefill, decode = groups(device)
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        done: list[PushResult] = []
        over = threading.Event()
        prefill.senders[0].finish(1, lambda result: (done.append(result), over.set()))
        assert not over.wait(0.3)
        assert bool(decode.views[0].full.isnan().all())
        ready.event.set()
        assert over.wait(within(10.0))
        assert done[0].error is None
        assert_handed_over(prefill, decode, 1)


def test_an_abort_has_stopped_only_when_the_device_has_written() -> None:
    gate, arrived, is_late = threading.Event(), threading.Event(), []
    device = EmulatedDevice(before_copy=lambda: is_late and (arrived.set(), gate.wait()))
    prefill, decode = groups(device)
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))  # makes the link, and probes it
        prefill.push_chunk(1, 0, TOKENS)
        assert prefill.finish(1)[0].error is None
        decode.release(1)
        is_late.append(True)
        prefill.begin(decode.reserve(2, TOKENS))
        prefill.push_chunk(2, 0, TOKENS)
        assert arrived.wait(within(10.0))
        stopped = threading.Event()
        prefill.senders[0].abort(2, stopped.set)
        assert not stopped.wait(1.0), "stopped although its write is under way"
        assert not decode.receivers[0].is_fenced(2), "a one-sided write is never fenced by a revoke"
        gate.set()
        assert stopped.wait(within(10.0))


def test_what_was_not_launched_when_a_transfer_is_aborted_never_is() -> None:
    device, ready = EmulatedDevice(), EmulatedMoment()
    device.computed = lambda: ready
    prefill, decode = groups(device)
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        stopped = threading.Event()
        prefill.senders[0].abort(1, stopped.set)
        assert stopped.wait(within(10.0))
        prefill.push_chunk(1, 0, TOKENS)
        ready.event.set()
        time.sleep(0.05)
        assert bool(decode.views[0].full.isnan().all())


def written_at_once(monkeypatch, device: EmulatedDevice, ready: EmulatedMoment) -> list[tuple[int, bool]]:
    """All layers of a transfer, given to the link one after the other. Returns: layers of each launch, and whether it was a wide one"""
    pushes: list[tuple[CudaIpcLink, Push]] = []
    write = CudaIpcLink.write
    monkeypatch.setattr(CudaIpcLink, "write", lambda link, push, deadline: pushes.append((link, push)))
    device.computed = lambda: ready
    prefill, decode = groups(device)
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        give_up = time.monotonic() + within(10.0)
        while len(pushes) < prefill.geometry.num_layers and time.monotonic() < give_up:
            time.sleep(0.002)
        device.copies.clear()  # probes
        link = pushes[0][0]
        for _, push in pushes:
            write(link, push, Deadline(60.0))
        link.submit()
        copies = list(device.copies)
        ready.event.set()
        link.flush(Deadline(60.0))
        assert_handed_over(prefill, decode, 1)
    return copies


def test_layers_gather_until_they_are_worth_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = 5 * 2 * 2 * 16 * 16 * 2  # bytes: 80 tokens, all of them within the window
    monkeypatch.setattr(cuda_ipc, "_ENOUGH_BYTES", (layer, 2 * layer, 100 * layer))
    assert written_at_once(monkeypatch, EmulatedDevice(), EmulatedMoment()) == [(1, False), (2, False), (1, False)]


def test_layers_that_are_all_there_take_more_multiprocessors_if_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, ready = 5 * 2 * 2 * 16 * 16 * 2, EmulatedMoment()
    ready.event.set()
    monkeypatch.setattr(cuda_ipc, "_ENOUGH_BYTES", (3 * layer,) * 3)
    monkeypatch.setattr(cuda_ipc, "WIDE_BYTES", 3 * layer)
    assert written_at_once(monkeypatch, EmulatedDevice(), ready) == [(3, True), (1, False)]


def test_layers_that_are_not_there_yet_leave_the_multiprocessors_to_who_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "WIDE_BYTES", 1)
    assert written_at_once(monkeypatch, EmulatedDevice(), EmulatedMoment()) == [(4, False)]


def test_a_host_that_does_not_allow_it_says_so_and_auto_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prefill, decode = groups(EmulatedDevice(allows_mapping=False), transports=("cuda_ipc", "tcp"), preference="auto")
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        results = prefill.finish(1)
        assert results[0].error is None
        assert_handed_over(prefill, decode, 1)
        assert decode.receivers[0].verify(1).digest == results[0].digest_per_rank[0] & MASK
        (rate,) = prefill.senders[0].rates()
        assert rate.transport == "tcp"
        assert rate.gb_per_s is not None
        assert rate.gb_per_s < FLOOR_GB_PER_S["device"]
    assert "not cuda_ipc: this host does not let one process map another's GPU memory" in caplog.text
    assert "is slow" in caplog.text


def test_asked_for_by_name_it_fails_with_the_reason() -> None:
    prefill, decode = groups(EmulatedDevice(allows_mapping=False))
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        error = prefill.finish(1)[0].error
        assert isinstance(error, NotSupportedError)
        assert "does not let one process map" in error.message


def test_endpoints_that_make_no_sense_or_are_elsewhere_are_refused() -> None:
    prefill, decode = groups(EmulatedDevice())
    where = Target(decode.incarnation, 0, 1, decode.geometry)
    facts = json.loads(decode.receivers[0].endpoints()[0].detail)

    def link(detail: bytes) -> CudaIpcLink:
        options = {"key": KEY, "io_timeout_s": 5.0, "deadline": Deadline(5.0)}
        return CudaIpcLink(detail, where, prefill.views[0], EmulatedDevice(), **options)

    with joined(prefill, decode):
        for detail in (b"", b"{}", b"\xff", json.dumps(facts | {"full": {"offset": "x"}}).encode()):
            with pytest.raises(KVTransferError, match="makes no sense"):
                link(detail)
        with pytest.raises(KVTransferError, match="another host"):
            link(json.dumps(facts | {"owner": facts["owner"] | {"host": "elsewhere"}}).encode())
        with pytest.raises(PeerLost, match="is gone"):
            link(json.dumps(facts | {"owner": facts["owner"] | {"start_ticks": 1}}).encode())


def test_auto_takes_the_fastest_of_what_opens() -> None:
    device = EmulatedDevice(before_copy=lambda: time.sleep(0.2))  # eight copies a probe: slower than a socket
    prefill, decode = groups(device, transports=("cuda_ipc", "tcp"), preference="auto")
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        assert prefill.finish(1)[0].error is None
        assert prefill.senders[0].rates()[0].transport == "tcp"
        assert torch.isfinite(torch.tensor(prefill.senders[0].rates()[0].gb_per_s))
