"""What a rank process of the gloo tests does. In a file of its own, so that a spawned process can import it."""

from __future__ import annotations

import socket
from multiprocessing.queues import Queue
from pathlib import Path

import torch

from model.config import load_model_config
from model.device_group import open_device_group
from model.gpt_oss import GptOss
from model.star import StarListener, join_star
from model.star_group import StarGroup
from model.weights import load_shard
from tests.support.paged_run import PagedRun

KEY = b"0123456789abcdef0123456789abcdef"


def join(rank: int, size: int, address: str) -> StarGroup:
    if rank:
        return StarGroup(rank, size, [join_star(address, KEY, rank, "compute", 60)])
    listener = StarListener(address, KEY)
    try:
        return StarGroup(0, size, listener.accept(size, ("compute",), 60)["compute"])
    finally:
        listener.close()


def rank_main(rank: int, size: int, address: str, path: Path, prompts: list[list[int]], results: Queue) -> None:
    """Joins the group as GPU ranks do, checks the collectives, runs the prompts. Puts (rank, gathered, summed, logits or None)."""
    torch.set_num_threads(1)
    star = join(rank, size, address)
    group, end = open_device_group(star, backend="gloo")
    star.close()
    gathered = group.all_gather(torch.full((2, 3), float(rank))[:, :2], dim=1)
    pending = group.start_all_reduce(torch.tensor([1.0, rank]))
    summed = pending()
    config = load_model_config(path)
    weights = load_shard(path, config, tp=size, ep=size, rank=rank, device="cpu", dtype=torch.float32, weights="mxfp4")
    run = PagedRun(config, GptOss(config, weights, group, "cpu"), tp=size, rank=rank, num_sequences=len(prompts))
    logits = run.step(prompts)
    results.put((rank, gathered.tolist(), summed.tolist(), None if logits is None else logits.numpy()))
    end()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
