"""From one pool's load to the number of groups it needs: the two formulas, one per role. Pure; called by `decide.py`."""

from __future__ import annotations

import math

from cluster.autoscaler.types import DecodeLoad, Need, Observation, PoolPolicy, PoolState, PrefillLoad

MARGIN = 0.2  # a pool gives a group up only if the rest would stay this far below the targets
HEADROOM = 0.9  # share of the sequences that just meet the ITL target with which a decode group counts as full
WAITS_TO_CLEAR = 4.0  # a queue that is too long is to be worked off within this many target waits
_EPSILON = 1e-9


def need(policy: PoolPolicy, seen: Observation, state: PoolState) -> Need:
    """`state`: already brought up to this moment but for the needs."""
    load = seen.load
    if isinstance(load, PrefillLoad):
        return _prefill_need(policy, load, state.rate, state.wanted)
    return _decode_need(policy, load, seen.ready, state)


def too_many(policy: PoolPolicy, load: DecodeLoad, ready: int, before: float) -> float:
    """Fewest sequences per group that were seen to break the ITL target: the cost model may think otherwise, and a group that was added for
    it must not be given up while that load lasts."""
    per_group = load.sequences / max(ready, 1)
    if policy.target_itl_ms is None or per_group <= 1:
        return before
    if load.itl_ms > policy.target_itl_ms:
        return min(before, per_group)
    return before if per_group < before else math.inf


def _prefill_need(policy: PoolPolicy, load: PrefillLoad, rate: float, wanted: int) -> Need:
    if not (load.arriving_s_per_s or load.backlog_s or load.waiting):
        return Need(0, 0, "no request")
    up = max(1, _groups(rate / policy.target_utilisation))
    down = max(up, _groups(rate / (policy.target_utilisation * (1 - MARGIN))))
    why = f"{rate:.2f} prefill s/s at utilisation {policy.target_utilisation:g}"
    if load.queue_wait_s > policy.target_queue_wait_s:
        clearing = _groups(rate + load.backlog_s / (WAITS_TO_CLEAR * policy.target_queue_wait_s))
        if clearing > up:
            up, why = clearing, f"predicted queue wait {load.queue_wait_s:.1f} s, target {policy.target_queue_wait_s:g} s"
        down = max(down, up, wanted)
    return Need(up, down, why)


def _decode_need(policy: PoolPolicy, load: DecodeLoad, ready: int, state: PoolState) -> Need:
    if not (load.sequences or load.kv_blocks_used or load.waiting):
        return Need(0, 0, "no request")
    full = max(HEADROOM * load.sequences_per_group, 1.0)
    by_sequences = load.sequences / full
    by_kv = load.kv_blocks_used / (policy.target_kv_use * load.kv_blocks_per_group) if load.kv_blocks_per_group else 0.0
    up = max(1, _groups(max(by_sequences, by_kv)))
    if by_kv > by_sequences:
        why = f"{load.kv_blocks_used:.0f} KV blocks allotted, {policy.target_kv_use:.0%} of {load.kv_blocks_per_group:.0f} per group wanted"
    else:
        why = f"{load.sequences:.0f} sequences, {load.sequences_per_group:.0f} per group"
    target = policy.target_itl_ms
    if target is not None and load.itl_ms > target and load.sequences > ready >= up:
        up, why = ready + 1, f"ITL {load.itl_ms:.1f} ms, target {target:g} ms"
    held = load.sequences / max(HEADROOM * min(load.sequences_per_group, state.too_many), 1.0)
    return Need(up, max(up, _groups(max(held, by_kv) / (1 - MARGIN))), why)


def _groups(load: float) -> int:
    """Whole groups for a load measured in groups."""
    return math.ceil(load - _EPSILON)
