"""Real prefill and decode groups as plain processes, without Ray: one process per rank, real sockets, real shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from common.errors import ServingError
from common.proto import types_pb2
from common.rank_spec import RankSpec
from model.build import BuildModel, build_model
from tests.support.pace import within

KEY = b"key of the test cluster, 32 byte"
START_TIMEOUT_S = 90.0
_PRELOAD = ["torch", "grpc.aio", "prefill_worker.rank", "decode_worker.rank", "tests.support.fake_model"]


def rank_spec(role: str, *, tp: int = 1, ep: int = 1, model_path: str = "", **options) -> RankSpec:
    """Rank 0's spec of a group with small pools; `options` as in RankSpec."""
    defaults = {"kv_dtype": "float32", "kv_blocks": 200, "max_batch": 8, "max_model_len": 4096, "lease_s": 2.0}
    return RankSpec(
        pool=f"{role}-pool",
        group=f"{role}-{secrets.token_hex(3)}",
        role=role,
        model_path=str(model_path),
        tp=tp,
        ep=ep,
        rank=0,
        rendezvous=f"127.0.0.1:{_free_port()}" if tp > 1 else "",
        incarnation=secrets.randbits(64),
        key=KEY,
        **(defaults | options),
    )


class Group:
    """The processes of one group. `description` is set once it serves."""

    def __init__(self, spec: RankSpec, build: BuildModel = build_model):
        self.spec = spec
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.description: types_pb2.GroupDescription | None = None
        for rank in range(spec.tp):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(replace(spec, rank=rank), build, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def wait_ready(self) -> Group:
        """Raises: ServingError with what a rank said when it could not start"""
        deadline = time.monotonic() + START_TIMEOUT_S
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise ServingError("not ready in time", rank=rank)
            kind, data = pipe.recv()
            if kind == "error":
                raise ServingError(data, rank=rank)
            if rank == 0:
                self.description = types_pb2.GroupDescription.FromString(data)
        return self

    def kill(self, rank: int | None = None, sig: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one rank or to all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.is_alive():
                os.kill(process.pid, sig)

    def stop(self) -> None:
        """Asks the group to end; kills what has not ended after five seconds."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether all processes ended by themselves in time."""
        deadline = time.monotonic() + within(timeout_s)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return not any(process.is_alive() for process in self.processes)

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]


@contextlib.contextmanager
def running(*specs: RankSpec, build: BuildModel = build_model) -> Iterator[list[Group]]:
    """Starts groups side by side; stops them at the end."""
    groups = [Group(spec, build) for spec in specs]
    try:
        yield [group.wait_ready() for group in groups]
    finally:
        for group in groups:
            group.stop()


def _rank_main(spec: RankSpec, build: BuildModel, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from decode_worker.rank import DecodeRank
    from prefill_worker.rank import PrefillRank

    rank = (PrefillRank if spec.role == "prefill" else DecodeRank)(spec, build)
    try:
        description = rank.start()
    except ServingError as exc:
        pipe.send(("error", f"{type(exc).__name__}: {exc}"))
        return
    pipe.send(("ready", description.SerializeToString() if description else b""))
    while rank.alive():
        try:
            if pipe.poll(0.1):
                pipe.recv()
                rank.stop()
                break
        except (EOFError, OSError):  # the test is gone
            rank.stop()
            break
    reason = rank.wait_ended(timeout_s=4)
    os._exit(1 if reason or rank.alive() else 0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
