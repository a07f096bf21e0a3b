"""Prefill and decode groups of one process for transfer tests: pools poisoned with NaN, shuffled block ids, every rank with its own end."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common import auth
from common.block_pool import BlockGrant, BlockPool
from common.kv_layout import DTYPE_BYTES, KVGeometry, head_range
from common.proto import types_pb2, worker_pb2
from kv_transfer.device import Device, DeviceBuffer
from kv_transfer.memory import SharedBuffer
from kv_transfer.pool_view import TORCH_DTYPE, PoolView
from kv_transfer.receiver import Receiver
from kv_transfer.sender import PushResult, Sender
from kv_transfer.transports import shm
from tests.support.emulated_device import EmulatedDevice

KEY = b"the key of a cluster under test."
DEVICE_SCRATCH_BYTES = 64 << 10  # probes of an emulated device take its time
INT = {"bfloat16": torch.int16, "float32": torch.int32}


def geometry(num_kv_heads: int = 2, **changes) -> KVGeometry:
    values = {
        "num_layers": 4,
        "num_kv_heads": num_kv_heads,
        "head_dim": 16,
        "block_size_tokens": 16,
        "dtype": "bfloat16",
        "window_tokens": 128,
    }
    values |= {"sliding": (True, False, True, False)} | changes
    return KVGeometry(**values)


def geometry_proto(g: KVGeometry) -> types_pb2.KVGeometry:
    names = ("num_layers", "num_kv_heads", "head_dim", "block_size_tokens", "dtype", "window_tokens", "sliding")
    return types_pb2.KVGeometry(**{name: getattr(g, name) for name in names})


def poisoned_view(
    g: KVGeometry, tp: int, rank: int, num_blocks: tuple[int, int], *, shared: bool, device: Device | None = None
) -> tuple[PoolView, SharedBuffer | DeviceBuffer | None]:
    """Pools of (full, sliding) blocks, every element NaN."""
    heads = head_range(g.num_kv_heads, tp, rank).count
    shapes = [
        (len(layers), blocks, 2, heads, g.block_size_tokens, g.head_dim)
        for layers, blocks in zip((g.full_layers, g.sliding_layers), num_blocks, strict=True)
    ]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    nbytes = sum(sizes) * DTYPE_BYTES[g.dtype]
    buffer: SharedBuffer | DeviceBuffer | None = None
    if device is not None:
        buffer = device.allocate(nbytes + DEVICE_SCRATCH_BYTES)
    elif shared:
        buffer = SharedBuffer.create(nbytes + shm.SCRATCH_BYTES)
    memory = buffer.tensor() if buffer else torch.empty(nbytes, dtype=torch.uint8)
    values = memory[:nbytes].view(TORCH_DTYPE[g.dtype])
    values.fill_(float("nan"))
    full, sliding = values[: sizes[0]].view(shapes[0]), values[sizes[0] :].view(shapes[1])
    return PoolView(full, sliding, g, tp, rank), buffer


def shuffled_pool(num_blocks: int, seed: int) -> BlockPool:
    """A pool that hands out its blocks in random order, with different epochs."""
    pool, rng = BlockPool(num_blocks), random.Random(seed)
    for _ in range(3):
        grant = pool.allocate(num_blocks, "shuffle")
        order = rng.sample(grant.block_ids, num_blocks)
        cut = rng.randrange(1, num_blocks)
        pool.free(order[:cut], "shuffle")
        pool.free(order[cut:], "shuffle")
    return pool


@dataclass
class DecodeGroup:
    """All ranks of a decode group, as receivers, and the leader's block pools."""

    geometry: KVGeometry
    tp: int
    transports: tuple[str, ...]
    num_blocks: tuple[int, int] = (80, 24)
    incarnation: int = 0xD0C0DE
    views: list[PoolView] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)
    reserved: dict[int, list[BlockGrant]] = field(default_factory=dict)
    device: Device | None = None

    def __post_init__(self) -> None:
        if self.device is None and {"cuda_ipc", "nccl"} & set(self.transports):
            self.device = EmulatedDevice()
        self.pools = [shuffled_pool(n, 7 + i) for i, n in enumerate(self.num_blocks)]
        for rank in range(self.tp):
            is_shared = "shm" in self.transports
            view, buffer = poisoned_view(self.geometry, self.tp, rank, self.num_blocks, shared=is_shared, device=self.device)
            self.views.append(view)
            options = {"key": KEY, "incarnation": self.incarnation, "listen_host": "127.0.0.1", "transports": self.transports}
            self.receivers.append(Receiver(view, buffer=buffer, device=self.device, **options))

    def reserve(self, transfer_id: int, num_tokens: int) -> worker_pb2.Reservation:
        lists = []
        self.reserved[transfer_id] = []
        for pool, sliding in zip(self.pools, (False, True), strict=True):
            first, count = self.geometry.handover_blocks(num_tokens, sliding=sliding)
            grant = pool.allocate(count, f"{transfer_id}")
            self.reserved[transfer_id].append(grant)
            lists.append(worker_pb2.BlockList(sliding=sliding, first_logical=first, block_ids=grant.block_ids, epochs=grant.epochs))
        for receiver in self.receivers:
            receiver.grant(transfer_id, lists, num_tokens)
        return self.reservation(transfer_id, lists)

    def reservation(self, transfer_id: int, lists: list[worker_pb2.BlockList]) -> worker_pb2.Reservation:
        reservation = worker_pb2.Reservation(
            internal_id=f"request-{transfer_id}",
            transfer_id=transfer_id,
            incarnation=self.incarnation,
            layout=types_pb2.Layout(tp=self.tp, ep=1, dp=1),
            kv=geometry_proto(self.geometry),
            blocks=lists,
            ranks=[worker_pb2.RankEndpoints(rank=r, endpoints=receiver.endpoints()) for r, receiver in enumerate(self.receivers)],
            lease_ms=10_000,
        )
        auth.sign(reservation, KEY)
        return reservation

    def release(self, transfer_id: int) -> None:
        for receiver in self.receivers:
            receiver.revoke(transfer_id)
        for pool, grant in zip(self.pools, self.reserved.pop(transfer_id), strict=True):
            pool.free(grant.block_ids, f"{transfer_id}")

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


@dataclass
class PrefillGroup:
    """All ranks of a prefill group, as senders. `kv` is the truth: per model layer [2, all heads, tokens, head_dim] as integers."""

    geometry: KVGeometry
    tp: int
    num_tokens: int
    preference: str = "auto"
    seed: int = 0
    sender_options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.preference in ("cuda_ipc", "nccl"):
            self.sender_options = {"device": EmulatedDevice()} | self.sender_options
        g = self.geometry
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, g.num_kv_heads, self.num_tokens, g.head_dim)
        bits = 8 * DTYPE_BYTES[g.dtype]
        self.kv = [
            torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, generator=generator).to(INT[g.dtype]) for _ in range(g.num_layers)
        ]
        blocks = g.blocks_for(self.num_tokens)
        self.block_ids = [random.Random(self.seed + i).sample(range(blocks + 3), blocks) for i in range(2)]
        self.views = [poisoned_view(g, self.tp, rank, (blocks + 3, blocks + 3), shared=False)[0] for rank in range(self.tp)]
        self.senders = [
            Sender(view, key=KEY, rank=r, preference=self.preference, **self.sender_options) for r, view in enumerate(self.views)
        ]

    def compute(self, layer: int, start: int, end: int) -> None:
        """Writes K and V of tokens [start, end) into every rank's pool, as the model would."""
        g = self.geometry
        ids = torch.tensor(self.block_ids[g.sliding[layer]])
        position = torch.arange(start, end)
        blocks, offsets = ids[position // g.block_size_tokens], position % g.block_size_tokens
        for view in self.views:
            part = self.kv[layer][:, view.heads.start : view.heads.start + view.heads.count, start:end]
            view.layer(layer).view(INT[g.dtype])[blocks, :, :, offsets] = part.permute(2, 0, 1, 3)

    def begin(self, reservation: worker_pb2.Reservation, **options) -> None:
        for sender in self.senders:
            sender.begin(reservation, self.block_ids[0], self.num_tokens, **options)

    def push_chunk(self, transfer_id: int, start: int, end: int, *, poison_sliding: bool = True) -> None:
        g = self.geometry
        first = start // g.block_size_tokens
        for layer, slides in enumerate(g.sliding):
            self.compute(layer, start, end)
            for sender in self.senders:
                sender.push_layer(transfer_id, layer, start, end, self.block_ids[slides][first : g.blocks_for(end)], first)
            if slides and poison_sliding:  # the next chunk may reuse them
                for view in self.views:
                    view.layer(layer).fill_(float("nan"))

    def finish(self, transfer_id: int, timeout_s: float = 30.0) -> list[PushResult]:
        results, done = [], threading.Semaphore(0)

        def on_done(result: PushResult) -> None:
            results.append(result)
            done.release()

        for sender in self.senders:
            sender.finish(transfer_id, on_done)
        for _ in self.senders:
            assert done.acquire(timeout=timeout_s), "finish did not call back"
        return results

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@contextlib.contextmanager
def joined(prefill: PrefillGroup, decode: DecodeGroup) -> Iterator[None]:
    try:
        yield
    finally:
        prefill.close()
        decode.close()


def received(decode: DecodeGroup, transfer_id: int, rank: int, layer: int, num_tokens: int) -> Tensor:
    """What lies in a decode rank's pool: [2, local heads, tokens handed over, head_dim] as integers."""
    g = decode.geometry
    slides = g.sliding[layer]
    first, _ = g.handover_blocks(num_tokens, sliding=slides)
    ids = torch.tensor(decode.reserved[transfer_id][slides].block_ids)
    blocks = decode.views[rank].layer(layer).view(INT[g.dtype])[ids]  # [n, 2, K, S, D]
    tokens = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return tokens[:, :, : num_tokens - first * g.block_size_tokens]


def assert_handed_over(prefill: PrefillGroup, decode: DecodeGroup, transfer_id: int) -> None:
    """Every byte of the hand-over is where it belongs, and no other byte of the decode pools has changed."""
    g, n = prefill.geometry, prefill.num_tokens
    for rank, view in enumerate(decode.views):
        for layer, slides in enumerate(g.sliding):
            first, count = g.handover_blocks(n, sliding=slides)
            got = received(decode, transfer_id, rank, layer, n)
            want = prefill.kv[layer][:, view.heads.start : view.heads.start + view.heads.count, first * g.block_size_tokens :]
            assert torch.equal(got, want), f"rank {rank} layer {layer}: first difference at {(got != want).nonzero()[0].tolist()}"
            ids = decode.reserved[transfer_id][slides].block_ids
            touched = torch.zeros(view.layer(layer).shape[0], g.block_size_tokens, dtype=torch.bool)
            for i, block in enumerate(ids):
                touched[block, : min(g.block_size_tokens, n - (first + i) * g.block_size_tokens)] = True
            for other, grants in decode.reserved.items():
                if other != transfer_id:
                    touched[list(grants[slides].block_ids)] = True
            rest = view.layer(layer).permute(0, 3, 1, 2, 4)[~touched]
            assert bool(rest.isnan().all()), f"rank {rank} layer {layer}: something outside of the hand-over was written"
            assert count == len(ids)
