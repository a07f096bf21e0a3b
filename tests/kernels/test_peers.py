"""The meetings of a decode group's ranks: the kernels' own source, run on the CPU with a thread for each rank, against plain torch."""

from __future__ import annotations

import pytest
import torch

from common.errors import ShapeError
from kernels.peers import PeerLayout, missing_rank, sum_rows_ref
from kernels.sampling_cuda import BAD_LOGITS, SamplingScratch
from tests.support.emulated_cuda import emulated  # noqa: F401
from tests.support.emulated_peers import emulated_peers
from tests.support.thread_group import run_ranks

C, VOCAB, EPS = 256, 64, 1e-5


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator).bfloat16()


@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (2, 33), (4, 7), (8, 3)])
def test_sums_are_the_twins_bit_for_bit_on_every_rank(emulated, ranks, rows):  # noqa: F811
    g = torch.Generator().manual_seed(ranks * rows)
    rounds = [(randn(g, ranks, rows, C), randn(g, C)) for _ in range(5)]
    start = randn(g, rows, C)
    peers = emulated_peers(PeerLayout(ranks, rows, C, VOCAB))

    def rank_main(group):
        residual = start.clone()
        for parts, bias in rounds:  # without waiting in between: a fast rank is a meeting ahead of a slow one
            peers[group.rank].sum_projection(parts[group.rank], bias, residual)
        return residual

    want = start
    for parts, bias in rounds:
        want, _ = sum_rows_ref(parts, want, bias=bias)
    for got in run_ranks(ranks, rank_main):
        assert torch.equal(got, want)


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_of_all_ranks_meet_and_are_normed(emulated, ranks):  # noqa: F811
    g = torch.Generator().manual_seed(ranks)
    rows, experts = 9, 4 * ranks
    ids = torch.stack([torch.randperm(experts, generator=g)[:4] for _ in range(rows)]).int()
    ids[4] = -1
    weights, outputs = torch.rand(rows, 4, generator=g), randn(g, rows, 4, C)
    start, norm_weight = randn(g, rows, C), randn(g, C)
    peers = emulated_peers(PeerLayout(ranks, rows, C, VOCAB))
    local = [(ids >= 4 * r) & (ids < 4 * r + 4) for r in range(ranks)]

    def rank_main(group):
        pairs = outputs.masked_fill(~local[group.rank][..., None], float("nan"))
        residual, normed = start.clone(), torch.full_like(start, float("nan"))
        peers[group.rank].sum_experts_norm(
            pairs, ids, weights, residual, norm_weight, eps=EPS, first_expert=4 * group.rank, num_local_experts=4, normed=normed
        )
        return residual, normed

    parts = torch.stack([torch.where(mine[..., None], outputs.float() * weights[..., None], 0.0).sum(1) for mine in local]).bfloat16()
    want, want_normed = sum_rows_ref(parts, start, norm_weight=norm_weight, eps=EPS)
    results = run_ranks(ranks, rank_main)
    for residual, normed in results:
        assert torch.equal(residual, results[0][0])
        assert torch.equal(normed, results[0][1])
        assert (residual.float() - want.float()).abs().max() <= 1e-2 * want.float().abs().max()
        assert (normed.float() - want_normed.float()).abs().max() <= 1e-2 * want_normed.float().abs().max()


def assert_sums(peers, parts, bias, start):
    """Two ranks add part after part, each of its own number of rows, to the same stream: the twin's, bit for bit, on both."""

    def rank_main(group):
        residual = start.clone()
        for part in parts:
            peers[group.rank].sum_projection(part[group.rank], bias, residual[: part.shape[1]])
        return residual

    want = start.clone()
    for part in parts:
        want[: part.shape[1]], _ = sum_rows_ref(part, want[: part.shape[1]], bias=bias)
    assert all(torch.equal(got, want) for got in run_ranks(2, rank_main))


def test_steps_of_different_sizes_follow_each_other(emulated):  # noqa: F811
    g = torch.Generator().manual_seed(6)
    sizes = (5, 1, 3, 5, 2)
    parts, bias = [randn(g, 2, rows, C) for rows in sizes], randn(g, C)
    start = randn(g, 5, C)
    peers = emulated_peers(PeerLayout(2, 5, C, VOCAB))
    assert_sums(peers, parts, bias, start)


def test_best_of_all_ranks_with_ties_and_bad_rows(emulated):  # noqa: F811
    peers = emulated_peers(PeerLayout(2, 5, C, VOCAB))
    best = [[1.0, 5.0, 2.0, float("inf"), 3.0], [4.0, 2.0, 2.0, 1.0, 3.0]]
    words = [[3, 9, 7, BAD_LOGITS, 2], [8, 1, 0, 5, 2]]

    def rank_main(group):
        scratch = SamplingScratch.allocate(5, "cpu")
        results = []
        for _ in range(3):
            scratch.best[:, 0] = torch.tensor(best[group.rank])
            tokens = torch.tensor(words[group.rank], dtype=torch.int32)
            lens = torch.tensor([7, 7, 7, 7, 0], dtype=torch.int32)
            peers[group.rank].meet_best(scratch, lens, tokens, 32 * group.rank)
            results.append(tokens.tolist())
        return results

    for results in run_ranks(2, rank_main):
        assert results == [[40, 9, 7, BAD_LOGITS, 0]] * 3


def test_logits_reach_rank_zero_and_its_tokens_all(emulated):  # noqa: F811
    g = torch.Generator().manual_seed(8)
    steps = torch.randn(3, 6, VOCAB, generator=g)
    peers = emulated_peers(PeerLayout(4, 6, C, VOCAB))

    def rank_main(group):
        mine, results = peers[group.rank], []
        for logits in steps:
            first = 16 * group.rank
            mine.push_logits(logits[:, first : first + 16].contiguous(), first)
            tokens = mine.logits.argmax(-1).int() if group.rank == 0 else torch.full((6,), 777, dtype=torch.int32)
            mine.spread_tokens(tokens)
            results.append(tokens)
        return torch.stack(results)

    for tokens in run_ranks(4, rank_main):
        assert torch.equal(tokens, steps.argmax(-1).int())


def test_a_rank_that_does_not_come_is_named_and_later_meetings_do_not_wait(emulated):  # noqa: F811
    layout = PeerLayout(2, 3, C, VOCAB)
    mine = emulated_peers(layout, timeout_s=0.2)[0]
    residual, x, bias = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((3, C), (3, C), (C,)))
    mine.sum_projection(x, bias, residual)
    assert missing_rank(int(mine.status)) == 1
    mine.timeout_ms = 1e9
    for _ in range(3):
        mine.sum_projection(x, bias, residual)
    mine.meet_best(SamplingScratch.allocate(3, "cpu"), torch.ones(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 0)
    mine.push_logits(torch.zeros(3, 32), 0)
    assert missing_rank(int(mine.status)) == 1


def test_statuses():
    assert missing_rank(0) is None
    assert missing_rank(1) == 0


@pytest.mark.parametrize(("ranks", "rows"), [(3, 4), (16, 4), (2, 129)])
def test_groups_that_the_kernels_do_not_take_are_refused(ranks, rows):
    with pytest.raises(ShapeError):
        PeerLayout(ranks, rows, C, VOCAB)


def test_sums_of_a_prompt_go_in_pieces_of_what_there_is_room_for(emulated):  # noqa: F811
    g = torch.Generator().manual_seed(8)
    lengths = (300, 7, 140)  # more than a decode step has, and three pieces with a short last one
    parts, bias, start = [randn(g, 2, rows, C) for rows in lengths], randn(g, C), randn(g, 300, C)
    peers = emulated_peers(PeerLayout(2, 140, C, 0))
    assert_sums(peers, parts, bias, start)
    assert PeerLayout(2, 140, C, 0).nbytes(0) == PeerLayout(2, 140, C, 0).nbytes(1)
