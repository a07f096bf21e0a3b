"""Who gets how many groups when the pools together need more GPUs than there may be. Pure; called by `decide.py`."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.autoscaler.types import PoolPolicy


def allot(
    pools: tuple[PoolPolicy, ...], gpu_budget: int, before: Mapping[str, int], asked: Mapping[str, int], spare: Mapping[str, int]
) -> dict[str, int]:
    """Groups by pool, at most `asked` and within the budget.

    Nobody who keeps or gives up groups is touched while everything fits. Else each pool that grows gets one group at a time, the one with
    the smallest part of its wish first; and pools that hold more than they need right now (`spare`: groups they could do without) give
    those up at once instead of after their delay. A pool without any group takes one from the largest pool before it goes empty-handed.
    Requires: the minima fit into the budget (the configuration is refused otherwise).
    """
    by_name = {pool.name: pool for pool in pools}
    granted = {name: min(before[name], asked[name]) for name in by_name}
    _shrink_to(by_name, gpu_budget, granted)
    _grow(by_name, gpu_budget, granted, asked)
    if _short(granted, asked):
        for name, extra in spare.items():
            granted[name] = max(by_name[name].min, granted[name] - extra)
        _grow(by_name, gpu_budget, granted, {name: asked[name] - spare.get(name, 0) for name in asked})
        _grow(by_name, gpu_budget, granted, asked)
    for name in by_name:
        if granted[name] == 0 < asked[name]:
            _take_one_for(name, by_name, gpu_budget, granted)
    return granted


def gpus_of(pools: Mapping[str, PoolPolicy], groups: Mapping[str, int]) -> int:
    return sum(pools[name].gpus * count for name, count in groups.items())


def _short(granted: Mapping[str, int], asked: Mapping[str, int]) -> bool:
    return any(granted[name] < asked[name] for name in asked)


def _shrink_to(pools: Mapping[str, PoolPolicy], gpu_budget: int, granted: dict[str, int]) -> None:
    """A budget that was lowered, or groups started by hand: the largest pools give first."""
    while gpus_of(pools, granted) > gpu_budget:
        givers = [name for name in granted if granted[name] > pools[name].min]
        if not givers:
            return
        granted[max(givers, key=lambda name: (granted[name] * pools[name].gpus, name))] -= 1


def _grow(pools: Mapping[str, PoolPolicy], gpu_budget: int, granted: dict[str, int], asked: Mapping[str, int]) -> None:
    while True:
        left = gpu_budget - gpus_of(pools, granted)
        growing = [name for name in granted if granted[name] < asked[name] and pools[name].gpus <= left]
        if not growing:
            return
        granted[min(growing, key=lambda name: (granted[name] >= pools[name].min, granted[name] / asked[name], name))] += 1


def _take_one_for(name: str, pools: Mapping[str, PoolPolicy], gpu_budget: int, granted: dict[str, int]) -> None:
    """Frees room for one group of `name` from pools that keep at least one; all or nothing."""
    trial = dict(granted)
    while gpus_of(pools, trial) + pools[name].gpus > gpu_budget:
        givers = [other for other in trial if other != name and trial[other] > max(1, pools[other].min)]
        if not givers:
            return
        trial[max(givers, key=lambda other: (trial[other] * pools[other].gpus, other))] -= 1
    trial[name] = 1
    granted.update(trial)
