"""Picks the next token of each request from its logits, on the CPU: masks, penalties, filters, seeded randomness, log-probabilities.

Shared by both workers. Owns no request: a `SamplingState` belongs to one sequence and is handed in. The reference for faster samplers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.errors import ServingError
from common.proto import types_pb2
from common.requests import SamplingParams

_TOP_P_GUESS = 512  # nearly always enough candidates; otherwise the whole row is sorted


@dataclass(frozen=True)
class TokenChoice:
    """A sampled token. `logprobs` is set if the request asked for it: of the raw logits, before any mask, penalty or temperature."""

    token_id: int
    logprobs: types_pb2.TokenLogprobs | None = None


@dataclass(frozen=True)
class DeviceSampling:
    """What a sampler on a GPU needs of a row. Units: temperature 0 for greedy; top_k 0, top_p 1, min_p 0 for off; seed: 63 bits

    `logprobs`: how many of the likeliest tokens are told with the chosen one; None: no log-probabilities
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logprobs: int | None = None

    @property
    def needs_logits(self) -> bool:
        """Whether its token, or what is told of it, takes more than the largest of logit / temperature + noise."""
        return self.logprobs is not None or (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


GREEDY = DeviceSampling(0.0, 0, 1.0, 0.0, 0)


class SamplingState:
    """What sampling needs to know of one sequence besides its logits. Mutated by `record` alone.

    Takes `params.seed` as it is (the router chose one); `stop_token_ids` are kept away until `min_tokens` tokens exist.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Iterable[int], stop_token_ids: frozenset[int], vocab_size: int
    ):
        self.params = params
        self.num_output = 0
        self._seed = (params.seed or 0) & (2**64 - 1)
        p, seed = params, self._seed & (2**63 - 1)
        greedy = replace(GREEDY, logprobs=p.logprobs)
        self._device = greedy if p.temperature == 0 else DeviceSampling(p.temperature, p.top_k or 0, p.top_p, p.min_p, seed, p.logprobs)
        self._stop_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
        self._allowed = torch.tensor(sorted(params.allowed_token_ids), dtype=torch.int64)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        counts = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._counts = torch.zeros(vocab_size, dtype=torch.float32) if counts else None
        self._seen = torch.zeros(vocab_size, dtype=torch.bool) if params.repetition_penalty != 1 else None
        if self._seen is not None:
            self._seen[torch.tensor(prompt_ids, dtype=torch.int64)] = True
        for token_id in output_ids:
            self.record(token_id)

    def record(self, token_id: int) -> None:
        """Appends a token to the output that penalties, min_tokens and the random numbers go by."""
        self.num_output += 1
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._seen is not None:
            self._seen[token_id] = True

    @property
    def is_unmasked(self) -> bool:
        """Whether `adjust` changes nothing now."""
        p = self.params
        masks = p.logit_bias or p.allowed_token_ids or (self.num_output < p.min_tokens and len(self._stop_ids))
        return not masks and self._counts is None and self._seen is None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is just the largest raw logit now."""
        return self.params.temperature == 0 and self.is_unmasked

    def on_device(self) -> DeviceSampling | None:
        """What a GPU needs to pick the next token alone; None if that takes the logits here."""
        return self._device if self.is_unmasked else None

    def uniform(self) -> float:
        """A number in [0, 1) that depends on the seed and the index of the next output token alone (Philox 4x64, counter = index)."""
        return float(np.random.Generator(np.random.Philox(key=self._seed, counter=self.num_output)).random())

    def adjust(self, logits: Tensor) -> Tensor:
        """Masks, then bias, then penalties.

        Penalties: repetition as in Hugging Face (of tokens in prompt or output, positive scores are divided by it, others multiplied);
        then frequency * count + presence * (count > 0) is subtracted, counts over the output alone, as OpenAI defines them.
        Shapes: logits [V] fp32
        Returns: [V] fp32, a new tensor
        """
        p = self.params
        if p.allowed_token_ids:
            x = torch.full_like(logits, -torch.inf)
            x[self._allowed] = logits[self._allowed]
        else:
            x = logits.clone()
        if self.num_output < p.min_tokens:
            x[self._stop_ids] = -torch.inf
        if p.logit_bias:
            x[self._bias_ids] += self._bias
        if self._seen is not None:
            x = torch.where(self._seen, torch.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
        if self._counts is not None:
            x -= p.frequency_penalty * self._counts + p.presence_penalty * (self._counts > 0)
        return x


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[TokenChoice | ServingError]:
    """Picks one token per row. A row's result depends on that row and its state alone, not on the rows beside it.

    Shapes: logits [R, V] fp32 on the CPU, R = len(states); row r belongs to states[r]
    Returns: per row its token, or the error that only this row's request fails with (a NaN or infinite logit; nothing left by the masks)
    Effects: none; the caller records the token
    """
    finite = logits.isfinite().all(dim=-1).tolist()
    best = logits.argmax(dim=-1).tolist()  # ties: the lower id
    out: list[TokenChoice | ServingError] = []
    for row, state in enumerate(states):
        if not finite[row]:
            out.append(ServingError(f"the model's logits for output token {state.num_output} are not finite"))
            continue
        token_id = best[row] if state.is_plain_greedy else _pick(state.adjust(logits[row]), state)
        if token_id is None:
            out.append(ServingError(f"no token is left for output token {state.num_output}: the request's masks exclude all"))
            continue
        out.append(TokenChoice(token_id))
    _add_logprobs(out, logits, states)
    return out


def _add_logprobs(choices: list[TokenChoice | ServingError], logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Effects: those who asked get theirs, all rows at once"""
    asking = [(row, c, s.params.logprobs) for row, (c, s) in enumerate(zip(choices, states, strict=True)) if isinstance(c, TokenChoice)]
    told = [(row, choice, count) for row, choice, count in asking if count is not None]
    if not told:
        return
    rows, token_ids = [row for row, _, _ in told], torch.tensor([choice.token_id for _, choice, _ in told])
    tables = logprob_tables(logits[rows], token_ids, max(count for _, _, count in told))
    for (row, choice, count), chosen, values, ids in zip(told, *(table.tolist() for table in tables), strict=True):
        choices[row] = replace(choice, logprobs=told_logprobs(chosen, values[:count], ids[:count]))


def _pick(x: Tensor, state: SamplingState) -> int | None:
    if state.params.temperature == 0:
        token_id = int(x.argmax())
        return token_id if x[token_id] > -torch.inf else None
    x = x.double() / state.params.temperature
    peak = x.max()
    if peak == -torch.inf:
        return None
    ids, weights = filter_candidates((x - peak).exp_(), state.params)
    cumulative = weights.cumsum(0)
    at = int(torch.searchsorted(cumulative, cumulative[-1] * state.uniform(), right=True))
    last = int(weights.nonzero()[-1])  # rounding must not pick a token of weight 0 past the end
    return int(ids[min(at, last)])


def filter_candidates(weights: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Keeps what top_k, then top_p, then min_p allow. The likeliest token always stays.

    top_k: the k likeliest. top_p: the fewest likeliest whose share of what top_k left reaches top_p. min_p: at least min_p times as
    likely as the likeliest.
    Shapes: weights [V] fp64, unnormalised probabilities
    Returns: (ids [C] int64, weights [C] fp64): by falling weight if top_k or top_p is on, else by id
    """
    if params.top_k or params.top_p < 1:
        ids, kept = _likeliest(weights, params)
    else:
        ids, kept = torch.arange(len(weights)), weights
    if params.min_p > 0:
        likely = kept >= params.min_p * kept.max()
        ids, kept = ids[likely], kept[likely]
    return ids, kept


def _likeliest(weights: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    if params.top_k:
        kept, ids = weights.topk(min(params.top_k, len(weights)))
        total = kept.sum()
    else:
        kept, ids = weights.topk(min(_TOP_P_GUESS, len(weights)))
        total = weights.sum()
        if kept.sum() < params.top_p * total:
            kept, ids = weights.sort(descending=True, stable=True)
    inside = kept.cumsum(0) - kept < params.top_p * total  # the share of all likelier ones
    inside[0] = True
    return ids[inside], kept[inside]


def logprob_tables(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax of the raw logits in fp32, of the chosen tokens and of the likeliest ones: finite for finite logits.

    Shapes: logits [R, V] fp32; token_ids [R] int; on one device
    Returns: [R] fp32; [R, count] fp32 falling; their ids [R, count] int64
    """
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(count, logits.shape[1]))
    return logprobs.gather(1, token_ids.long()[:, None])[:, 0], values, ids


def told_logprobs(chosen: float, values: Sequence[float], ids: Sequence[int]) -> types_pb2.TokenLogprobs:
    top = [types_pb2.TokenLogprob(token_id=token_id, logprob=value) for value, token_id in zip(values, ids, strict=True)]
    return types_pb2.TokenLogprobs(logprob=chosen, top=top)
