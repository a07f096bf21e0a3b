"""Sums over the ranks of a decode group: the one-barrier kernel against a reference and against NCCL, by size, in a CUDA graph.

    python3 benchmarks/all_reduce.py --ranks 2 --out DIR [--weights fp8]

One process a rank, each with a GPU of its own where there are as many, else several on one GPU (then times mean nothing, and NCCL, which
refuses that, is left out). Checks: bit-equal to the twin on all ranks, eager and replayed, 1,000 meetings back to back; the tiny trained
model served by two ranks, its experts in the format asked for, from its checkpoint to tokens, against the plain forward; a rank that stays
away is named by the others and no wait ends late. Writes DIR/all_reduce.json: `{ranks, batch, columns, one_shot_us, with_norm_us, nccl_us,
device, torch, date}`, times as the slowest rank's median.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import socket
import statistics
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.decode_served import check_served
from common.rank_spec import CUDA_WEIGHTS, RankSpec
from kernels import cuda_library
from kernels.peers import PeerLayout, Peers, missing_rank, sum_rows_ref
from model.group import GroupLinks, open_group
from model.peer_memory import open_peers
from model.weights import WeightFormat

COLUMNS, BATCHES, VOCAB = 2880, (1, 2, 4, 8, 16, 32, 64, 128), 201088
MEETINGS_A_GRAPH, ROUNDS = 72, 30
EPS = 1e-5
LIMIT_S = 60.0  # after which a rank tells where it hangs, and ends


def parts_of(ranks: int, rows: int, seed: int) -> torch.Tensor:
    """[R, B, C] bf16, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ranks, rows, COLUMNS, generator=generator).bfloat16()


class Bench:
    """One rank."""

    def __init__(self, rank: int, ranks: int, rendezvous: str):
        self.rank, self.ranks = rank, ranks
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        spec = RankSpec("bench", "g", "decode", "", ranks, ranks, rank, rendezvous, 1, b"k" * 32, device="cuda")
        self.links: GroupLinks = open_group(spec)
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.layout = PeerLayout(ranks, 128, COLUMNS, VOCAB)
        self.peers = self.join(5.0)
        generator = torch.Generator().manual_seed(1)
        self.bias, self.norm = (torch.randn(COLUMNS, generator=generator).bfloat16().to(self.device) for _ in range(2))

    def join(self, timeout_s: float) -> Peers:
        return open_peers(self.links.compute, self.layout, self.status, timeout_s=timeout_s)

    def meet(self) -> None:
        torch.cuda.synchronize()
        self.links.compute.all_reduce(torch.zeros(1))

    def check_sums(self, meetings: int) -> str:
        for rows in (1, 3, 33, 128):
            parts = parts_of(self.ranks, rows, rows)
            mine, want = parts[self.rank].to(self.device), torch.zeros(rows, COLUMNS, dtype=torch.bfloat16)
            for _ in range(5):
                want, _ = sum_rows_ref(parts, want, bias=self.bias.cpu())
            residual = torch.zeros_like(want, device=self.device)
            for _ in range(5):
                self.peers.sum_projection(mine, self.bias, residual)
            assert torch.equal(residual.cpu(), want), f"rank {self.rank}, {rows} rows: not the twin's bits"
            graph = self.capture(lambda mine=mine, residual=residual: self.peers.sum_projection(mine, self.bias, residual), 5)
            residual.zero_()
            self.meet()
            graph.replay()
            assert torch.equal(residual.cpu(), want), f"rank {self.rank}, {rows} rows: a replay is not the twin's bits"
        count, rows = 0, 7
        parts = parts_of(self.ranks, rows, 9)
        mine, residual = parts[self.rank].to(self.device), torch.zeros(rows, COLUMNS, dtype=torch.bfloat16, device=self.device)
        want = residual.cpu()
        while count < meetings:  # without a look in between: ranks drift apart as far as the barrier lets them
            self.peers.sum_projection(mine, self.bias, residual)
            residual.mul_(0.5)
            want = sum_rows_ref(parts, want, bias=self.bias.cpu())[0].mul_(0.5)
            count += 1
        assert torch.equal(residual.cpu(), want), f"rank {self.rank}: wrong after {meetings} meetings"
        assert missing_rank(int(self.status)) is None
        return f"sums are the twin's bits, eager and replayed, also {meetings} in a row"

    def check_tokens(self) -> str:
        generator = torch.Generator().manual_seed(3)
        logits, words = torch.randn(5, VOCAB, generator=generator), VOCAB // self.ranks
        mine = logits[:, self.rank * words : (self.rank + 1) * words].contiguous().to(self.device)
        for _ in range(3):
            self.peers.push_logits(mine, self.rank * words)
            tokens = torch.full((5,), 7, dtype=torch.int32, device=self.device)
            if self.rank == 0:
                assert torch.equal(self.peers.logits[:5].cpu(), logits), "logits on rank 0"
                tokens.copy_(self.peers.logits[:5].argmax(-1))
            self.peers.spread_tokens(tokens)
            assert torch.equal(tokens.cpu(), logits.argmax(-1).int()), f"rank {self.rank}: tokens"
        return "logits reach rank 0, its tokens all"

    def check_absent(self) -> str:
        """The last rank stays away for a while: the others name it at their deadline, and later meetings cost nothing."""
        timeout_s = 0.5
        peers = self.join(timeout_s)
        self.meet()
        took = 0.0
        if self.rank != self.ranks - 1:
            residual = torch.zeros(4, COLUMNS, dtype=torch.bfloat16, device=self.device)
            started = time.monotonic()
            for _ in range(100):
                peers.sum_projection(residual, self.bias, residual)
            torch.cuda.synchronize()
            took = time.monotonic() - started
            assert missing_rank(int(self.status)) is not None, "nobody missed the absent rank"
            assert took < timeout_s + 1.0, f"{took:.2f} s for 100 meetings without a rank"
        self.meet()
        self.status.zero_()
        return f"an absent rank is named after {timeout_s} s; 100 meetings without it took {took:.2f} s"

    def capture(self, work, times: int) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads go on meanwhile
            for _ in range(times):
                work()
        return graph

    def time_us(self, work) -> float:
        """Microseconds of one call inside a graph of many: this rank's median."""
        graph = self.capture(work, MEETINGS_A_GRAPH)
        times = []
        for _ in range(ROUNDS):
            self.meet()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # brings the ranks together; what is timed starts at the same time everywhere
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / MEETINGS_A_GRAPH)
        return statistics.median(times)

    def times(self, with_nccl: bool) -> list[dict]:
        rows_of = []
        for rows in BATCHES:
            x = torch.randn(rows, COLUMNS, device=self.device).bfloat16()
            pairs = torch.randn(rows, 4, COLUMNS, device=self.device).bfloat16()
            ids = torch.randint(0, 8 * self.ranks, (rows, 4), device=self.device, dtype=torch.int32)
            weights, residual = torch.rand(rows, 4, device=self.device), torch.zeros_like(x)
            normed = torch.empty_like(x)

            def one_shot(x=x, residual=residual) -> None:
                self.peers.sum_projection(x, self.bias, residual)

            def with_norm(pairs=pairs, ids=ids, weights=weights, residual=residual, normed=normed) -> None:
                self.peers.sum_experts_norm(
                    pairs, ids, weights, residual, self.norm, eps=EPS, first_expert=8 * self.rank, num_local_experts=8, normed=normed
                )

            row = {"batch": rows, "one_shot_us": self.time_us(one_shot), "with_norm_us": self.time_us(with_norm)}
            row["nccl_us"] = self.time_us(lambda x=x: dist.all_reduce(x)) if with_nccl else None
            rows_of.append(row)
        return rows_of


def rank_main(
    rank: int, ranks: int, gpus: int, rendezvous: str, store: str, meetings: int, weights: WeightFormat, pipe: Connection
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank % gpus)  # as under Ray: a process sees its own GPU alone
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    bench = Bench(rank, ranks, rendezvous)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (2 * ranks)))  # ranks that take every core each wait for each other
    checks = [partial(bench.check_sums, meetings), bench.check_tokens, bench.check_absent]
    if ranks == 2:  # the tiny model has two KV heads
        checks.append(partial(check_served, group=bench.links.compute, weights=weights))
    for check in checks:
        line = check()
        if rank == 0:
            print(line, flush=True)
    with_nccl = gpus >= ranks
    if with_nccl:
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=bench.device)
        dist.all_reduce(torch.zeros(8, device=bench.device))
    pipe.send(bench.times(with_nccl) if with_nccl else [])
    bench.meet()
    if with_nccl:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--meetings", type=int, default=1000)
    parser.add_argument("--weights", choices=CUDA_WEIGHTS["decode"], default="mxfp4")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cuda_library.build_all()
    gpus = min(torch.cuda.device_count(), args.ranks)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"
    store = args.out.absolute() / f"nccl-store-{os.getpid()}"
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(args.ranks):
        ours, theirs = context.Pipe(duplex=False)
        told = (rank, args.ranks, gpus, rendezvous, str(store), args.meetings, args.weights, theirs)
        process = context.Process(target=rank_main, args=told)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = [pipe.recv() for pipe in pipes]  # EOFError: a rank died; its traceback is above
    finally:
        for process in processes:
            process.join(30)
            process.kill()
        store.unlink(missing_ok=True)
    facts = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }  # fmt: skip
    records = []
    for rows in zip(*results, strict=True):
        slowest = {name: None if rows[0][name] is None else round(max(row[name] for row in rows), 2) for name in rows[0]}
        records.append({"ranks": args.ranks, "columns": COLUMNS, **slowest, **facts})
        print("  ".join(f"{name} {value}" for name, value in slowest.items()))
    (args.out / "all_reduce.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
