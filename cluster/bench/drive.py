"""Sends a load at its times, never more than so many at once, and collects what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.bench.measure import Sample
from cluster.bench.targets import Target
from cluster.load.arrivals import Load


async def drive(
    target: Target, load: Load, max_concurrency: int | None, on_done: Callable[[int], None] = lambda done: None
) -> tuple[list[Sample], float]:
    """Returns: one sample per request in order of arrival, and the seconds from the first sending to the last ending"""
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(max_concurrency or len(load))
    began_s, done = loop.time(), 0

    async def one(at_s: float, prompt: int, output: int) -> Sample:
        nonlocal done
        await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
        async with places:
            sample = await target.send(prompt, output)
        done += 1
        on_done(done)
        return sample

    arrivals = zip(load.at_s.tolist(), load.prompt_tokens.tolist(), load.output_tokens.tolist(), strict=True)
    samples = await asyncio.gather(*(one(*arrival) for arrival in arrivals))
    return list(samples), loop.time() - began_s
