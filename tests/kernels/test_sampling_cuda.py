"""The sampling kernels' own source, run on the CPU, against the plain twin and against the distributions they must follow."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kernels.sampling_cuda import BAD_LOGITS, SamplingRows, SamplingScratch, philox_ref, sample_ref, sample_tokens
from tests.support.emulated_cuda import emulated  # noqa: F401

VOCAB = 1024


def make_rows(count, **values):
    rows = SamplingRows.greedy(count, "cpu")
    for name, value in values.items():
        getattr(rows, name).copy_(torch.as_tensor(value))
    return rows


def run(logits, rows, positions, *, unfiltered=False):
    tokens = torch.full((logits.shape[0],), 777777, dtype=torch.int32)
    scratch = SamplingScratch.allocate(logits.shape[0], "cpu")
    sample_tokens(logits, rows, positions, tokens, scratch, unfiltered=unfiltered)
    assert not scratch.arrived.any()
    return tokens


def positions(count):
    return torch.arange(1, count + 1, dtype=torch.int32)


def test_philox_known_answers():
    """Known-answer vectors of Random123 for Philox4x32-10 (first word), counter and key zero; and that words differ by counter and key."""
    assert int(philox_ref(0, 0, torch.tensor([0]))) == 0x6627E8D5
    words = {int(philox_ref(seed, position, torch.tensor([token]))) for seed in (0, 1, 2**40) for position in (0, 1) for token in (0, 5)}
    assert len(words) == 12


def test_greedy_takes_the_largest_and_the_lower_id_of_equals(emulated):  # noqa: F811
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1, [900, 37, 500]] = 50.0
    assert run(logits, make_rows(3), positions(3), unfiltered=True).tolist() == [int(logits[0].argmax()), 37, int(logits[2].argmax())]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 15, 16, 33, 128])
def test_greedy_of_any_number_of_rows(emulated, count):  # noqa: F811
    """From 16 rows on a row has fewer parts; the largest logit may lie anywhere, the last word of a part included."""
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(count))
    winners = torch.arange(count) * 63 % VOCAB
    logits[torch.arange(count), winners] = 50.0
    logits[count // 2, 7] = float("nan")
    want = [BAD_LOGITS if b == count // 2 else w for b, w in enumerate(winners.tolist())]
    assert run(logits, make_rows(count), positions(count), unfiltered=True).tolist() == want


def test_greedy_over_parts_of_several_turns(emulated):  # noqa: F811
    """16 parts of 1,258 quads: a thread loads four at a time and comes round twice, the last time past the end."""
    vocab = 4 * 16 * 1258
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(5))
    winners = torch.tensor([0, vocab - 1, 4 * 1257 + 3, 4 * 1258, 4 * 1024, 4 * 1023 + 3, *range(9001, 9011)])
    logits[torch.arange(16), winners] = 50.0
    assert run(logits, make_rows(16), positions(16), unfiltered=True).tolist() == winners.tolist()


def test_rows_that_are_not_finite_fail_alone(emulated):  # noqa: F811
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[1, 1000], logits[2, 3] = float("nan"), float("-inf")
    for temperature in (0.0, 1.0):
        got = run(logits, make_rows(4, temperature=[temperature] * 4), positions(4))
        assert got[1] == got[2] == BAD_LOGITS
        assert (got[[0, 3]] >= 0).all()


def test_padded_rows_get_token_zero(emulated):  # noqa: F811
    logits = torch.full((2, VOCAB), float("nan"))
    assert run(logits, make_rows(2, temperature=[1.0, 0.0]), torch.zeros(2, dtype=torch.int32)).tolist() == [0, 0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02}, {"top_p": 1e-6}, {"top_k": 1}],
    ids=str,
)
def test_matches_the_plain_twin(emulated, settings):  # noqa: F811
    logits = 3 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    filters = {name: [value] * 6 for name, value in settings.items()}
    rows = make_rows(6, temperature=[0.5, 1.0, 2.0, 0.0, 0.9, 1.1], seed=[1, 2, 3, 4, -5, 2**62], **filters)
    assert torch.equal(run(logits, rows, positions(6)), sample_ref(logits, rows, positions(6)))


def test_same_seed_same_token_whatever_the_batch(emulated):  # noqa: F811
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(4))
    rows = make_rows(5, temperature=[1.0] * 5, seed=[9, 9, 3, 4, 5], top_p=[0.95] * 5)
    whole = run(logits, rows, positions(5))
    for b in range(5):
        alone = SamplingRows(**{f.name: getattr(rows, f.name)[b : b + 1] for f in fields(rows)})
        assert run(logits[b : b + 1], alone, positions(5)[b : b + 1])[0] == whole[b]


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_frequencies_follow_the_distribution(settings):
    """Chi-square of 4,000 draws of the twin, which the kernel equals token by token; 1e-4 quantile."""
    x = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    temperature, draws = 1.3, 4000
    p = (x / temperature).softmax(0)
    keep = torch.ones(8, dtype=torch.bool)
    if "top_k" in settings:
        keep = torch.arange(8) < settings["top_k"]
    if "top_p" in settings:
        keep = p.cumsum(0) - p < settings["top_p"]
    if "min_p" in settings:
        keep = p >= settings["min_p"] * p.max()
    p = (p * keep) / (p * keep).sum()
    rows = make_rows(draws, temperature=[temperature] * draws, seed=list(range(draws)), **{k: [v] * draws for k, v in settings.items()})
    counts = torch.bincount(sample_ref(x.expand(draws, 8), rows, torch.full((draws,), 17)).long(), minlength=8)
    assert not counts[~keep].any()
    chi2 = ((counts - draws * p)[keep] ** 2 / (draws * p[keep])).sum()
    limit = {8: 29.9, 7: 27.9, 6: 25.7, 5: 23.5, 4: 21.1, 3: 18.4, 2: 15.1}[int(keep.sum())]
    assert chi2 < limit, f"{chi2}"


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 9, "min_p": 0.1}])
def test_the_least_temperatures_are_greedy(emulated, filters):  # noqa: F811
    """Down to those without a finite inverse, with filters too."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(6)) * 5
    rows = make_rows(3, temperature=[1e-20, 1e-38, 1e-44], **filters)
    assert run(logits, rows, positions(3)).tolist() == logits.argmax(dim=1).tolist() == sample_ref(logits, rows, positions(3)).tolist()
