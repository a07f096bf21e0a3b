"""The screened choice of words: the kernels' own source, run on the CPU, must choose what all logits would choose."""

from __future__ import annotations

import pytest
import torch

from kernels.sampling_cuda import BAD_LOGITS, SamplingRows, SamplingScratch, gumbel_ref, sample_tokens
from kernels.vocabulary import (
    NO_FLOOR,
    PARTS,
    ScreenScratch,
    choose_words,
    launch_screen,
    make_screen,
    screen_ref,
    settle_ties,
)
from tests.support.emulated_cuda import emulated  # noqa: F401

COLUMNS = 256
POISON = 777777


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std).bfloat16()


def order_to_float(order: torch.Tensor) -> torch.Tensor:
    return (order ^ (order >> 31 & 0x7FFFFFFF)).int().view(torch.float32)


class Choice:
    """Buffers of one call, poisoned."""

    def __init__(self, rows: int, words: int):
        self.scratch = ScreenScratch.allocate(rows, "cpu")
        self.bounds = torch.full((rows, words), torch.nan)
        self.tokens = torch.full((rows,), POISON, dtype=torch.int32)
        self.best = torch.full((rows, PARTS), torch.nan)

    def run(self, x, weight, seq_lens=None, rows=None):
        seq_lens = torch.ones(len(x), dtype=torch.int32) if seq_lens is None else seq_lens
        rows = SamplingRows.greedy(len(x), "cpu") if rows is None else rows
        choose_words(
            x, weight, make_screen(weight), rows, seq_lens, bounds=self.bounds, scratch=self.scratch, tokens=self.tokens, best=self.best
        )  # fmt: skip
        assert not self.scratch.arrived.any()
        assert (self.scratch.floors == NO_FLOOR).all()
        return self.tokens


@pytest.mark.parametrize(("rows", "words"), [(1, 1024), (3, 1000), (8, 336), (9, 1024), (16, 4)])
def test_bounds_enclose_every_logit_and_equal_the_twin(emulated, rows, words):  # noqa: F811
    """Words that are no whole tile, and tokens that are no whole eight."""
    x, weight = normal(rows, COLUMNS, seed=1), normal(words, COLUMNS, seed=2, std=0.02)
    screen, scratch = make_screen(weight), ScreenScratch.allocate(rows, "cpu")
    upper = torch.full((rows, words), torch.nan)
    launch_screen(x, screen, SamplingRows.greedy(rows, "cpu"), torch.ones(rows, dtype=torch.int32), upper, scratch)
    exact = x.double() @ weight.double().t()
    want_upper, want_lower = screen_ref(x, screen)
    assert (upper >= exact).all()
    assert (want_lower <= exact).all()
    assert torch.allclose(upper, want_upper, rtol=1e-5, atol=2e-5)  # half a step may round either way
    assert torch.allclose(order_to_float(scratch.floors), want_lower.amax(dim=1), rtol=1e-5, atol=2e-5)


def test_bounds_are_narrow_enough_to_leave_few_words():
    """At the real width a normal row's bound is two thirds of a deviation of the logits, so that a handful of 20,000 words is left."""
    x, weight = normal(4, 2880, seed=3), normal(20_000, 2880, seed=4, std=0.02)
    upper, lower = screen_ref(x, make_screen(weight))
    left = (upper >= lower.amax(dim=1, keepdim=True)).sum(dim=1)
    assert left.max() <= 80
    assert ((upper - lower) / 2 / (x.float() @ weight.float().t()).std()).max() < 0.75


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16])
def test_the_word_is_that_of_the_exact_logits(emulated, rows):  # noqa: F811
    x, weight = normal(rows, COLUMNS, seed=rows), normal(1000, COLUMNS, seed=5, std=0.02)
    choice = Choice(rows, 1000)
    exact = x.double() @ weight.double().t()
    assert choice.run(x, weight).tolist() == exact.argmax(dim=1).tolist()
    assert torch.allclose(choice.best[:, 0].double(), exact.amax(dim=1), rtol=1e-5)


def test_words_that_differ_by_less_than_the_codes_show(emulated):  # noqa: F811
    """A hundred copies of one row whose last bit is raised in one weight: 8 bits can't tell them apart, the bf16 weights can."""
    x, weight = normal(1, COLUMNS, seed=8).abs(), normal(1024, COLUMNS, seed=9, std=0.02)
    weight[100:200] = x[0] * 0.05
    raised = weight[153].view(torch.int16)
    raised[17] += 1
    assert Choice(1, 1024).run(x, weight).tolist() == [153]


def test_equal_words_go_to_the_lower_id(emulated):  # noqa: F811
    """In one part, in two parts, in both halves of a tile."""
    x, weight = normal(2, COLUMNS, seed=10), normal(1024, COLUMNS, seed=11, std=0.02)
    weight[[37, 45, 900]] = (x[0] * 0.05).bfloat16()
    weight[[501, 502]] = (x[1] * 0.05).bfloat16()
    assert Choice(2, 1024).run(x, weight).tolist() == [37, 501]


def test_heavy_rows_and_small_tokens(emulated):  # noqa: F811
    """One weight a hundred times the others costs that row's codes their sense, not the choice; a token of zeros has equal logits."""
    x, weight = normal(3, COLUMNS, seed=12), normal(512, COLUMNS, seed=13, std=0.02)
    weight[torch.arange(512), torch.arange(512) % COLUMNS] = 2.0
    x[1] *= 1e-20
    x[2] = 0
    assert Choice(3, 512).run(x, weight).tolist() == [*(x[:2].double() @ weight.double().t()).argmax(dim=1).tolist(), 0]
    x[1] *= 1e-15  # below what has a finite inverse in 16 bits: its logits are told apart all the same
    assert Choice(3, 512).run(x, weight).tolist()[1] == int((x[1].float() @ weight.float().t()).argmax())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_fail_alone(emulated, value):  # noqa: F811
    x, weight = normal(3, COLUMNS, seed=14), normal(512, COLUMNS, seed=15, std=0.02)
    want = int((x[2].float() @ weight.float().t()).argmax())
    x[0] = 0
    x[0, 3] = x[1, 200] = value
    tokens = Choice(3, 512).run(x, weight).tolist()
    assert tokens == [BAD_LOGITS, BAD_LOGITS, want]
    weight[77, 3] = value
    assert Choice(3, 512).run(x, weight).tolist() == [BAD_LOGITS] * 3


def test_padded_rows_get_word_zero(emulated):  # noqa: F811
    x, weight = normal(3, COLUMNS, seed=16), normal(512, COLUMNS, seed=17, std=0.02)
    x[0] = torch.nan
    choice = Choice(3, 512)
    tokens = choice.run(x, weight, torch.tensor([0, 5, 0], dtype=torch.int32)).tolist()
    assert tokens == [0, int((x[1].float() @ weight.float().t()).argmax()), 0]


def test_a_rows_word_does_not_depend_on_the_others(emulated):  # noqa: F811
    x, weight = normal(16, COLUMNS, seed=18), normal(1024, COLUMNS, seed=19, std=0.02)
    together = Choice(16, 1024)
    together.run(x, weight)
    alone = Choice(1, 1024)
    alone.run(x[11:12], weight)
    assert alone.tokens[0] == together.tokens[11]
    assert alone.best[0, 0] == together.best[11, 0]


def sampled_rows(temperatures, **filters):
    rows = SamplingRows.greedy(len(temperatures), "cpu")
    rows.temperature.copy_(torch.tensor(temperatures))
    rows.seed.copy_(torch.arange(len(temperatures)) + 40)
    for name, values in filters.items():
        getattr(rows, name).copy_(torch.tensor(values))
    return rows


def judged(x, weight, rows, seq_lens):
    """What words are chosen by, in fp64."""
    noise = [gumbel_ref(int(seed), int(position), len(weight)) for seed, position in zip(rows.seed, seq_lens, strict=True)]
    noisy = (rows.temperature > 0)[:, None]
    return (x.double() @ weight.double().t()) / torch.where(noisy, rows.temperature[:, None], 1.0) + torch.stack(noise) * noisy


def test_sampled_words_are_those_of_the_exact_logits(emulated):  # noqa: F811
    x, weight = normal(9, COLUMNS, seed=24), normal(1000, COLUMNS, seed=25, std=0.2)
    rows, seq_lens = sampled_rows([0.0, 1.0, 0.01, 0.7, 2.0, 0.0, 1.0, 1.0, 100.0]), torch.arange(5, 14, dtype=torch.int32)
    choice, want = Choice(9, 1000), judged(x, weight, rows, seq_lens)
    assert choice.run(x, weight, seq_lens, rows).tolist() == want.argmax(dim=1).tolist()
    assert torch.allclose(choice.best[:, 0].double(), want.amax(dim=1), rtol=1e-5)


def test_the_least_temperatures_are_greedy(emulated):  # noqa: F811
    """Down to those without a finite inverse."""
    x, weight = normal(4, COLUMNS, seed=28), normal(512, COLUMNS, seed=29, std=0.1)
    rows, seq_lens = sampled_rows([1e-20, 1e-38, 1e-44, 0.0]), torch.full((4,), 3, dtype=torch.int32)
    want = (x.double() @ weight.double().t()).argmax(dim=1).tolist()
    assert Choice(4, 512).run(x, weight, seq_lens, rows).tolist() == want


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_ties_of_the_librarys_logits_are_settled_as_the_screen_does(emulated, temperature):  # noqa: F811
    """The library's rounding puts one word ahead of another that wins by a hair; rows with a filter keep their token."""
    x, weight = normal(3, COLUMNS, seed=20), normal(512, COLUMNS, seed=21, std=0.02)
    rows = sampled_rows([temperature, 1.0, temperature], top_k=[0, 3, 0])
    seq_lens = torch.full((3,), 4, dtype=torch.int32)
    weight[[7, 12]] = (x[0] * 0.05).bfloat16()
    logits = x.float() @ weight.float().t()
    if temperature:  # the noise decides between equal logits, so the library's error is as large as the difference of the noise
        noise = gumbel_ref(40, 4, 512) * temperature
        weight[12 if noise[7] > noise[12] else 7] = 0
        winner = 7 if noise[7] > noise[12] else 12
        logits = x.float() @ weight.float().t()
        loser = (logits[0] + noise).topk(2).indices[1]
        logits[0, winner] -= 1e-6 * logits[0, winner].abs()
        assert loser != winner
    else:
        winner = 7
        logits[0, 12] = logits[0, 7] + 1e-6 * logits[0, 7].abs()
    choice, sampling = Choice(3, 512), SamplingScratch.allocate(3, "cpu")
    sample_tokens(logits, rows, seq_lens, choice.tokens, sampling, unfiltered=False)
    before = choice.tokens.clone()
    if not temperature:
        assert before[0] == 12
    settle_ties(x, weight, make_screen(weight), logits, rows, seq_lens, scratch=choice.scratch, tokens=choice.tokens, best=sampling.best)
    same = Choice(3, 512)
    screened = same.run(x, weight, seq_lens, sampled_rows([temperature, 0.0, temperature]))
    assert choice.tokens[0] == winner == screened[0]
    assert choice.tokens[1] == before[1]
    assert choice.tokens[2] == screened[2]
    assert torch.equal(sampling.best[[0, 2], 0], same.best[[0, 2], 0])


def test_cpu_tensors_take_the_twin():
    x, weight = normal(2, COLUMNS, seed=22), normal(512, COLUMNS, seed=23, std=0.02)
    choice = Choice(2, 512)
    assert choice.run(x, weight).tolist() == (x.float() @ weight.float().t()).argmax(dim=1).tolist()
