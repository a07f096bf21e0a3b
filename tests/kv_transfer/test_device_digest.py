"""KV in pools on a device, digested there: as on a CPU, for one transfer after the other that use again what those before have used."""

from __future__ import annotations

import threading

import pytest
import torch

from common.kv_layout import KVGeometry
from common.proto import worker_pb2
from kernels.kv_copy import Tally
from kv_transfer.pool_view import PoolView
from kv_transfer.receiver import Receiver
from tests.support.emulated_device import EmulatedDevice, EmulatedLane

GEOMETRY = KVGeometry(4, 2, 16, 16, "bfloat16", 128, (True, False, True, False))
TOKENS, BLOCKS = 70, 12


@pytest.fixture
def tallies(monkeypatch: pytest.MonkeyPatch) -> list[Tally]:
    """Those that a lane has made."""
    made: list[Tally] = []

    def tally(_lane: EmulatedLane) -> Tally:
        made.append(Tally(torch.device("cpu")))
        return made[-1]

    monkeypatch.setattr(EmulatedLane, "tally", tally)
    return made


def receivers(device: EmulatedDevice) -> list[Receiver]:
    """On the device, and on a CPU, over the same pools."""
    pools = [torch.randn(2, BLOCKS, 2, 2, 16, 16).bfloat16() for _ in range(2)]
    view = PoolView(*pools, GEOMETRY, 1, 0)
    common = {"key": b"key of a test, 16 or more bytes", "incarnation": 1, "listen_host": "127.0.0.1", "transports": (), "buffer": None}
    return [Receiver(view, **common, device=device), Receiver(view, **common)]


def grant(receiver: Receiver, transfer_id: int) -> None:
    ids = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(transfer_id))[:5].tolist()
    lists = [worker_pb2.BlockList(sliding=sliding, block_ids=ids, epochs=[1] * 5) for sliding in (False, True)]
    receiver.grant(transfer_id, lists, TOKENS)


def test_one_transfer_after_the_other_needs_one_tally(tallies):
    both = receivers(EmulatedDevice())
    for transfer_id in range(1, 5):
        for receiver in both:
            grant(receiver, transfer_id)
        assert both[0].verify(transfer_id) == both[1].verify(transfer_id)
        for receiver in both:
            receiver.revoke(transfer_id)
    assert len(tallies) == 1


def test_a_tally_that_the_device_still_adds_to_is_not_used_again(tallies):
    goes_on = threading.Event()
    device = EmulatedDevice(before_copy=goes_on.wait)
    both = receivers(device)
    grant(both[0], 1)
    assert both[0].check(1) is None
    both[0].revoke(1)
    for receiver in both:
        grant(receiver, 2)
    assert len(tallies) == 2
    assert both[0].check(2) is None
    goes_on.set()
    assert both[0].verify(2) == both[1].verify(2)
    both[0].revoke(2)
    for transfer_id in (3, 4):
        for receiver in both:
            grant(receiver, transfer_id)
        assert both[0].verify(transfer_id) == both[1].verify(transfer_id)
    assert len(tallies) == 2
