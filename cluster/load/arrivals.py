"""A load: when requests arrive and how long they are; and loads drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """One entry per request, in order of arrival. `at_s` [n] from 0; `prompt_tokens`, `output_tokens` [n] at least 1; `prefixes`: hashes of
    the prompt's blocks where a trace has them, else empty."""

    at_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    prefixes: Sequence[tuple[int, ...]] = ()

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def rate(self) -> float:
        """Requests per second."""
        span_s = float(self.at_s[-1] - self.at_s[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span_s if span_s > 0 else float(len(self))

    def head(self, count: int) -> Load:
        return Load(self.at_s[:count], self.prompt_tokens[:count], self.output_tokens[:count], self.prefixes[:count])

    def at_rate(self, rate: float) -> Load:
        """The same requests, closer together or further apart."""
        return Load(self.at_s * (self.rate / rate), self.prompt_tokens, self.output_tokens, self.prefixes)


@dataclass(frozen=True)
class Lengths:
    """Token counts. `spread`: sigma of a log-normal whose mean is `mean`; 0 = all alike."""

    mean: int
    spread: float = 0.0
    longest: int = 131072

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.spread == 0.0:
            return np.full(count, self.mean)
        drawn = rng.lognormal(np.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return np.clip(np.rint(drawn), 1, self.longest).astype(int)


def random_load(count: int, rate: float, prompt: Lengths, output: Lengths, *, burstiness: float = 1.0, seed: int = 0) -> Load:
    """Gamma-distributed gaps of mean `1 / rate` [s] and shape `burstiness`: 1 is Poisson, smaller comes in bursts, larger is more even.

    Raises: ConfigError for a rate, count or burstiness that is not above 0
    """
    for name, value in (("count", count), ("rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise ConfigError(f"load: {name} {value} must be above 0")
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    return Load(np.cumsum(gaps) - gaps[0], prompt.draw(rng, count), output.draw(rng, count))


def mixed_load(parts: Sequence[Load]) -> Load:
    """Several loads on one time axis."""
    at_s = np.concatenate([part.at_s for part in parts])
    order = np.argsort(at_s, kind="stable")
    return Load(
        at_s[order],
        np.concatenate([part.prompt_tokens for part in parts])[order],
        np.concatenate([part.output_tokens for part in parts])[order],
    )
