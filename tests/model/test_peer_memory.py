"""Ranks tell each other where their memory is, and meet there: handles over the group, mappings by whoever got one."""

from __future__ import annotations

import pytest
import torch

from common.errors import KernelError, NotSupportedError
from kernels.peers import PeerLayout
from model.peer_memory import open_peers
from tests.support.emulated_cuda import emulated  # noqa: F401
from tests.support.thread_group import run_ranks

LAYOUT = PeerLayout(4, 3, 256, 64)


class Memory:
    """Device memory of one process that others of the process "map" by an address in the handle."""

    def __init__(self, device, nbytes):
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()

    def tensor(self):
        return self._bytes

    def handle(self):
        return self.address.to_bytes(8, "little") + bytes(56)


class Mapped:
    def __init__(self, device, handle):
        self.address = int.from_bytes(handle[:8], "little")


def test_ranks_find_each_others_memory(emulated):  # noqa: F811
    def rank_main(group):
        peers = open_peers(group, LAYOUT, torch.zeros(1, dtype=torch.int32), allocate=Memory, map_handle=Mapped)
        residual = torch.zeros(3, 256, dtype=torch.bfloat16)
        peers.sum_projection(torch.full_like(residual, 2.0**group.rank), torch.ones(256, dtype=torch.bfloat16), residual)
        return residual

    for residual in run_ranks(4, rank_main):
        assert (residual == 16.0).all()


def test_a_host_that_allows_no_mapping_is_told_by_name():
    class Refused:
        def __init__(self, device, handle):
            raise KernelError("cudaIpcOpenMemHandle: CUDA error 801, operation not supported")

    with pytest.raises(NotSupportedError, match=r"rank [0-3]: cudaIpcOpenMemHandle"):
        run_ranks(4, lambda group: open_peers(group, LAYOUT, torch.zeros(1, dtype=torch.int32), allocate=Memory, map_handle=Refused))


def test_where_one_rank_may_not_map_no_rank_does():
    """A rank that went on alone would wait for sums that the others make another way."""

    def rank_main(group):
        class Refused(Mapped):
            def __init__(self, device, handle):
                if group.rank == 2:
                    raise KernelError("cudaIpcOpenMemHandle: CUDA error 801, operation not supported")
                super().__init__(device, handle)

        with pytest.raises(NotSupportedError, match="map") as refused:
            open_peers(group, LAYOUT, torch.zeros(1, dtype=torch.int32), allocate=Memory, map_handle=Refused)
        return refused.value.message

    messages = run_ranks(4, rank_main)
    assert [("cudaIpcOpenMemHandle" in message) for message in messages] == [False, False, True, False]
