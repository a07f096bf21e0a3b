"""GB/s of each KV transport against a plain copy of the same bytes in the same run: memcpy for shm and nixl, one socket for tcp.

    python -m benchmarks.transfer [--transports shm tcp nixl] [--pairs 1-1 1-4 4-1] [--megabytes 0.25 4 64 256] [--out FILE]

The decode ranks are one other process. Rates are those of the links (write and flush, no digest); the digest is timed by itself, and
`whole` is the sender with threads and digest. Blocks: `ordered` as a fresh pool gives them, `aged` a shuffled decode pool (the prefill
pool, with one request at a time, stays in order), `shuffled` both. Medians over rounds of plain copy, link, plain copy.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from common import auth
from common.kv_layout import KVGeometry, head_range, plan_pairs
from common.proto import types_pb2, worker_pb2
from kernels.digest import DigestKey, kv_digest
from kv_transfer.deadline import Deadline
from kv_transfer.memory import SharedBuffer
from kv_transfer.pool_view import PoolView
from kv_transfer.push import Push
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports import nixl
from kv_transfer.transports.base import Link, Target
from kv_transfer.transports.choose import LinkOpener

KEY = b"benchmark"
INCARNATION = 1
LAYERS, HEADS, DIM, BLOCK = 4, 8, 64, 16
BLOCK_BYTES = LAYERS * 2 * HEADS * BLOCK * DIM * 2  # of one block over all layers and heads
SOCKET_PIECE = 1 << 20


def geometry() -> KVGeometry:
    return KVGeometry(LAYERS, HEADS, DIM, BLOCK, "bfloat16", 128, (False,) * LAYERS)


def view_of(memory: torch.Tensor, tp: int, rank: int, num_blocks: int) -> PoolView:
    shape = (LAYERS, num_blocks, 2, head_range(HEADS, tp, rank).count, BLOCK, DIM)
    empty = torch.empty(0, *shape[1:], dtype=torch.bfloat16)
    return PoolView(memory.view(torch.bfloat16).view(shape), empty, geometry(), tp, rank)


def rank_bytes(tp: int, num_blocks: int) -> int:
    return num_blocks * BLOCK_BYTES // HEADS * head_range(HEADS, tp, 0).count


def decode_process(pipe: Connection, tp: int, num_blocks: int, transports: tuple[str, ...]) -> None:
    """All ranks of a decode group, and the far end of the plain socket."""
    torch.set_num_threads(1)
    receivers = []
    for rank in range(tp):
        buffer = SharedBuffer.create(rank_bytes(tp, num_blocks))
        view = view_of(buffer.tensor(), tp, rank, num_blocks)
        options = {"key": KEY, "incarnation": INCARNATION, "listen_host": "127.0.0.1", "transports": transports, "buffer": buffer}
        receivers.append(Receiver(view, **options))
    listener = socket.create_server(("127.0.0.1", 0))
    ranks = [worker_pb2.RankEndpoints(rank=r, endpoints=receiver.endpoints()) for r, receiver in enumerate(receivers)]
    pipe.send((listener.getsockname()[1], [message.SerializeToString() for message in ranks]))
    connection, _ = listener.accept()
    scratch = memoryview(bytearray(SOCKET_PIECE))
    while True:
        command, *arguments = pipe.recv()
        if command == "grant":
            transfer_id, blocks, num_tokens = arguments
            for receiver in receivers:
                receiver.revoke(transfer_id)
                receiver.grant(transfer_id, [worker_pb2.BlockList.FromString(blocks)], num_tokens)
        elif command == "sink":
            left = arguments[0]
            while left:
                left -= connection.recv_into(scratch[: min(left, SOCKET_PIECE)])
            connection.sendall(b"k")
            continue
        else:
            return
        pipe.send(None)


@dataclass
class Decode:
    """The parent's handle of a decode process."""

    tp: int
    num_blocks: int
    transports: tuple[str, ...]

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=decode_process, args=(theirs, self.tp, self.num_blocks, self.transports), daemon=True)
        self.process.start()
        port, ranks = self.pipe.recv()
        self.ranks = [worker_pb2.RankEndpoints.FromString(data) for data in ranks]
        self.socket = socket.create_connection(("127.0.0.1", port))

    def reserve(self, transfer_id: int, ids: list[int], num_tokens: int) -> worker_pb2.Reservation:
        blocks = worker_pb2.BlockList(block_ids=ids, epochs=[1] * len(ids))
        self.pipe.send(("grant", transfer_id, blocks.SerializeToString(), num_tokens))
        self.pipe.recv()
        g = geometry()
        names = ("num_layers", "num_kv_heads", "head_dim", "block_size_tokens", "dtype", "window_tokens", "sliding")
        reservation = worker_pb2.Reservation(
            transfer_id=transfer_id,
            incarnation=INCARNATION,
            layout=types_pb2.Layout(tp=self.tp),
            kv=types_pb2.KVGeometry(**{name: getattr(g, name) for name in names}),
            blocks=[blocks],
            ranks=self.ranks,
        )
        auth.sign(reservation, KEY)
        return reservation

    def plain_socket(self, data: memoryview) -> None:
        self.pipe.send(("sink", len(data)))
        for i in range(0, len(data), SOCKET_PIECE):
            self.socket.sendall(data[i : i + SOCKET_PIECE])
        assert self.socket.recv(1) == b"k"

    def close(self) -> None:
        self.pipe.send(("end",))
        self.process.join(10)
        self.socket.close()


class Prefill:
    """All ranks of a prefill group, their links, and the pushes of one transfer."""

    def __init__(self, tp: int, memory: torch.Tensor, num_blocks: int, transport: str, decode: Decode):
        nbytes = rank_bytes(tp, num_blocks)
        self.views = [view_of(memory[r * nbytes : (r + 1) * nbytes], tp, r, num_blocks) for r in range(tp)]
        self.pairs = plan_pairs(HEADS, tp, decode.tp)
        self.transport = transport
        self.senders = [Sender(view, key=KEY, rank=r, preference=transport) for r, view in enumerate(self.views)]
        openers = [LinkOpener(view, key=KEY, preference=transport, io_timeout_s=30.0) for view in self.views]
        targets = [Target(INCARNATION, r, decode.tp, geometry()) for r in range(decode.tp)]
        self.links: list[Link] = [
            openers[p.src_rank].open(decode.ranks[p.dst_rank].endpoints, targets[p.dst_rank], Deadline(30.0)) for p in self.pairs
        ]

    def pushes(self, transfer_id: int, source_ids: np.ndarray, target_ids: np.ndarray) -> list[tuple[Link, Push]]:
        jobs = []
        for layer, (pair, link) in itertools.product(range(LAYERS), zip(self.pairs, self.links, strict=True)):
            view = self.views[pair.src_rank]
            push = Push(
                transfer_id=transfer_id, incarnation=INCARNATION, layer=layer, tokens=(0, BLOCK * len(source_ids)), first_logical=0,
                source=view.layer(layer), source_ids=source_ids, source_head=pair.src_head, target_ids=target_ids,
                target_epochs=np.ones_like(target_ids), target_head=pair.dst_head, first_head=view.heads.start + pair.src_head,
                num_heads=pair.num_heads,
            )  # fmt: skip
            jobs.append((link, push))
        return jobs

    def whole(self, reservation: worker_pb2.Reservation, source_ids: list[int]) -> None:
        """One transfer as a worker does it: threads and digest."""
        num_tokens, done = BLOCK * len(source_ids), threading.Semaphore(0)
        for sender in self.senders:
            sender.begin(reservation, source_ids, num_tokens)
        for layer, sender in itertools.product(range(LAYERS), self.senders):
            sender.push_layer(reservation.transfer_id, layer, 0, num_tokens, source_ids, 0)
        results = []
        for sender in self.senders:
            sender.finish(reservation.transfer_id, lambda result: (results.append(result), done.release()))
        for _ in self.senders:
            done.acquire()
        assert all(result.error is None for result in results), results

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for link in self.links:
            link.close()


def write_all(jobs: list[tuple[Link, Push]]) -> None:
    deadline = Deadline(120.0)
    for link, push in jobs:
        link.write(push, deadline)
    for link in {id(link): link for link, _ in jobs}.values():
        link.flush(deadline)


def digest_all(jobs: list[tuple[Link, Push]], key: DigestKey) -> None:
    for _, push in jobs:
        kv = push.source[:, :, push.source_head : push.source_head + push.num_heads]
        fields = {"first_logical": 0, "tokens": push.tokens, "layer": push.layer, "first_head": push.first_head, "key": key}
        kv_digest(kv, torch.from_numpy(push.source_ids), **fields)


def seconds(operation: Callable[[], None]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def compare(plain: Callable[[], None], link: Callable[[], None], nbytes: int) -> tuple[float, float, float]:
    """Returns: (median seconds of plain, of link, median of their ratio in neighbouring rounds: on a shared machine both suffer alike)"""
    pairs = []
    for _ in range(9 if nbytes > 100e6 else 31 if nbytes > 1e6 else 151):
        before, middle, after = seconds(plain), seconds(link), seconds(plain)
        pairs.append(((before + after) / 2, middle))
    return median(p for p, _ in pairs), median(x for _, x in pairs), median(p / x for p, x in pairs)


def copy_in_pieces(target: np.ndarray, source: np.ndarray) -> None:
    """One memcpy per layer, as the pushes come; a single one of hundreds of MB bypasses the caches and is another thing."""
    for into, out_of in zip(np.split(target, LAYERS), np.split(source, LAYERS), strict=True):
        np.copyto(into, out_of)


def measure(prefill: Prefill, decode: Decode, order: str, nbytes: int, buffers: tuple[np.ndarray, np.ndarray]) -> dict:
    count = nbytes // BLOCK_BYTES
    rng = random.Random(count)
    source = rng.sample(range(prefill.views[0].full.shape[1]), count) if order == "shuffled" else list(range(count))
    target = list(range(count)) if order == "ordered" else rng.sample(range(decode.num_blocks), count)
    reservation = decode.reserve(count, target, BLOCK * count)
    jobs = prefill.pushes(count, np.array(source), np.array(target))
    row_bytes, num_tokens = DIM * 2, BLOCK * count
    key = DigestKey.derive(KEY, count, num_tokens=num_tokens, row_bytes=row_bytes, num_layers=LAYERS, num_kv_heads=HEADS)
    plain_source, plain_target = (buffer[:nbytes] for buffer in buffers)
    if prefill.transport == "tcp":
        plain = partial(decode.plain_socket, plain_source.data)
    else:
        plain = partial(copy_in_pieces, plain_target, plain_source)
    plain_s, link_s, ratio = compare(plain, lambda: write_all(jobs), nbytes)
    digest_s = median(seconds(lambda: digest_all(jobs, key)) for _ in range(5))
    whole_s = median(seconds(lambda: prefill.whole(reservation, source)) for _ in range(5))
    return {
        "transport": prefill.transport,
        "tp_from": len(prefill.views),
        "tp_to": decode.tp,
        "blocks": order,
        "bytes": nbytes,
        "gb_per_s": round(nbytes / link_s / 1e9, 3),
        "plain_copy_gb_per_s": round(nbytes / plain_s / 1e9, 3),
        "ratio": round(ratio, 3),
        "digest_gb_per_s": round(nbytes / digest_s / 1e9, 3),
        "whole_gb_per_s": round(nbytes / whole_s / 1e9, 3),
        "date": datetime.date.today().isoformat(),
        "device": "cpu",
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip(),
    }


def run(arguments: argparse.Namespace) -> list[dict]:
    sizes = [max(1, round(megabytes * 2**20 / BLOCK_BYTES)) * BLOCK_BYTES for megabytes in arguments.megabytes]
    num_blocks = max(sizes) // BLOCK_BYTES
    memory = torch.randint(-(2**62), 2**62, (num_blocks * BLOCK_BYTES // 8,)).view(torch.uint8)
    buffers = (np.ones(max(sizes), np.uint8), np.zeros(max(sizes), np.uint8))
    records = []
    for tp_from, tp_to in (tuple(map(int, pair.split("-"))) for pair in arguments.pairs):
        for transport in arguments.transports:
            decode = Decode(tp_to, num_blocks, (transport,))
            prefill = Prefill(tp_from, memory, num_blocks, transport, decode)
            records += [measure(prefill, decode, order, n, buffers) for order in arguments.blocks for n in sizes]
            prefill.close()
            decode.close()
    return records


def table(records: list[dict]) -> Table:
    result = Table(title="KV transfer, GB/s (medians; digest and whole beside the link alone)")
    for name in ("transport", "TP", "blocks", "MB", "link", "plain copy", "ratio", "digest", "whole"):
        result.add_column(name, justify="left" if name in ("transport", "TP", "blocks") else "right")
    for r in records:
        goal = {"shm": 0.7, "tcp": 0.6}.get(r["transport"], 0.0)
        color = "green" if r["ratio"] >= goal else "yellow"
        figures = (
            f"{r['gb_per_s']:.2f}",
            f"{r['plain_copy_gb_per_s']:.2f}",
            f"[{color}]{r['ratio']:.0%}[/]",
            f"{r['digest_gb_per_s']:.2f}",
        )
        place = (r["transport"], f"{r['tp_from']} -> {r['tp_to']}", r["blocks"], f"{r['bytes'] / 2**20:g}")
        result.add_row(*place, *figures, f"{r['whole_gb_per_s']:.2f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ["shm", "tcp"] + ["nixl"] * nixl.is_installed()
    parser.add_argument("--transports", nargs="+", choices=known, default=known)
    parser.add_argument("--pairs", nargs="+", default=["1-1", "1-4", "4-1"], help="prefill TP - decode TP")
    parser.add_argument("--megabytes", nargs="+", type=float, default=[0.25, 4, 64, 256], help="KV of one transfer [MiB]")
    parser.add_argument("--blocks", nargs="+", choices=["ordered", "aged", "shuffled"], default=["ordered", "aged", "shuffled"])
    parser.add_argument("--out", type=Path, help="write the records as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = run(arguments)
    Console().print(table(records))
    if arguments.out:
        arguments.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
