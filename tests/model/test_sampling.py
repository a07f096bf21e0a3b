"""Sampling: what masks, penalties and filters allow, distribution, repeatability, and independence of the batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import ServingError
from common.requests import SamplingParams
from model.sampling import SamplingState, TokenChoice, filter_candidates, sample

GREEDY = SamplingParams(max_tokens=100, temperature=0.0, seed=1)
RANDOM = SamplingParams(max_tokens=100, temperature=1.0, seed=1)
V = 50


def state(params: SamplingParams, prompt=(1, 2), output=(), stops=frozenset(), vocab=V) -> SamplingState:
    return SamplingState(params, prompt, output, stops, vocab)


def logits_of(seed: int, rows: int = 1, vocab: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def pick(logits: torch.Tensor, one: SamplingState) -> int:
    (choice,) = sample(logits.view(1, -1), [one])
    assert isinstance(choice, TokenChoice)
    return choice.token_id


def draw_counts(params: SamplingParams, logits: torch.Tensor, draws: int) -> np.ndarray:
    """Tokens drawn at output indices 0 .. draws - 1, penalties off."""
    one = state(replace(params, seed=77), vocab=logits.shape[-1])
    counts = np.zeros(logits.shape[-1])
    for index in range(draws):
        one.num_output = index
        counts[pick(logits, one)] += 1
    return counts


def chi_square_is_plausible(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's statistic within 4 standard deviations of its mean (df = categories - 1)."""
    allowed = expected > 0
    assert counts[~allowed].sum() == 0, "a token of probability 0 was drawn"
    want = expected[allowed] / expected[allowed].sum() * counts.sum()
    assert want.min() >= 5, "choose fewer categories: the statistic needs 5 of each"
    df = allowed.sum() - 1
    return ((counts[allowed] - want) ** 2 / want).sum() < df + 4 * math.sqrt(2 * df)


SKEWED = torch.tensor([0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02]).log()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (RANDOM, [0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02]),
        (replace(RANDOM, temperature=0.5), [x * x for x in (0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02)]),
        (replace(RANDOM, top_k=3), [0.30, 0.22, 0.16, 0, 0, 0, 0, 0]),
        (replace(RANDOM, top_p=0.7), [0.30, 0.22, 0.16, 0.12, 0, 0, 0, 0]),
        (replace(RANDOM, top_p=0.53), [0.30, 0.22, 0.16, 0, 0, 0, 0, 0]),
        (replace(RANDOM, min_p=0.25), [0.30, 0.22, 0.16, 0.12, 0.08, 0, 0, 0]),
        (replace(RANDOM, top_k=4, top_p=0.6), [0.30, 0.22, 0, 0, 0, 0, 0, 0]),
        (replace(RANDOM, top_k=6, min_p=0.3), [0.30, 0.22, 0.16, 0.12, 0, 0, 0, 0]),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "top_p-crossing", "min_p", "top_k+top_p", "top_k+min_p"],
)
def test_drawn_tokens_follow_the_filtered_distribution(params, expected):
    counts = draw_counts(params, SKEWED, 3000)
    assert chi_square_is_plausible(counts, np.array(expected)), counts


def test_top_p_over_a_wide_flat_vocabulary_keeps_the_right_number_of_tokens():
    weights = torch.ones(5000, dtype=torch.float64)
    ids, kept = filter_candidates(weights, replace(RANDOM, top_p=0.5))
    assert len(ids) == len(kept) == 2500


def test_greedy_takes_the_largest_logit_and_the_lower_id_of_a_tie():
    logits = torch.zeros(V)
    logits[[7, 30]] = 3.0
    assert pick(logits, state(GREEDY)) == 7
    assert pick(logits, state(replace(GREEDY, logit_bias={40: 0.5}))) == 7


def test_same_seed_and_index_give_the_same_token_whatever_the_batch():
    """Batch-mates must not change a row (report S01), and a seed repeats exactly."""
    logits = logits_of(3, rows=6, vocab=3000)
    variants = [
        RANDOM,
        replace(RANDOM, top_p=0.9, seed=-5),
        replace(RANDOM, top_k=40, seed=2**63 - 1),
        GREEDY,
        replace(RANDOM, presence_penalty=1.5, repetition_penalty=1.3, logit_bias={2999: 5.0}, logprobs=3),
        replace(RANDOM, min_p=0.1, seed=0),
    ]

    def fresh(row: int) -> SamplingState:
        return state(variants[row], prompt=(5, 6), output=(7, 8, 8), vocab=3000)

    alone = [sample(logits[row : row + 1], [fresh(row)])[0] for row in range(6)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [4, 4, 4, 2]):
        together = sample(logits[order], [fresh(row) for row in order])
        assert together == [alone[row] for row in order]


def test_random_numbers_depend_on_seed_and_output_index_alone():
    one, resumed = state(RANDOM), state(RANDOM, output=(4, 5, 6))
    for token in (4, 5, 6):
        one.record(token)
    assert one.uniform() == resumed.uniform()
    draws = set()
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        other = state(replace(RANDOM, seed=seed))
        for index in range(20):
            other.num_output = index
            draws.add(other.uniform())
    assert len(draws) == 100


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(bad):
    """Report S04: the request with NaN logits fails typed; the others go on."""
    logits = logits_of(1, rows=3)
    clean = sample(logits, [state(GREEDY), state(RANDOM), state(GREEDY)])
    logits[1, 17] = bad
    out = sample(logits, [state(GREEDY), state(RANDOM), state(GREEDY)])
    assert isinstance(out[1], ServingError)
    assert [out[0], out[2]] == [clean[0], clean[2]]


def test_masks_that_leave_nothing_fail_that_row_alone():
    params = replace(GREEDY, allowed_token_ids=frozenset({3}), min_tokens=5)
    for sampled in (params, replace(params, temperature=1.0)):
        out = sample(logits_of(1, rows=2), [state(sampled, stops=frozenset({3})), state(GREEDY)])
        assert isinstance(out[0], ServingError)
        assert isinstance(out[1], TokenChoice)


def test_only_allowed_tokens_are_drawn_and_logprobs_stay_finite():
    params = replace(RANDOM, allowed_token_ids=frozenset({9}), logprobs=5)
    (choice,) = sample(logits_of(2), [state(params)])
    assert choice.token_id == 9
    assert math.isfinite(choice.logprobs.logprob)
    assert len(choice.logprobs.top) == 5
    assert all(math.isfinite(entry.logprob) for entry in choice.logprobs.top)


def test_logprobs_are_of_the_raw_logits():
    logits = logits_of(5)
    (choice,) = sample(logits, [state(replace(RANDOM, logprobs=3, temperature=3.0, logit_bias={4: 50.0}))])
    raw = logits[0].log_softmax(-1)
    assert choice.token_id == 4
    assert choice.logprobs.logprob == pytest.approx(float(raw[4]), rel=1e-6)
    assert [entry.token_id for entry in choice.logprobs.top] == raw.topk(3).indices.tolist()
    assert [entry.logprob for entry in choice.logprobs.top] == pytest.approx(raw.topk(3).values.tolist(), rel=1e-6)
    (zero,) = sample(logits, [state(replace(GREEDY, logprobs=0))])
    assert not zero.logprobs.top
    assert zero.logprobs.logprob == pytest.approx(float(raw.max()), rel=1e-6)


def test_min_tokens_keeps_stop_tokens_away_until_then():
    logits = torch.zeros(V)
    logits[3], logits[4] = 9.0, 5.0
    one = state(replace(GREEDY, min_tokens=2), stops=frozenset({3}))
    picked = []
    for _ in range(3):
        picked.append(pick(logits, one))
        one.record(picked[-1])
    assert picked == [4, 4, 3]


def test_penalties_follow_their_definitions():
    logits = logits_of(8)[0]
    params = replace(GREEDY, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.5)
    got = state(params, prompt=(1, 2), output=(2, 5, 5)).adjust(logits)
    want = logits.clone()
    for token in (1, 2, 5):
        want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
    for token, count in ((2, 1), (5, 2)):
        want[token] -= 0.3 * count + 0.7
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)


def test_repetition_penalty_agrees_with_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits_of(9)
    got = state(replace(GREEDY, repetition_penalty=1.7), prompt=(3, 4, 4), output=(9,)).adjust(logits[0])
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 4, 9]]), logits.clone())[0]
    assert torch.allclose(got, want, rtol=1e-6, atol=0)


def test_top_k_top_p_and_min_p_agree_with_transformers():
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for seed in range(20):
        logits = logits_of(seed, vocab=400)
        for params, warpers in (
            (replace(RANDOM, top_k=17), [TopKLogitsWarper(17)]),
            (replace(RANDOM, top_p=0.8), [TopPLogitsWarper(0.8)]),
            (replace(RANDOM, min_p=0.05), [MinPLogitsWarper(0.05)]),
            (replace(RANDOM, top_k=50, top_p=0.9, min_p=0.02), [TopKLogitsWarper(50), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)]),
        ):
            scores = logits.clone()
            for warper in warpers:
                scores = warper(None, scores)
            ids, _ = filter_candidates(logits[0].double().softmax(-1), params)
            assert set(ids.tolist()) == set(scores[0].isfinite().nonzero().flatten().tolist()), params


def test_state_rebuilt_from_its_output_samples_like_the_one_that_made_it():
    params = replace(RANDOM, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.2, top_p=0.95, min_tokens=4)
    stops = frozenset({0, 1})
    going, output = state(params, stops=stops), []
    for step in range(12):
        rebuilt = state(params, output=tuple(output), stops=stops)
        logits = logits_of(100 + step)[0]
        token = pick(logits, going)
        assert pick(logits, rebuilt) == token
        going.record(token)
        output.append(token)


def test_whole_vocabulary_bias_of_100_decides():
    assert pick(logits_of(4)[0], state(replace(RANDOM, logit_bias={V - 1: 100.0}))) == V - 1


def test_tiny_temperature_is_greedy_and_finite():
    logits = logits_of(6)[0]
    assert pick(logits, state(replace(RANDOM, temperature=1e-30))) == int(logits.argmax())
