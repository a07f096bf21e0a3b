"""What a rank process of the gloo tests does. In a file of its own, so that a spawned process can import it."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as dist

from model.config import load_model_config
from model.gpt_oss import GptOss
from model.parallel import TorchGroup
from model.weights import load_shard
from tests.support.paged_run import PagedRun


def rank_main(rank: int, size: int, store: str, path: Path, prompts: list[list[int]], results: Queue) -> None:
    """Joins the group through a file, checks the collectives, runs the prompts. Puts (rank, gathered, summed, logits or None)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    group = TorchGroup()
    gathered = group.all_gather(torch.full((2, 3), float(rank))[:, :2], dim=1)
    summed = group.all_reduce(torch.tensor([1.0, rank]))
    config = load_model_config(path)
    weights = load_shard(path, config, tp=size, ep=size, rank=rank, device="cpu", dtype=torch.float32, weights="mxfp4")
    run = PagedRun(config, GptOss(config, weights, group, "cpu"), tp=size, rank=rank, num_sequences=len(prompts))
    logits = run.step(prompts)
    results.put((rank, gathered.tolist(), summed.tolist(), None if logits is None else logits.numpy()))
    dist.destroy_process_group()
