"""Collectives: the same answers from one rank alone, from threads, and from real processes over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.gpt_oss import GptOss
from model.parallel import LocalGroup
from model.weights import load_shard
from tests.support.gloo_rank import free_address, rank_main
from tests.support.paged_run import PagedRun
from tests.support.thread_group import ThreadGroup, run_ranks
from tests.support.tolerance import FP32_LOGITS, assert_close

PROMPTS = [[5, 900, 17], list(range(3, 140))]


def test_one_rank_alone_keeps_its_tensor():
    t, group = torch.arange(6.0).view(2, 3), LocalGroup()
    assert group.all_reduce(t) is t
    assert torch.equal(group.all_gather(t, dim=1), torch.arange(6.0).view(2, 3))
    assert (group.rank, group.size) == (0, 1)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_threads_sum_in_place_and_gather_in_rank_order(size: int):
    def both(group: ThreadGroup) -> tuple[bool, list[float], list[list[float]]]:
        t = torch.tensor([1.0, group.rank])
        same = group.all_reduce(t) is t
        return same, t.tolist(), group.all_gather(torch.full((2, 1), float(group.rank)), dim=1).tolist()

    ranks = [float(rank) for rank in range(size)]
    assert run_ranks(size, both) == [(True, [float(size), sum(ranks)], [ranks, ranks])] * size


def test_two_processes_over_gloo_equal_one_rank(tiny):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    args = (2, free_address(), tiny.path, PROMPTS, results)
    processes = [context.Process(target=rank_main, args=(rank, *args)) for rank in range(2)]
    for process in processes:
        process.start()
    answers = {rank: rest for rank, *rest in (results.get(timeout=100) for _ in processes)}
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    for gathered, summed, _ in answers.values():
        assert gathered == [[0.0, 0.0, 1.0, 1.0]] * 2
        assert summed == [2.0, 1.0]
    assert answers[1][2] is None
    assert_close(torch.from_numpy(answers[0][2]), one_rank(tiny)([*PROMPTS]), FP32_LOGITS, "gloo, 2 ranks")


def one_rank(tiny) -> Callable[[list[list[int]]], Tensor]:
    weights = load_shard(tiny.path, tiny.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")
    return PagedRun(tiny.config, GptOss(tiny.config, weights, LocalGroup(), "cpu"), num_sequences=2).step
