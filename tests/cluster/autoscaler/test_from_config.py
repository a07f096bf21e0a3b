"""The policy is what the configuration says, and what an operator set by hand."""

from __future__ import annotations

import pytest

from cluster.autoscaler.from_config import policy_of
from common.config import parse_config
from common.errors import ConfigError

TREE = {
    "model": {"path": "/m"},
    "pools": [
        {"name": "p", "role": "prefill", "replicas": {"min": 0, "max": 4, "target_queue_wait_s": 0.5, "down_delay_s": 60}},
        {"name": "d", "role": "decode", "layout": {"tp": 4, "ep": 4}, "replicas": {"max": 2, "target_itl_ms": 25, "target_kv_use": 0.7}},
    ],
    "autoscale": {"gpu_budget": 12, "interval_s": 2},
}


def test_every_key_reaches_the_policy():
    policy = policy_of(parse_config(TREE))
    p, d = policy.pools
    assert (policy.gpu_budget, policy.interval_s) == (12, 2)
    assert (p.min, p.max, p.gpus, p.target_queue_wait_s, p.down_delay_s) == (0, 4, 1, 0.5, 60)
    assert (d.min, d.max, d.gpus, d.target_itl_ms, d.target_kv_use) == (1, 2, 4, 25, 0.7)


def test_a_pool_set_by_hand_keeps_its_number():
    p, d = policy_of(parse_config(TREE), {"p": 3}).pools
    assert (p.min, p.max) == (3, 3)
    assert (d.min, d.max) == (1, 2)


@pytest.mark.parametrize(
    ("key", "value"), [("target_kv_use", 1.5), ("target_itl_ms", 0), ("up_delay_s", -1), ("target_utilisation", 0), ("targets", 1)]
)
def test_impossible_targets_are_refused_by_name(key, value):
    pools = [{**TREE["pools"][0], "replicas": {key: value}}, TREE["pools"][1]]
    with pytest.raises(ConfigError, match=f"pools.0.replicas.{key}"):
        parse_config({**TREE, "pools": pools})
