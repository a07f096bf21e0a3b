"""The decision: loads in, groups wanted per pool out. Pure; the caller gives the time and keeps the state between calls.

    load -> need (`needs.py`) -> lasting need: up at once or after `up_delay_s`, down after `down_delay_s` -> bounds -> budget (`budget.py`)

Run by the controller every `interval_s`; the simulator runs the very same function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from cluster.autoscaler.budget import allot
from cluster.autoscaler.needs import need, too_many
from cluster.autoscaler.types import Change, Decision, Need, Observation, Policy, PoolPolicy, PoolState, PrefillLoad, State

SMOOTHING = 1 / 8  # part of `down_delay_s` over which arrival rates are averaged
PRESSED = 1 / 4  # part of `down_delay_s` after which a group without use may go when another pool lacks its GPUs
FORGET = 50.0  # down delays over which the memory of an ITL past its target fades


def start_state(policy: Policy) -> State:
    """Before the first decision: every pool at its minimum."""
    return {pool.name: PoolState(pool.min) for pool in policy.pools}


def decide(policy: Policy, state: State, seen: Mapping[str, Observation], now_s: float) -> Decision:
    """`seen`: one observation per pool; a pool without one (nobody reports its load) keeps what it has. `state`: from the last decision, or
    `start_state`; a pool that is new in it starts at its minimum."""
    states = {pool.name: state.get(pool.name, PoolState(pool.min)) for pool in policy.pools}
    before = {name: pool_state.wanted for name, pool_state in states.items()}
    asked, spare, why = dict(before), {}, {}
    for pool in policy.pools:
        observation = seen.get(pool.name)
        if observation is not None:
            states[pool.name] = _remember(policy, pool, states[pool.name], observation, now_s)
            asked[pool.name], why[pool.name] = _lasting(pool, states[pool.name], now_s)
            spare[pool.name] = _spare(pool, states[pool.name], asked[pool.name], now_s)
        asked[pool.name] = max(asked[pool.name], pool.min)
    _spill(policy, asked, why)
    asked = {pool.name: min(asked[pool.name], pool.max) for pool in policy.pools}
    spare = {name: min(count, asked[name]) for name, count in spare.items()}
    wanted = allot(policy.pools, policy.gpu_budget, before, asked, spare)
    changes = tuple(
        Change(name, before[name], wanted[name], _reason(before[name], wanted[name], asked[name], why.get(name, "bounds")), now_s)
        for name in wanted
        if wanted[name] != before[name]
    )
    gpus = {pool.name: pool.gpus for pool in policy.pools}
    short = {
        name: (asked[name] - wanted[name]) * gpus[name] for name in wanted if wanted[name] < asked[name] and asked[name] > before[name]
    }
    return Decision(wanted, changes, {name: replace(s, wanted=wanted[name]) for name, s in states.items()}, short)


def _remember(policy: Policy, pool: PoolPolicy, state: PoolState, seen: Observation, now_s: float) -> PoolState:
    """Brings the record up to this moment; forgets what no delay looks back at any more, but for one sample from before."""
    load, past_s = seen.load, math.inf if state.since_s is None else now_s - state.since_s
    if isinstance(load, PrefillLoad):
        tau_s = max(policy.interval_s, SMOOTHING * pool.down_delay_s)
        rate = load.arriving_s_per_s + (state.rate - load.arriving_s_per_s) * math.exp(-past_s / tau_s)
        state = replace(state, rate=rate, since_s=now_s)
    else:
        tau_s = FORGET * max(pool.down_delay_s, policy.interval_s)
        faded = state.too_many / math.exp(-past_s / tau_s) if past_s < 100 * tau_s else math.inf
        state = replace(state, too_many=too_many(pool, load, seen.ready, faded), since_s=now_s)
    horizon_s = now_s - max(pool.up_delay_s, pool.down_delay_s)
    needs = [*state.needs, (now_s, need(pool, seen, state))]
    while len(needs) > 1 and needs[1][0] <= horizon_s:
        needs.pop(0)
    return replace(state, needs=tuple(needs))


def _lasting(pool: PoolPolicy, state: PoolState, now_s: float) -> tuple[int, str]:
    """What was needed all through the delay: more than wanted, for up; less than wanted, for down. A pool that is awake because a request
    came does not wait for `up_delay_s`: nobody serves it meanwhile."""
    newest = state.needs[-1][1]
    if state.wanted == 0:
        return newest.up, newest.why
    ups = _within(state, pool.up_delay_s, now_s)
    if ups and min(n.up for n in ups) > state.wanted:
        return min(n.up for n in ups), newest.why
    downs = _within(state, pool.down_delay_s, now_s)
    if downs and max(n.down for n in downs) < state.wanted:
        return max(n.down for n in downs), f"{newest.why}, for {pool.down_delay_s:g} s"
    return state.wanted, newest.why


def _spare(pool: PoolPolicy, state: PoolState, asked: int, now_s: float) -> int:
    """Groups that were of no use for a part of the down delay: given up early when another pool lacks their GPUs."""
    recent = _within(state, PRESSED * pool.down_delay_s, now_s)
    return max(0, min(asked, state.wanted) - max(n.down for n in recent)) if recent else 0


def _spill(policy: Policy, asked: dict[str, int], why: dict[str, str]) -> None:
    """What a pool needs beyond its maximum goes to the other pools of its role, in GPUs."""
    for full in policy.pools:
        gpus = (asked[full.name] - full.max) * full.gpus
        for pool in policy.pools:
            if gpus > 0 and pool.role == full.role and asked[pool.name] < pool.max:
                extra = min(math.ceil(gpus / pool.gpus), pool.max - asked[pool.name])
                asked[pool.name] += extra
                gpus -= extra * pool.gpus
                why[pool.name] = f"{full.name} is at its maximum of {full.max}: {why.get(full.name, 'bounds')}"


def _within(state: PoolState, delay_s: float, now_s: float) -> list[Need]:
    """The needs that held during the last `delay_s`; empty if the record does not reach back so far."""
    start_s = now_s - delay_s
    if state.needs[0][0] > start_s:
        return []
    first = max(i for i, (at_s, _) in enumerate(state.needs) if at_s <= start_s)
    return [n for _, n in state.needs[first:]]


def _reason(before: int, after: int, asked: int, why: str) -> str:
    if after < asked:
        return f"{why}; {asked} wanted, the GPU budget leaves {after}" if after >= before else f"{why}; its GPUs go to another pool"
    return why
