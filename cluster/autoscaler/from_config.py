"""The autoscaler's policy as the configuration tree says it."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.autoscaler.types import Policy, PoolPolicy
from common.config import Config, PoolNode


def policy_of(config: Config, pinned: Mapping[str, int] | None = None) -> Policy:
    """`pinned`: pools whose number of groups an operator has set by hand; they keep it."""
    held = pinned or {}
    return Policy(
        tuple(_pool_policy(pool, held.get(pool.name)) for pool in config.pools), config.autoscale.gpu_budget, config.autoscale.interval_s
    )


def _pool_policy(pool: PoolNode, pinned: int | None) -> PoolPolicy:
    node = pool.replicas
    return PoolPolicy(
        name=pool.name,
        role=pool.role,
        gpus=pool.layout.tp,
        min=node.min if pinned is None else pinned,
        max=node.max if pinned is None else pinned,
        target_queue_wait_s=node.target_queue_wait_s,
        target_utilisation=node.target_utilisation,
        target_itl_ms=node.target_itl_ms,
        target_kv_use=node.target_kv_use,
        up_delay_s=node.up_delay_s,
        down_delay_s=node.down_delay_s,
    )
