"""Router throughput with fake engines: tokens/s streamed through one router process.

Three processes: fake prefill and decode groups, the router, the client; so two cores carry all three. The decode group sends one frame per
step with all streams' tokens; the router sends one message per stream and step while the client keeps up.

    python -m benchmarks.router --streams 64 --step-ms 3 --seconds 5 --out result.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import time
from pathlib import Path

import grpc

from common.proto import router_pb2, router_pb2_grpc, worker_pb2
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup
from tests.support.router_bed import make_router, request_of, until


class LeanDecodeGroup(FakeDecodeGroup):
    """Costs next to nothing per token, so that the cores are left to what is measured, and never falls behind its pace for good."""

    def _advance(self, sequence) -> worker_pb2.SequenceOutput:
        index = sequence.next_index
        sequence.next_index += 1
        return worker_pb2.SequenceOutput(internal_id=sequence.work.internal_id, first_index=index, token_ids=(100_000 + index,))

    async def _step_forever(self) -> None:
        due = time.monotonic()
        while True:
            due += self.step_ms / 1e3
            await asyncio.sleep(due - time.monotonic())
            outputs: dict[str, list] = {}
            for sequence in self.running:
                outputs.setdefault(sequence.router_id, []).append(self._advance(sequence))
            for router_id, items in outputs.items():
                frame = worker_pb2.StepFrame(step=next(self._steps), outputs=items, load=self.load())
                self._subscribers[router_id].frames.put_nowait(frame)


def run_groups(pipe, step_ms: float) -> None:
    async def main() -> None:
        prefill = FakePrefillGroup(prefill_ms=lambda tokens: 0.1)
        decode = LeanDecodeGroup(step_ms=step_ms, max_batch=1024, capacity_tokens=1 << 26)
        await prefill.start()
        await decode.start()
        pipe.send([prefill.address, decode.address])
        await asyncio.to_thread(pipe.recv)
        pipe.send(time.process_time())
        await asyncio.gather(prefill.kill(), decode.kill())

    asyncio.run(main())


def run_router(pipe, addresses: list[str]) -> None:
    from cluster.router.directory import StaticDirectory

    async def main() -> None:
        router = make_router()
        follow = asyncio.create_task(router.pools.follow(StaticDirectory(addresses)))
        pipe.send(await router.server.start("127.0.0.1:0"))
        while await asyncio.to_thread(pipe.recv) == "cpu":
            pipe.send(time.process_time())
        follow.cancel()
        await router.server.drain(0)
        await router.pools.close()

    asyncio.run(main())


async def run_client(address: str, streams: int, seconds: float, router_pipe) -> dict:
    """Holds `streams` requests open until each has streamed for `seconds`; rates count what arrived between two instants of full load."""
    counts = {"tokens": 0, "messages": 0}
    gaps_ms: list[float] = []
    is_counting = False

    async def one(stub, i: int) -> None:
        last = 0.0
        async for response in stub.Generate(request_of((i, 1, 2), max_tokens=100_000)):
            now = time.perf_counter()
            if is_counting:
                counts["tokens"] += len(response.chunk.token_ids)
                counts["messages"] += 1
                if last:
                    gaps_ms.append((now - last) * 1e3)
            last = now

    async with grpc.aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        await until(lambda: _is_ready(stub))
        tasks = [asyncio.create_task(one(stub, i)) for i in range(streams)]
        await asyncio.sleep(1.5)
        router_pipe.send("cpu")
        router_before = await asyncio.to_thread(router_pipe.recv)
        own_before, began, is_counting = time.process_time(), time.perf_counter(), True
        await asyncio.sleep(seconds)
        is_counting, took = False, time.perf_counter() - began
        own = time.process_time() - own_before
        router_pipe.send("cpu")
        router = await asyncio.to_thread(router_pipe.recv) - router_before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps_ms.sort()
    return {
        "tokens_per_s": counts["tokens"] / took,
        "messages_per_s": counts["messages"] / took,
        "router_cpu_us_per_token": router / counts["tokens"] * 1e6,
        "router_cpu_share": router / took,
        "client_cpu_share": own / took,
        "gap_p50_ms": statistics.median(gaps_ms),
        "gap_p99_ms": gaps_ms[int(len(gaps_ms) * 0.99)],
    }


async def _is_ready(stub) -> bool:
    loads = await stub.GetLoads(router_pb2.GetLoadsRequest())
    return sum(group.healthy for group in loads.groups) == 2


def measure(streams: int, step_ms: float, seconds: float) -> dict:
    context = multiprocessing.get_context("spawn")
    group_pipe, group_end = context.Pipe()
    router_pipe, router_end = context.Pipe()
    groups = context.Process(target=run_groups, args=(group_end, step_ms), daemon=True)
    groups.start()
    router = context.Process(target=run_router, args=(router_end, group_pipe.recv()), daemon=True)
    router.start()
    try:
        result = asyncio.run(run_client(router_pipe.recv(), streams, seconds, router_pipe))
        router_pipe.send("end")
        group_pipe.send("end")
        return {"streams": streams, "step_ms": step_ms, "offered_tokens_per_s": streams / step_ms * 1e3} | result
    finally:
        for process in (router, groups):
            process.join(5)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[3.2, 2.0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, grpcio {grpc.__version__}")
    print("streams  step ms  offered/s   tokens/s  messages/s  router us/token  router CPU  client CPU  gap p50  gap p99 ms")
    records: list[dict] = []
    for streams in args.streams:
        for step_ms in args.step_ms:
            r = measure(streams, step_ms, args.seconds)
            records.append(r)
            print(
                f"{streams:7d} {step_ms:8.1f} {r['offered_tokens_per_s']:10.0f} {r['tokens_per_s']:10.0f} {r['messages_per_s']:11.0f} "
                f"{r['router_cpu_us_per_token']:16.1f} {r['router_cpu_share']:11.2f} {r['client_cpu_share']:11.2f} "
                f"{r['gap_p50_ms']:8.2f} {r['gap_p99_ms']:11.2f}"
            )
    if args.out is not None:
        facts = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "grpcio": grpc.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        args.out.write_text(json.dumps([facts | record for record in records], indent=1) + "\n")


if __name__ == "__main__":
    main()
