"""Ray's head is killed and started again, its state in Redis: streams go on, new requests are served, no group is started anew."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ray

from benchmarks.faults.result import Result
from benchmarks.faults.storms import following, judge_rest
from cluster.local_ray import free_port
from cluster.state import Process
from tests.support.faults.bed import FaultBed, PoolPlan, fault_bed, fault_config, spawn
from tests.support.faults.load import Clients, Shape
from tests.support.faults.oracle import percentile
from tests.support.faults.plan import FaultSettings
from tests.support.faults.ranks import HOOK
from tests.support.router_bed import until

POOLS = (PoolPlan("prefill", 1, 1), PoolPlan("decode", 1, 1))
LONG = Shape(prompt_tokens=(8, 40), max_tokens=(100, 200), seeded_in=4)
START_S = 90.0


class RayCluster:
    """Redis, a head without CPUs and one node for the ranks, all on this machine. Raises: FileNotFoundError without redis-server"""

    def __init__(self, folder: Path, environment: dict[str, str]):
        redis = shutil.which("redis-server")
        if redis is None:
            raise FileNotFoundError("redis-server, which keeps the head's state, is not installed")
        self._folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        port = free_port()
        self._env = {**os.environ, **environment, "RAY_REDIS_ADDRESS": f"127.0.0.1:{port}", "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}
        self._processes: list[Process] = []
        self._redis = spawn(
            [redis, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)], folder / "redis.log", self._env
        )

    def start(self) -> None:
        self.head = self._start_head()
        self._start("node", ["--address", self.address, "--num-cpus=16"])

    def _start_head(self) -> Process:
        return self._start("head", ["--head", f"--port={self.address.rpartition(':')[2]}", "--num-cpus=0", "--include-dashboard=false"])

    def _start(self, name: str, options: list[str]) -> Process:
        log = self._folder / f"{name}-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
        command += [*options, f"--object-store-memory={100 << 20}"]
        if name == "head":
            command.append(f"--temp-dir={self._folder / 'ray'}")
        process = spawn(command, log, self._env)
        self._processes.append(process)
        deadline = time.monotonic() + START_S
        while b"will now block forever" not in log.read_bytes():
            if process.is_dead() or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start: {log.read_text()[-600:]}")
            time.sleep(0.1)
        return process

    def kill_head(self) -> None:
        """All processes of the head node at once, the controller with them."""
        for pid in [*descendants(self.head.pid), self.head.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(self.head.pid, 0)

    def restart_head(self) -> None:
        # Ray starts no head beside a node of the cluster that it noted last; heads and nodes of a real cluster are machines of their own
        (self._folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        self.head = self._start_head()

    def stop(self) -> None:
        for process in self._processes:
            for pid in descendants(process.pid) if not process.is_dead() else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.stop(5)
        self._redis.stop(5)


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


@contextlib.contextmanager
def ray_cluster(folder: Path, settings: FaultSettings) -> Iterator[RayCluster]:
    cluster = RayCluster(folder, {**HOOK, **settings.to_environment(), "PYTHONPATH": str(Path(__file__).parents[2])})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def run_head(folder: Path, size: int, seed: int) -> Result:
    settings = FaultSettings(str(folder), seed, decode_s=0.02)
    with ray_cluster(folder, settings) as cluster:
        config = fault_config(folder, POOLS, cluster={"ray_address": cluster.address})
        with fault_bed(folder, config, settings) as bed:
            ray.shutdown()  # a driver dies with the node that it is attached to
            return asyncio.run(_head(bed, cluster, size, seed))


async def _head(bed: FaultBed, cluster: RayCluster, size: int, seed: int) -> Result:
    result, controller_back_s = Result(), []
    over = asyncio.Event()
    async with following(bed):
        await bed.until_whole()
        ranks = {process.pid for group in bed.groups.values() for process in group.ranks}
        clients = Clients(bed.router_address, LONG, bed.oracle, seed=seed)
        load = asyncio.create_task(clients.until(over.is_set, 6))
        for _ in range(size):
            seen = len(bed.oracle.records)
            await until(lambda seen=seen: len(bed.oracle.records) >= seen + 6, 120.0)
            cluster.kill_head()
            killed = time.monotonic()
            ended = sum(bool(r.ends) for r in bed.oracle.records)
            await until(lambda ended=ended: sum(bool(r.ends) for r in bed.oracle.records) >= ended + 8, 120.0)  # served without a head
            await asyncio.to_thread(cluster.restart_head)
            bed.groups.clear()
            await until(lambda: len(bed.groups) == bed.wanted_groups(), 120.0)
            controller_back_s.append(time.monotonic() - killed)
        over.set()
        await load
        await bed.until_whole()
        await judge_rest(bed, result)
        await clients.close()
        left = {process.pid for group in bed.groups.values() for process in group.ranks}
    result.judge(bed.oracle)
    result.must("success_percent", bed.oracle.success_percent(), at_least=100)
    result.must("ranks_started_anew", len(left - ranks), at_most=0)
    result.note(kills=size, controller_back_p50_s=percentile(controller_back_s, 50))
    return result
