"""What the autoscaler is told and what it answers: frozen values, so that a decision can be kept, replayed and explained.

Made by the controller from configuration and load reports, and by the simulator from its model of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PoolPolicy:
    """One pool's bounds and targets. `gpus`: per group; delays [s]: how long a need must last before it is followed.

    `target_itl_ms` None: the batch limit alone bounds a decode group. A pool with `min == max` is never changed.
    """

    name: str
    role: str
    gpus: int = 1
    min: int = 1
    max: int = 1
    target_queue_wait_s: float = 1.0
    target_utilisation: float = 0.75
    target_itl_ms: float | None = None
    target_kv_use: float = 0.85
    up_delay_s: float = 0.0
    down_delay_s: float = 300.0


@dataclass(frozen=True)
class Policy:
    """`gpu_budget`: GPUs that all pools together may hold; `interval_s`: time between two decisions."""

    pools: tuple[PoolPolicy, ...]
    gpu_budget: int
    interval_s: float = 5.0


@dataclass(frozen=True)
class PrefillLoad:
    """`arriving_s_per_s`: predicted prefill seconds (of one group) that arrived per second since the last decision; `backlog_s`: those that
    wait or run; `queue_wait_s`: predicted wait of a newcomer. `waiting`: requests that no running group can take."""

    arriving_s_per_s: float = 0.0
    backlog_s: float = 0.0
    queue_wait_s: float = 0.0
    waiting: int = 0


@dataclass(frozen=True)
class DecodeLoad:
    """Over all groups of the pool. `sequences`: running, reserved, or waiting for room; `sequences_per_group`: most that one group may run
    within its batch limit and `target_itl_ms`, by the cost model; `itl_ms`: the slowest group's, measured; blocks [KV blocks] count what is
    allotted, so the growth that running requests were promised is in them. `waiting`: requests that no running group can take."""

    sequences: float = 0.0
    sequences_per_group: float = 1.0
    itl_ms: float = 0.0
    kv_blocks_used: float = 0.0
    kv_blocks_per_group: float = 0.0
    waiting: int = 0


@dataclass(frozen=True)
class Observation:
    """One pool at this moment. `ready`: groups that serve. Those that still start are in `PoolState.wanted`: nobody asks for them twice."""

    load: PrefillLoad | DecodeLoad
    ready: int = 0


@dataclass(frozen=True)
class Need:
    """Groups that the load needs. `up`: with the targets just met; `down`: with room to spare, never less than `up`. `why` names the figure
    that decides."""

    up: int
    down: int
    why: str


@dataclass(frozen=True)
class PoolState:
    """What one pool's decisions are made of besides the load.

    `wanted`: groups so far; `rate`: smoothed arrivals of a prefill pool; `too_many`: fewest sequences per group at which a decode pool's
    ITL was seen past its target, infinite for never; `since_s`: when it was last brought up to date; `needs`: those of the last while.
    """

    wanted: int
    rate: float = 0.0
    too_many: float = math.inf
    since_s: float | None = None
    needs: tuple[tuple[float, Need], ...] = ()


State = Mapping[str, PoolState]


@dataclass(frozen=True)
class Change:
    """One pool's step from `before` to `after` groups, and the reason in words and numbers."""

    pool: str
    before: int
    after: int
    reason: str
    at_s: float


@dataclass(frozen=True)
class Decision:
    """`wanted`: groups by pool, within bounds and budget. `short`: pools that need more than the budget leaves, with the GPUs they lack."""

    wanted: Mapping[str, int]
    changes: tuple[Change, ...]
    state: State
    short: Mapping[str, int] = field(default_factory=dict)
