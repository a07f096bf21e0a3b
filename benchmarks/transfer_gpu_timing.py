"""Timings of the GPU transfer benchmark that run inside the prefill group's process, against a decode group of another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch

from benchmarks.transfer_gpu_groups import CUDA, KEY, PrefillGroup
from common.kv_layout import plan_pairs
from common.proto import worker_pb2
from kernels.device_memory import MappedMemory, plain_copy
from kernels.digest import DigestKey
from kernels.kv_copy import Segment, Tally, TileShape, kv_copy
from kv_transfer.cuda_device import CudaDevice
from kv_transfer.deadline import Deadline
from kv_transfer.outgoing import Outgoing, PushResult
from kv_transfer.push import DevicePart, Push
from kv_transfer.transports.base import Link
from kv_transfer.transports.choose import LinkOpener

if TYPE_CHECKING:
    from benchmarks.transfer_gpu_groups import Side

ROUNDS = 9


def seconds(operation: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


def wait(event: torch.cuda.Event) -> None:
    while not event.query():
        pass


def plain_s(target: int, source: torch.Tensor, nbytes: int, stream: torch.cuda.Stream) -> float:
    def copy() -> None:
        plain_copy(target, source.data_ptr(), nbytes, stream.cuda_stream)
        event = torch.cuda.Event()
        event.record(stream)
        wait(event)

    return seconds(copy)


class LinkJobs:
    """The pushes of one transfer, over links of their own, without the sender's threads."""

    def __init__(self, group: PrefillGroup, reservation: bytes, transport: str):
        message = worker_pb2.Reservation.FromString(reservation)
        self.group, self.device = group, CudaDevice(CUDA)
        self.jobs: list[tuple[Link, Push]] = []
        self.links: dict[tuple[int, int], Link] = {}
        g, n = group.g, group.num_tokens
        for view in group.views:
            outgoing = Outgoing(view, KEY, message, n, 60.0)
            outgoing.upload(self.device)
            opener = LinkOpener(view, key=KEY, preference=transport, io_timeout_s=10.0, device=self.device)
            for pair in outgoing.pairs:
                link = opener.open(outgoing.endpoints[pair.dst_rank], outgoing.targets[pair.dst_rank], Deadline(60.0))
                self.links[pair.src_rank, pair.dst_rank] = link
        ready = self.device.mark()
        for layer, slides in enumerate(g.sliding):
            first, _ = g.handover_blocks(n, sliding=slides)
            blocks = outgoing.blocks(slides, (first * 16, n), group.block_ids[slides], 0, group.num_blocks[slides])
            for pair in plan_pairs(g.num_kv_heads, group.tp, message.layout.tp):
                view = group.views[pair.src_rank]
                tables = blocks.upload(self.device)
                push = Push(
                    transfer_id=message.transfer_id,
                    incarnation=message.incarnation,
                    layer=layer,
                    tokens=(first * 16, n),
                    first_logical=first,
                    source=view.layer(layer),
                    source_ids=blocks.source_ids,
                    source_head=pair.src_head,
                    target_ids=blocks.target_ids,
                    target_epochs=blocks.target_epochs,
                    target_head=pair.dst_head,
                    first_head=view.heads.start + pair.src_head,
                    num_heads=pair.num_heads,
                    device=DevicePart(ready, *tables, outgoing.device_key),
                )
                self.jobs.append((self.links[pair.src_rank, pair.dst_rank], push))
        torch.cuda.synchronize()

    @property
    def nbytes(self) -> int:
        return sum(push.nbytes for _, push in self.jobs)

    def run(self) -> None:
        deadline = Deadline(20.0)
        for link, push in self.jobs:
            link.write(push, deadline)
        for link in self.links.values():
            link.submit()
        for link in self.links.values():
            link.flush(deadline)

    def close(self) -> None:
        for link in self.links.values():
            link.close()


def rates(side: Side, reservation: bytes, plain_handle: bytes, transport: str) -> dict:
    """One transfer of the group's prompt over links, against a plain peer copy of as many bytes.

    Returns: bytes, medians of neighbouring rounds in ms, the ratio of the rates
    """
    group = side.group
    jobs = LinkJobs(group, reservation, transport)
    mapped = MappedMemory(CUDA, plain_handle)
    source = torch.ones(jobs.nbytes, dtype=torch.uint8, device=CUDA)
    stream = torch.cuda.Stream()
    rounds = []
    for i in range(ROUNDS + 2):
        before = plain_s(mapped.address, source, jobs.nbytes, stream)
        link = seconds(jobs.run)
        after = plain_s(mapped.address, source, jobs.nbytes, stream)
        if i >= 2:
            rounds.append(((before + after) / 2, link))
    nbytes = jobs.nbytes
    jobs.close()
    mapped.close()
    plain, link = median(p for p, _ in rounds), median(x for _, x in rounds)
    return {"bytes": nbytes, "plain_ms": 1e3 * plain, "link_ms": 1e3 * link, "ratio": median(p / x for p, x in rounds)}


def kernel_blocks(side: Side, plain_handle: bytes, num_heads: int) -> list[tuple[int, float, float]]:
    """The kernel alone, by thread blocks: one launch per 16 layers of 302 MB to shuffled blocks of the mapped memory.

    Returns: (blocks, GB/s with digest to the peer, GB/s of the digest alone on this GPU)
    """
    group = side.group
    g, view = group.g, group.views[0]
    mapped = MappedMemory(CUDA, plain_handle)
    heads, count = view.heads.count, g.blocks_for(group.num_tokens)
    key = DigestKey.derive(KEY, 1, num_tokens=group.num_tokens, row_bytes=128, num_layers=g.num_layers, num_kv_heads=g.num_kv_heads)
    key = DigestKey(key.words.cuda(), key.positions.cuda(), key.heads.cuda())
    target_ids = torch.randperm(count, device=CUDA).int()
    source_ids = torch.tensor(group.block_ids[0], device=CUDA, dtype=torch.int32)
    shape = TileShape(16, 128, heads, num_heads, num_heads, g.num_kv_heads)
    layer_bytes = count * 2 * num_heads * 2048
    segments = [
        Segment(
            view.layer(layer).data_ptr(), mapped.address + i * layer_bytes, 0, 0, source_ids, target_ids, (0, group.num_tokens), 0, layer, 0
        )
        for i, layer in enumerate(g.full_layers)
    ]
    alone = [Segment(s.source, 0, 0, 0, s.source_ids, None, s.tokens, 0, s.layer, 0) for s in segments]
    tally, rows = Tally(CUDA), []
    for blocks in (4, 8, 12, 16, 20, 24, 32, 64, 132):
        times = []
        for what in (segments, alone):
            ms = []
            for _ in range(6):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                kv_copy(what, shape, key, tally, stream=torch.cuda.current_stream().cuda_stream, blocks=blocks)
                end.record()
                end.synchronize()
                ms.append(start.elapsed_time(end))
            times.append(median(ms[1:]))
        nbytes = layer_bytes * len(segments)
        rows.append((blocks, nbytes / times[0] / 1e6, nbytes / times[1] / 1e6))
    torch.cuda.synchronize()
    mapped.close()
    return rows


def sender_ms(side: Side, reservations: list[bytes]) -> dict:
    """Whole transfers by the sender with its threads, of KV that is there already.

    Returns: medians in ms: from the first push to the last ack, and `begin`
    """
    group, times, begins = side.group, [], []
    for reservation in reservations:
        torch.cuda.synchronize()
        began = time.perf_counter()
        transfer_id = group.begin(reservation)
        torch.cuda.synchronize()
        pushed = time.perf_counter()
        for layer in range(group.layers):
            group.push(transfer_id, layer)
        results = group.finish(transfer_id)
        times.append(1e3 * (time.perf_counter() - pushed))
        begins.append(1e3 * (pushed - began))
        assert all(result.error is None for result in results), results
    return {"push_to_ack_ms": median(times[1:]), "begin_ms": median(begins[1:]), "all_ms": times}


class Load:
    """Work like a prefill's: per layer a write of K and V and matrix products, about `total_ms` in all."""

    def __init__(self, group: PrefillGroup, total_ms: float):
        self.group = group
        self.x = torch.randn(group.num_tokens, 2880, device=CUDA, dtype=torch.bfloat16)
        self.w = torch.randn(2880, 5760, device=CUDA, dtype=torch.bfloat16) / 54
        self.out = torch.empty(group.num_tokens, 5760, device=CUDA, dtype=torch.bfloat16)
        self.kv = [group.views[0].layer(layer).clone() for layer in range(2)]
        self.products = 1
        self.products = max(1, round(total_ms / group.layers / self._product_ms()))

    def _product_ms(self) -> float:
        for _ in range(10):
            torch.mm(self.x, self.w, out=self.out)
        return 1e3 * seconds(lambda: ([torch.mm(self.x, self.w, out=self.out) for _ in range(50)], torch.cuda.synchronize())) / 50

    def layer(self, layer: int) -> None:
        self.group.views[0].layer(layer).copy_(self.kv[layer % 2])  # the layer's K and V

    def rest(self) -> None:
        for _ in range(self.products):
            torch.mm(self.x, self.w, out=self.out)


def overlap(side: Side, reservations: list[bytes], total_ms: float, graph: bool) -> dict:
    """A prefill-like load with the push of each layer's KV, and without, in turns. `graph`: all pushes come once all work is enqueued.

    Returns: medians in ms: both times on the device, and from its end to the last byte's acknowledgement on the host
    """
    group = side.group
    load = Load(group, total_ms)
    alone, pushed, late, host = [], [], [], []
    for reservation in reservations:
        for with_push in (False, True):
            transfer_id = group.begin(reservation) if with_push else 0
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            done: list[tuple[float, PushResult]] = []
            began = time.perf_counter()
            start.record()
            for layer in range(group.layers):
                load.layer(layer)
                if with_push and not graph:
                    group.push(transfer_id, layer)
                load.rest()
            end.record()
            for layer in range(group.layers) if with_push and graph else ():
                group.push(transfer_id, layer)
            if not with_push:
                end.synchronize()
                alone.append(start.elapsed_time(end))
                continue
            host.append(1e3 * (time.perf_counter() - began))
            group.senders[0].finish(transfer_id, lambda result, done=done: done.append((time.perf_counter(), result)))
            while not end.query():
                time.sleep(20e-6)
            ended = time.perf_counter()
            while not done:
                time.sleep(20e-6)
            pushed.append(start.elapsed_time(end))
            late.append(1e3 * (done[0][0] - ended))
            assert done[0][1].error is None, done[0][1]
    return {
        "alone_ms": median(alone[1:]), "pushed_ms": median(pushed[1:]), "slower": median(pushed[1:]) / median(alone[1:]) - 1,
        "last_byte_after_ms": median(late[1:]), "last_byte_after_worst_ms": max(late[1:]), "host_ms": median(host[1:]),
    }  # fmt: skip


def nccl_receive(side: Side, pair_id: bytes, nbytes: int, rounds: int) -> None:
    """The other end of `nccl_plain`."""
    pair = CudaDevice(CUDA).join_pair(pair_id, 1, Deadline(30.0))
    memory = torch.empty(nbytes, dtype=torch.uint8, device=CUDA)
    for _ in range(rounds):
        pair.receive([memory], Deadline(20.0))
        moment, deadline = pair.mark(), Deadline(20.0)
        while not moment.is_past():
            deadline.check("receiving")
    pair.abort()


def nccl_plain(side: Side, pair_id: bytes, nbytes: int, rounds: int) -> float:
    """NCCL's own send and receive of one buffer. Returns: GB/s, the median over rounds"""
    pair = CudaDevice(CUDA).join_pair(pair_id, 0, Deadline(30.0))
    memory, times = torch.ones(nbytes, dtype=torch.uint8, device=CUDA), []
    torch.cuda.synchronize()
    for _ in range(rounds):
        began, deadline = time.perf_counter(), Deadline(20.0)
        pair.send([memory], deadline)
        moment = pair.mark()
        while not moment.is_past():
            deadline.check("sending")
        times.append(time.perf_counter() - began)
    pair.abort()
    return nbytes / median(times[2:]) / 1e9


def new_pair_id(side: Side) -> bytes:
    return CudaDevice(CUDA).new_pair_id()
