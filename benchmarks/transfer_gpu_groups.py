"""Prefill and decode groups of the GPU transfer benchmark: all ranks of a group in one process, on one GPU, driven over a pipe.

The truth is random KV made from a seed on either GPU, so that both sides know every byte. Decode pools start poisoned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from common import auth
from common.block_pool import BlockPool
from common.kv_layout import KVGeometry, head_range
from common.kv_proto import geometry_to_proto
from common.proto import types_pb2, worker_pb2
from kernels.device_memory import DeviceMemory
from kv_transfer.cuda_device import CudaDevice
from kv_transfer.pool_view import PoolView
from kv_transfer.receiver import Receiver
from kv_transfer.sender import PushResult, Sender
from kv_transfer.transports import cuda_ipc

KEY = b"the key of the transfer benchmark"
CUDA = torch.device("cuda", 0)
POISON = 0x7FC1  # a NaN


def geometry(layers: int = 36, heads: int = 8) -> KVGeometry:
    """gpt-oss-120b's, or fewer layers of it."""
    return KVGeometry(layers, heads, 64, 16, "bfloat16", 128, tuple(i % 2 == 0 for i in range(layers)))


def truth(g: KVGeometry, seed: int, layer: int, num_tokens: int) -> torch.Tensor:
    """K and V of a layer: [2, heads, tokens, head_dim] int16 on the GPU"""
    generator = torch.Generator(CUDA).manual_seed(1000 * seed + layer)
    shape = (2, g.num_kv_heads, num_tokens, g.head_dim)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, device=CUDA, dtype=torch.int16)


def pools(buffer: torch.Tensor, g: KVGeometry, tp: int, rank: int, num_blocks: tuple[int, int]) -> PoolView:
    heads = head_range(g.num_kv_heads, tp, rank).count
    values = buffer.view(torch.bfloat16)
    tail = (2, heads, g.block_size_tokens, g.head_dim)
    shapes = [(len(g.full_layers), num_blocks[0], *tail), (len(g.sliding_layers), num_blocks[1], *tail)]
    cut = torch.Size(shapes[0]).numel()
    full, sliding = values[:cut].view(shapes[0]), values[cut : cut + torch.Size(shapes[1]).numel()].view(shapes[1])
    return PoolView(full, sliding, g, tp, rank)


def pool_bytes(g: KVGeometry, tp: int, num_blocks: tuple[int, int]) -> int:
    blocks = len(g.full_layers) * num_blocks[0] + len(g.sliding_layers) * num_blocks[1]
    return blocks * 2 * head_range(g.num_kv_heads, tp, 0).count * g.head_block_bytes


@dataclass
class DecodeGroup:
    """Serves from construction until `close`."""

    tp: int
    layers: int
    num_blocks: tuple[int, int]
    transports: tuple[str, ...] = ("cuda_ipc",)
    incarnation: int = 0xD0C0DE
    reserved: dict[int, list] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.g = geometry(self.layers)
        self.views, self.receivers, self.buffers = [], [], []
        self.block_pools = [BlockPool(n) for n in self.num_blocks]
        rng = random.Random(7)
        for pool in self.block_pools:  # as after some hours: any order
            grant = pool.allocate(pool.num_free, "x")
            order = rng.sample(list(grant.block_ids), len(grant.block_ids))
            pool.free(order, "x")
        for rank in range(self.tp):
            nbytes = pool_bytes(self.g, self.tp, self.num_blocks)
            buffer = CudaDevice(CUDA).allocate(nbytes + cuda_ipc.SCRATCH_BYTES)
            self.buffers.append(buffer)
            buffer.tensor()[: nbytes // 2 * 2].view(torch.int16).fill_(POISON)
            view = pools(buffer.tensor()[:nbytes], self.g, self.tp, rank, self.num_blocks)
            options = {"key": KEY, "incarnation": self.incarnation, "listen_host": "127.0.0.1", "transports": self.transports}
            self.views.append(view)
            self.receivers.append(Receiver(view, buffer=buffer, **options))
        torch.cuda.synchronize()

    def reserve(self, transfer_id: int, num_tokens: int, lease_s: float = 10.0) -> bytes:
        """Raises: CapacityError"""
        lists, grants = [], []
        for pool, sliding in zip(self.block_pools, (False, True), strict=True):
            first, count = self.g.handover_blocks(num_tokens, sliding=sliding)
            grant = pool.allocate(count, f"{transfer_id}")
            grants.append(grant)
            lists.append(worker_pb2.BlockList(sliding=sliding, first_logical=first, block_ids=grant.block_ids, epochs=grant.epochs))
        self.reserved[transfer_id], self.tokens[transfer_id] = grants, num_tokens
        for receiver in self.receivers:
            receiver.grant(transfer_id, lists, num_tokens)
        reservation = worker_pb2.Reservation(
            internal_id=f"r{transfer_id}", transfer_id=transfer_id, incarnation=self.incarnation,
            layout=types_pb2.Layout(tp=self.tp, ep=1, dp=1), kv=geometry_to_proto(self.g), blocks=lists,
            ranks=[worker_pb2.RankEndpoints(rank=r, endpoints=x.endpoints()) for r, x in enumerate(self.receivers)],
            lease_ms=int(1000 * lease_s),
        )  # fmt: skip
        auth.sign(reservation, KEY)
        return reservation.SerializeToString()

    def verify(self, transfer_id: int) -> list[int]:
        """Returns: the digest by rank"""
        return [receiver.verify(transfer_id).digest for receiver in self.receivers]

    def verify_ms(self, transfer_id: int, rounds: int = 5) -> float:
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            self.verify(transfer_id)
            times.append(1e3 * (time.perf_counter() - began))
        return sorted(times)[rounds // 2]

    def difference(self, transfer_id: int, seed: int, *, alone: bool) -> str:
        """Returns: where a byte is not the truth's, or, if the transfer is `alone`, where a byte beside it was touched; empty if nowhere"""
        g, n = self.g, self.tokens[transfer_id]
        for layer, slides in enumerate(g.sliding):
            first, _ = g.handover_blocks(n, sliding=slides)
            start = first * g.block_size_tokens
            ids = torch.tensor(self.reserved[transfer_id][slides].block_ids, device=CUDA)
            whole = truth(g, seed, layer, n)
            for rank, view in enumerate(self.views):
                pool = view.layer(layer).view(torch.int16)
                got = pool[ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : n - start]
                want = whole[:, view.heads.start : view.heads.start + view.heads.count, start:]
                if not torch.equal(got, want):
                    bad = (got != want).nonzero()[0].tolist()
                    return f"layer {layer} rank {rank} at {bad} of {list(got.shape)}: {int((got != want).sum())} values differ"
                if alone:
                    rest = torch.ones(pool.shape[0], g.block_size_tokens, dtype=torch.bool, device=CUDA)
                    rest[ids] = False
                    tail = (n - start) % g.block_size_tokens
                    if tail:
                        rest[ids[-1], tail:] = True
                    if not bool((pool.permute(0, 3, 1, 2, 4)[rest] == POISON).all()):
                        return f"layer {layer} rank {rank}: something beside the hand-over was written"
        return ""

    def release(self, transfer_id: int, *, poison: bool = True) -> None:
        for receiver in self.receivers:
            receiver.revoke(transfer_id)
        for slides, (pool, grant) in enumerate(zip(self.block_pools, self.reserved.pop(transfer_id), strict=True)):
            if poison:
                for view in self.views:
                    view.pool(sliding=bool(slides)).view(torch.int16)[:, torch.tensor(grant.block_ids, device=CUDA)] = POISON
            pool.free(grant.block_ids, f"{transfer_id}")
        torch.cuda.current_stream().synchronize()  # not the device: what a stopped peer has begun may wait there for it

    def wait_for_device(self) -> None:
        """Until what a broken transfer has left on the device is over."""
        torch.cuda.synchronize()

    def plain_memory(self, nbytes: int) -> bytes:
        """Memory for plain copies to compare with. Returns: its handle"""
        self.plain = DeviceMemory(CUDA, nbytes)
        return self.plain.handle()

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


@dataclass
class PrefillGroup:
    """Holds the KV of one prompt at a time in pools of its own."""

    tp: int
    layers: int
    num_tokens: int
    transport: str = "cuda_ipc"

    def __post_init__(self) -> None:
        self.g = geometry(self.layers)
        blocks = self.g.blocks_for(self.num_tokens)
        self.num_blocks = (blocks + 3, blocks + 3)
        rng = random.Random(self.num_tokens)
        self.block_ids = [rng.sample(range(blocks + 3), blocks) for _ in range(2)]
        self.tables = [torch.tensor(ids, device=CUDA) for ids in self.block_ids]
        self.views, self.senders = [], []
        for rank in range(self.tp):
            buffer = torch.empty(pool_bytes(self.g, self.tp, self.num_blocks), dtype=torch.uint8, device=CUDA)
            self.views.append(pools(buffer, self.g, self.tp, rank, self.num_blocks))
            self.senders.append(Sender(self.views[-1], key=KEY, rank=rank, preference=self.transport))

    def chosen(self) -> list[str]:
        return [f"{rate.transport} at {rate.gb_per_s or 0:.0f} GB/s" for sender in self.senders for rate in sender.rates()]

    def fill(self, seed: int, layer: int) -> None:
        """Enqueues what computing the layer's K and V would write, and waits for nothing."""
        g, n = self.g, self.num_tokens
        values = truth(g, seed, layer, n)
        position = torch.arange(n, device=CUDA)
        ids = self.tables[g.sliding[layer]][position // g.block_size_tokens]
        for view in self.views:
            part = values[:, view.heads.start : view.heads.start + view.heads.count]
            view.layer(layer).view(torch.int16)[ids, :, :, position % g.block_size_tokens] = part.permute(2, 0, 1, 3)

    def begin(self, reservation: bytes, deadline_s: float = 30.0) -> int:
        message = worker_pb2.Reservation.FromString(reservation)
        for sender in self.senders:
            sender.begin(message, self.block_ids[0], self.num_tokens, deadline_s=deadline_s)
        return message.transfer_id

    def push(self, transfer_id: int, layer: int) -> None:
        for sender in self.senders:
            sender.push_layer(transfer_id, layer, 0, self.num_tokens, self.block_ids[self.g.sliding[layer]], 0)

    def finish(self, transfer_id: int, timeout_s: float = 40.0) -> list[PushResult]:
        results: list[PushResult] = []
        done = threading.Semaphore(0)
        for sender in self.senders:
            sender.finish(transfer_id, lambda result: (results.append(result), done.release()))
        for _ in self.senders:
            if not done.acquire(timeout=timeout_s):
                raise TimeoutError("finish did not call back")
        return results

    def hand_over(
        self, reservation: bytes, seed: int | None, *, pause_at: int = -1, hold_ms: float = 0, pipe=None, deadline_s=30.0
    ) -> dict:
        """A whole transfer. `seed`: fill first; `pause_at`: says "paused" before that layer and waits for a word, with work of hold_ms
        enqueued on the device before the two layers ahead of it, so that these have not landed.

        Returns: digests by decode rank, bytes, error name or empty, seconds from the first push to the last ack
        """
        transfer_id = self.begin(reservation, deadline_s)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for layer in range(self.layers):
            if hold_ms and layer == max(pause_at - 2, 0):
                torch.cuda._sleep(int(hold_ms * 1.6e6))
            if layer == pause_at:
                pipe.send(("paused", None))
                pipe.recv()
            if seed is not None:
                self.fill(seed, layer)
            self.push(transfer_id, layer)
        if pause_at == self.layers:
            pipe.send(("paused", None))
            pipe.recv()
        results = self.finish(transfer_id, deadline_s + 5)
        seconds = time.perf_counter() - began
        error = next((result.error for result in results if result.error), None)
        return {
            "digests": [sum(parts) % 2**64 for parts in zip(*(result.digest_per_rank for result in results), strict=True)],
            "bytes": sum(sum(result.bytes_per_rank) for result in results),
            "error": "" if error is None else f"{type(error).__name__}: {error.message}",
            "seconds": seconds,
        }

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


class Side:
    """What a child process does: commands are names of the current group's methods, or of this class's."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.group: DecodeGroup | PrefillGroup | None = None

    def decode(self, **fields: object) -> int:
        self.drop()
        self.group = DecodeGroup(**fields)
        return os.getpid()

    def prefill(self, **fields: object) -> int:
        self.drop()
        self.group = PrefillGroup(**fields)
        return os.getpid()

    def call(self, module: str, function: str, *arguments: object):
        import importlib

        return getattr(importlib.import_module(module), function)(self, *arguments)

    def drop(self) -> None:
        """Prefill groups go first: what they have mapped should be there until they unmap it."""
        if self.group is not None:
            self.group.close()
        self.group = None
        torch.cuda.empty_cache()

    def serve(self) -> None:
        self.pipe.send(("ready", torch.cuda.get_device_name(0)))
        while True:
            try:
                name, arguments, options = self.pipe.recv()
            except EOFError:
                return
            try:
                if name == "hand_over":
                    options["pipe"] = self.pipe
                target = self if hasattr(self, name) else self.group
                self.pipe.send(("ok", getattr(target, name)(*arguments, **options)))
            except Exception:  # noqa: BLE001 told to the parent
                self.pipe.send(("failed", traceback.format_exc()[-3000:]))


def child(pipe: Connection) -> None:
    torch.set_num_threads(2)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("kv_transfer.transports.choose").setLevel(logging.INFO if os.environ.get("SHOW_CHOICE") else logging.ERROR)
    with contextlib.suppress(KeyboardInterrupt):
        Side(pipe).serve()


class Child:
    """The parent's handle of a process that sees one GPU only."""

    def __init__(self, context, gpu: int):
        self.gpu = gpu
        self.pipe, theirs = context.Pipe()
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        try:
            self.process = context.Process(target=child, args=(theirs,), daemon=True)
            self.process.start()
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
        theirs.close()
        self.is_ready, self.device = False, ""

    def ready(self, timeout_s: float = 90.0) -> Child:
        if not self.is_ready:
            self.device = self.answer(timeout_s)
            self.is_ready = True
        return self

    def tell(self, name: str, *arguments: object, **options: object) -> None:
        self.ready()
        self.pipe.send((name, arguments, options))

    def answer(self, timeout_s: float = 60.0):
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"the process on GPU {self.gpu} has not answered for {timeout_s} s")
        verdict, value = self.pipe.recv()
        if verdict == "failed":
            raise RuntimeError(value)
        return value

    def ask(self, name: str, *arguments: object, timeout_s: float = 60.0, **options: object):
        self.tell(name, *arguments, **options)
        return self.answer(timeout_s)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.join(5)
