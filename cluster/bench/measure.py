"""What clients saw, summed up: TTFT, ITL, TPOT, E2E, throughput, goodput and price. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import ConfigError

GOODPUT_KEYS = ("ttft", "tpot", "itl", "e2el")


@dataclass
class Sample:
    """One request as its client saw it. `arrivals`: (seconds, tokens) of each message with tokens; `error`: "" if it ended well."""

    sent_s: float
    prompt_tokens: int
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float = 0.0
    usd: float = math.nan
    error: str = ""

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    def times_ms(self) -> dict[str, float]:
        """By the names of `--goodput`; `itl` is the mean gap between messages."""
        first_s, last_s = self.arrivals[0][0], self.arrivals[-1][0]
        gaps = len(self.arrivals) - 1
        return {
            "ttft": (first_s - self.sent_s) * 1e3,
            "tpot": (last_s - first_s) * 1e3 / (self.tokens - 1) if self.tokens > 1 else 0.0,
            "itl": (last_s - first_s) * 1e3 / gaps if gaps else 0.0,
            "e2el": (self.ended_s - self.sent_s) * 1e3,
        }


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """`ttft:500 itl:20`. Raises: ConfigError naming the item"""
    bounds = {}
    for item in items:
        key, _, text = item.partition(":")
        try:
            bounds[key] = float(text)
        except ValueError:
            bounds[key] = math.nan
        if key not in GOODPUT_KEYS or not bounds[key] > 0:
            raise ConfigError(f"--goodput {item!r}: expected NAME:MS with NAME one of {', '.join(GOODPUT_KEYS)}")
    return bounds


def summarize(
    samples: Sequence[Sample], duration_s: float, goodput: Mapping[str, float], usd_per_hour: float | None = None
) -> dict[str, Any]:
    """Figures by name; times in ms as {mean, median, p99}. `usd_per_hour`: of all GPUs; without it the router's own figures count."""
    good = [sample for sample in samples if not sample.error and sample.arrivals]
    times = [sample.times_ms() for sample in good]
    gaps = [(after[0] - before[0]) * 1e3 for sample in good for before, after in zip(sample.arrivals, sample.arrivals[1:], strict=False)]
    output = sum(sample.tokens for sample in good)
    usd = usd_per_hour * duration_s / 3600 if usd_per_hour is not None else float(np.nansum([sample.usd for sample in good]))
    within = sum(all(own[key] <= bound for key, bound in goodput.items()) for own in times)
    return {
        "completed": len(good),
        "failed": len(samples) - len(good),
        "errors": sorted({sample.error for sample in samples if sample.error}),
        "duration_s": duration_s,
        "input_tokens": sum(sample.prompt_tokens for sample in good),
        "output_tokens": output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": output / duration_s,
        "goodput": within / duration_s if goodput else None,
        "ttft_ms": _figures([own["ttft"] for own in times]),
        "tpot_ms": _figures([own["tpot"] for own, sample in zip(times, good, strict=True) if sample.tokens > 1]),
        "itl_ms": _figures(gaps),
        "e2el_ms": _figures([own["e2el"] for own in times]),
        "usd_per_1m_output_tokens": usd / output * 1e6 if output and usd > 0 else None,
    }


def _figures(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "median": 0.0, "p99": 0.0}
    return {"mean": float(np.mean(values)), "median": float(np.median(values)), "p99": float(np.percentile(values, 99))}
