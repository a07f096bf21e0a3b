"""A whole cluster for fault runs: real Ray actors, controller and router over the fake model; and hands that kill and stop them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.router.directory import ControllerDirectory
from cluster.state import Process, spawn_held
from cluster.up import bring_up, take_down
from common.config import Config, parse_config
from common.proto import control_pb2, router_pb2, router_pb2_grpc, types_pb2
from tests.support.faults.oracle import Fault, Oracle
from tests.support.faults.plan import FaultSettings
from tests.support.faults.ranks import HOOK

ROOT = Path(__file__).parents[3]
SERVICE = "tandem.router.v1.Router"


@dataclass(frozen=True)
class PoolPlan:
    """`replicas` groups of `tp` ranks."""

    role: str
    tp: int
    replicas: int


SMALL = (PoolPlan("prefill", 1, 2), PoolPlan("prefill", 2, 1), PoolPlan("decode", 1, 2))


def fault_config(folder: Path, pools: Sequence[PoolPlan] = SMALL, **changes) -> Config:
    """Leases and timeouts are the defaults: a busy machine must not take a group for dead."""
    tree = {
        "model": {"path": str(folder / "checkpoint"), "max_model_len": 4096},
        "pools": [
            {
                "name": f"{pool.role}-tp{pool.tp}",
                "role": pool.role,
                "layout": {"tp": pool.tp, "ep": pool.tp if pool.role == "decode" else 1},
                "replicas": {"min": pool.replicas, "max": pool.replicas},
                "kv_blocks": 1024,
                "max_batch": 64,
                "chunk_tokens": 64,
            }
            for pool in pools
        ],
        "kv": {"dtype": "float32"},
        "router": {"listen": "127.0.0.1:0"},
        "autoscale": {"gpu_budget": sum(pool.tp * pool.replicas for pool in pools)},
        "cluster": {"device": "cpu", "compute_dtype": "float32"},
    }
    for section, values in changes.items():
        tree[section] = {**tree[section], **values}
    return parse_config(tree)


@dataclass
class FaultBed:
    name: str
    folder: Path
    config: Config
    router_address: str
    controller_address: str
    router: Process
    oracle: Oracle = field(default_factory=Oracle)
    groups: dict[str, types_pb2.GroupDescription] = field(default_factory=dict)

    async def follow(self) -> None:
        """Keeps `groups` as the controller says. Runs until cancelled."""
        async with contextlib.aclosing(ControllerDirectory(self.controller_address).watch()) as sets:
            async for group_set in sets:
                self._take(group_set)

    def _take(self, group_set: control_pb2.GroupSet) -> None:
        self.groups = {group.group: group for group in group_set.groups}

    def wanted_groups(self) -> int:
        return sum(pool.replicas.min for pool in self.config.pools)

    async def until_whole(self, timeout_s: float = 120.0) -> float:
        """Waits until every group is there and the router thinks well of it. Returns: seconds it took"""
        began = time.monotonic()
        async with grpc.aio.insecure_channel(self.router_address) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            while True:
                loads = await stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10)
                if sum(group.healthy for group in loads.groups) == self.wanted_groups() == len(self.groups):
                    return time.monotonic() - began
                if time.monotonic() - began > timeout_s:
                    raise TimeoutError(f"{len(self.groups)} of {self.wanted_groups()} groups: {loads}")
                await asyncio.sleep(0.1)

    async def until_spare(self, timeout_s: float = 120.0) -> list[types_pb2.GroupDescription]:
        """Waits until some role has two groups that the router thinks well of. Returns: those that another can stand in for

        Raises: TimeoutError
        """
        began = time.monotonic()
        async with grpc.aio.insecure_channel(self.router_address) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            while time.monotonic() - began < timeout_s:
                loads = await stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10)
                healthy = [group.description for group in loads.groups if group.healthy and group.description.group in self.groups]
                roles = Counter(group.role for group in healthy)
                spare = [group for group in healthy if roles[group.role] > 1]
                if spare:
                    return sorted(spare, key=lambda group: group.group)
                await asyncio.sleep(0.1)
        raise TimeoutError(f"no role had two groups to serve: {loads}")

    async def until_idle(self, timeout_s: float = 30.0, router_address: str = "") -> float:
        """Waits until every block is free and nothing runs. Returns: seconds it took. Raises: TimeoutError with what is held"""
        began = time.monotonic()
        async with grpc.aio.insecure_channel(router_address or self.router_address) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            while True:
                loads = await stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10)
                held = held_in(loads)
                if not held:
                    return time.monotonic() - began
                if time.monotonic() - began > timeout_s:
                    raise TimeoutError("; ".join(held))
                await asyncio.sleep(0.02)

    # -- faults ------------------------------------------------------------------------------------------------------------------------

    def signal_rank(self, group: types_pb2.GroupDescription, rank: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(group.ranks[rank].pid, number)

    def kill(self, group: types_pb2.GroupDescription, rank: int) -> None:
        now_s = time.monotonic()
        self.signal_rank(group, rank, signal.SIGKILL)
        self.oracle.faults.append(Fault("kill", group.group, now_s, now_s))

    async def stop(self, group: types_pb2.GroupDescription, rank: int, seconds: float) -> None:
        """The process stands still for a while."""
        began_s = time.monotonic()
        self.signal_rank(group, rank, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.signal_rank(group, rank, signal.SIGCONT)
            self.oracle.faults.append(Fault("stop", group.group, began_s, time.monotonic()))

    # -- the router --------------------------------------------------------------------------------------------------------------------

    def kill_router(self) -> None:
        os.kill(self.router.pid, signal.SIGKILL)
        os.waitpid(self.router.pid, 0)

    async def start_router(self, timeout_s: float = 30.0) -> tuple[Process, str, float]:
        """Another router over the same groups. Returns: its process, host:port, seconds until it served"""
        ready = self.folder / f"router-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "cluster.cli", "router", "--config", str(self._config_file()), "--controller"]
        command += [self.controller_address, "--ready-file", str(ready)]
        began = time.monotonic()
        process = spawn(command, self.folder / f"{ready.name}.log", dict(os.environ))
        while not (ready.exists() and await serves(ready.read_text())):
            if time.monotonic() - began > timeout_s:
                raise TimeoutError((self.folder / f"{ready.name}.log").read_text()[-500:])
            await asyncio.sleep(0.02)
        return process, ready.read_text(), time.monotonic() - began

    def _config_file(self) -> Path:
        path = self.folder / "fault-config.json"
        path.write_text(self.config.model_dump_json())
        return path


def spawn(command: list[str], log: Path, env: Mapping[str, str]) -> Process:
    held = spawn_held(command, log, env)
    held.release()
    return held.process


async def serves(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=1)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


def held_in(loads: router_pb2.GetLoadsResponse) -> list[str]:
    """What is not at rest: one sentence per group."""
    held = [f"{loads.running_requests} requests run"] if loads.running_requests else []
    for group in loads.groups:
        load = group.load
        blocks = load.total_full_blocks - load.free_full_blocks + load.total_sliding_blocks - load.free_sliding_blocks
        if blocks or load.running or load.waiting or load.transfers:
            counts = f"{blocks} blocks, {load.running} running, {load.waiting} waiting, {load.transfers} transfers"
            held.append(f"{group.description.group}: {counts}")
    return held


@contextlib.contextmanager
def fault_bed(folder: Path, config: Config, settings: FaultSettings, name: str = "faults") -> Iterator[FaultBed]:
    """Raises what `bring_up` raises; always takes down what it started, and leaves no process of it."""
    from model.fixture import write_random_fixture

    if not config.model.path.exists():
        write_random_fixture(config.model.path, vocab_size=1024)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    extra = {"TANDEM_STATE_DIR": str(folder / "state"), "PYTHONPATH": paths, **HOOK, **settings.to_environment()}
    before = {key: os.environ.get(key) for key in extra}
    os.environ.update(extra)
    try:
        state = bring_up(config, name)
        assert state.router_process is not None
        yield FaultBed(name, folder, config, str(state.router_address), str(state.controller_address), state.router_process)
    finally:
        take_down(name)
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
