"""NCCL's transport, emulated: what stalls is aborted by its deadline, and the next transfer makes a new pair."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from torch import Tensor

from common.errors import KVTransferError
from kv_transfer.deadline import Deadline
from kv_transfer.grants import GrantTable, Received
from kv_transfer.transports import nccl, tcp
from kv_transfer.transports.base import Target
from kv_transfer.transports.nccl import SLOT_BYTES, NcclLink
from kv_transfer.transports.nccl_server import NcclServer
from kv_transfer.transports.tcp_wire import Status
from tests.support.emulated_device import EmulatedDevice, EmulatedMoment, EmulatedPair
from tests.support.kv_groups import KEY, DecodeGroup, PrefillGroup, assert_handed_over, geometry, joined, poisoned_view
from tests.support.pace import within

TOKENS = 80


def test_a_stalled_sender_is_hung_up_on_and_the_next_transfer_makes_a_new_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[EmulatedPair] = []

    class Stalling(EmulatedDevice):
        def join_pair(self, pair_id: bytes, rank: int, deadline: Deadline) -> EmulatedPair:
            pairs.append(super().join_pair(pair_id, rank, deadline))
            return pairs[-1]

    g = geometry(2)
    prefill = PrefillGroup(g, 1, TOKENS, "nccl", sender_options={"device": Stalling(), "io_timeout_s": within(1.0)})
    decode = DecodeGroup(g, 1, ("nccl",))
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        assert prefill.finish(1)[0].error is None
        decode.release(1)
        never = EmulatedMoment()
        pairs[0].after(never)  # what is sent from now on never leaves
        prefill.begin(decode.reserve(2, TOKENS), deadline_s=within(0.5))
        prefill.push_chunk(2, 0, TOKENS)
        began = time.monotonic()
        assert isinstance(prefill.finish(2)[0].error, KVTransferError)
        assert time.monotonic() - began < within(5.0)
        decode.release(2)
        for view in decode.views:
            view.full.fill_(float("nan"))
            view.sliding.fill_(float("nan"))
        prefill.begin(decode.reserve(3, TOKENS))
        prefill.push_chunk(3, 0, TOKENS)
        assert prefill.finish(3)[0].error is None
        assert len(pairs) == 2
        assert_handed_over(prefill, decode, 3)


def test_a_receiver_sees_a_hang_up_that_the_communicator_does_not_tell() -> None:
    sending: list[EmulatedPair] = []
    aborted = threading.Event()

    class DeafPair(EmulatedPair):
        def check(self) -> None:
            """A kernel that waits for a peer that is gone just waits."""

        def abort(self) -> None:
            aborted.set()
            super().abort()

    class Deaf(EmulatedDevice):
        def join_pair(self, pair_id: bytes, rank: int, deadline: Deadline) -> EmulatedPair:
            return DeafPair(pair_id.decode(), rank, deadline)

    class Stalling(EmulatedDevice):
        def join_pair(self, pair_id: bytes, rank: int, deadline: Deadline) -> EmulatedPair:
            sending.append(super().join_pair(pair_id, rank, deadline))
            return sending[-1]

    g = geometry(2)
    prefill = PrefillGroup(g, 1, TOKENS, "nccl", sender_options={"device": Stalling(), "io_timeout_s": within(1.0)})
    decode = DecodeGroup(g, 1, ("nccl",), device=Deaf())
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        assert prefill.finish(1)[0].error is None
        sending[0].after(EmulatedMoment())  # headers still go out, payloads don't
        prefill.begin(decode.reserve(2, TOKENS), deadline_s=0.5)
        prefill.push_chunk(2, 0, TOKENS)
        assert isinstance(prefill.finish(2)[0].error, KVTransferError)
        assert aborted.wait(within(1.0)), "ten seconds are the limit for a sender that is silent"


def test_messages_larger_than_a_slot_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    g = geometry(2)
    per_block = 2 * 2 * g.head_block_bytes
    monkeypatch.setattr(nccl, "SLOT_BYTES", 2 * per_block)
    monkeypatch.setattr(nccl, "_PROBE_BYTES", per_block)
    prefill, decode = PrefillGroup(g, 1, TOKENS, "nccl"), DecodeGroup(g, 1, ("nccl",))
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS))
        prefill.push_chunk(1, 0, TOKENS)
        assert prefill.finish(1)[0].error is None
        assert_handed_over(prefill, decode, 1)


def test_layers_that_wait_together_travel_as_one_message() -> None:
    messages: list[int] = []
    all_pushed = threading.Event()

    class Counting(EmulatedPair):
        def send(self, tensors: Sequence[Tensor], deadline: Deadline) -> None:
            messages.append(sum(len(tensor) for tensor in tensors))
            super().send(tensors, deadline)

    class LateDevice(EmulatedDevice):
        def join_pair(self, pair_id: bytes, rank: int, deadline: Deadline) -> EmulatedPair:
            assert all_pushed.wait(within(10.0))
            return Counting(pair_id.decode(), rank, deadline)

    g = geometry(2)
    prefill = PrefillGroup(g, 1, TOKENS + 5, "nccl", sender_options={"device": LateDevice()})
    decode = DecodeGroup(g, 1, ("nccl",))
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS + 5))
        prefill.push_chunk(1, 0, TOKENS + 5)
        all_pushed.set()
        results = prefill.finish(1)
        assert results[0].error is None
        assert_handed_over(prefill, decode, 1)
        assert decode.receivers[0].verify(1).digest == results[0].digest_per_rank[0]
    layer_bytes = 2 * g.num_kv_heads * g.head_block_bytes * g.blocks_for(TOKENS + 5)
    assert [size for size in messages if size != nccl._PROBE_BYTES] == [g.num_layers * layer_bytes]


def test_a_sender_whose_communicator_never_comes_is_hung_up_on() -> None:
    class Absent(EmulatedDevice):
        def join_pair(self, pair_id: bytes, rank: int, deadline: Deadline) -> EmulatedPair:
            raise KVTransferError("no communicator")

    view, _ = poisoned_view(geometry(2), 1, 0, (8, 8), shared=False)
    server = NcclServer(GrantTable(view, 5), EmulatedDevice(), key=KEY, incarnation=5, host="127.0.0.1", io_timeout_s=within(0.5))
    detail = tcp.describe("127.0.0.1", server.port)
    with pytest.raises(KVTransferError, match="no communicator"):
        NcclLink(detail, Target(5, 0, 1, geometry(2)), Absent(), key=KEY, io_timeout_s=5.0, deadline=Deadline(5.0))
    server.close()


def test_what_has_arrived_is_touched_by_the_grants_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy made before, in whatever stream, would not have been carried out when the grants' stream reads it."""
    seen: list[Received] = []
    write = GrantTable.write

    def watched(self: GrantTable, messages: Sequence[Received]) -> Status:
        seen.extend(messages)
        return write(self, messages)

    monkeypatch.setattr(GrantTable, "write", watched)
    g = geometry(2)
    prefill, decode = PrefillGroup(g, 1, TOKENS - 3, "nccl", sender_options={"device": EmulatedDevice()}), DecodeGroup(g, 1, ("nccl",))
    with joined(prefill, decode):
        prefill.begin(decode.reserve(1, TOKENS - 3))
        prefill.push_chunk(1, 0, TOKENS - 3)
        assert prefill.finish(1)[0].error is None
        assert_handed_over(prefill, decode, 1)
    tensors = [message.payload for message in seen if isinstance(message.payload, Tensor)]
    assert any(not tensor.is_contiguous() for tensor in tensors), "a partial block was meant to be among them"
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {SLOT_BYTES}, "all lie where they arrived"
