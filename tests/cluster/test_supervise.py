"""What the head's supervisor says of an incomplete cluster. `test_ray_up.py` lets it start and restart a controller on a real head."""

import pytest

from cluster.supervise import keep_controller, waits_for
from common.config import parse_config
from common.errors import ConfigError


def test_each_group_that_is_not_ready_is_named_with_its_reason():
    rows = [
        {"pool": "p", "group": "p-1", "state": "ready", "error": None, "tp": 1},
        {"pool": "p", "group": "p-2", "state": "loading", "error": None, "tp": 1},
        {"pool": "d", "group": "", "state": "failed", "error": "no node can hold 4 bundles", "tp": 0},
    ]
    assert waits_for(rows) == "d: no node can hold 4 bundles; p-2: loading"
    assert waits_for(rows[:1]) == ""


def test_it_joins_a_ray_cluster_and_starts_none():
    config = parse_config({"model": {"path": "/m"}, "pools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]})
    with pytest.raises(ConfigError, match=r"cluster\.ray_address is unset"):
        keep_controller(config)
