"""Options by which several commands are told of a load: a trace, or rate and lengths to draw from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import ConfigError

if TYPE_CHECKING:
    from cluster.load.arrivals import Load
    from cluster.profile import Profile

TraceOption = Annotated[Path | None, typer.Option("--trace", help="Trace to replay: Mooncake's JSON lines or Azure's CSV.")]
RateOption = Annotated[float | None, typer.Option("--rate", help="Requests per second; with --trace, its speed is changed to this.")]
InputOption = Annotated[int, typer.Option("--input-tokens", min=1, help="Mean prompt length.")]
OutputOption = Annotated[int, typer.Option("--output-tokens", min=1, help="Mean output length.")]
SpreadOption = Annotated[float, typer.Option("--spread", min=0, help="Sigma of the log of lengths; 0 = all alike.")]
BurstinessOption = Annotated[float, typer.Option("--burstiness", help="1 is Poisson, smaller comes in bursts, larger is more even.")]
RequestsOption = Annotated[int, typer.Option("--requests", min=1, help="How many requests to draw, or at most to take from the trace.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Same seed, same load.")]
ProfileOption = Annotated[
    str, typer.Option("--profile", help="120b or 20b: the shipped H200 profiles; cpu: the laptop's; else a file that `tandem sweep` wrote.")
]
PriceOption = Annotated[float, typer.Option("--price", min=0.001, help="$ per GPU-hour where a pool names none.")]


def load_from(
    trace: Path | None, rate: float | None, prompt: int, output: int, spread: float, burstiness: float, requests: int, seed: int
) -> Load:  # fmt: skip
    """Raises: ConfigError if neither a trace nor a rate is given, or the trace can't be read"""
    from cluster.load.arrivals import Lengths, random_load
    from cluster.load.traces import read_trace

    if trace is not None:
        load = read_trace(trace).head(requests)
        return load if rate is None else load.at_rate(rate)
    if rate is None:
        raise ConfigError("a load is needed: --rate with lengths, or --trace FILE")
    return random_load(requests, rate, Lengths(prompt, spread), Lengths(output, spread), burstiness=burstiness, seed=seed)


def profile_from(text: str) -> Profile:
    """Raises: ConfigError naming the file"""
    from cluster.profile import builtin_profile, load_profile

    shipped = {"120b": (36, True), "20b": (24, True), "cpu": (None, False)}
    if text in shipped:
        layers, on_cuda = shipped[text]
        return builtin_profile(layers, on_cuda=on_cuda)
    return load_profile(Path(text))
