"""Pools that can't run or be joined are refused before any process is started, all at once and with the reasons."""

from __future__ import annotations

import pytest

from cluster.check import check_pools
from cluster.up import bring_up
from common.config import parse_config
from common.errors import ConfigError
from model.fixture import write_random_fixture


def config_of(path, prefill: dict, decode: dict, **model):
    pools = [{"name": "p", "role": "prefill", "layout": prefill}, {"name": "d", "role": "decode", "layout": decode}]
    tree = {"model": {"path": str(path), **model}, "pools": pools, "autoscale": {"gpu_budget": 16}, "cluster": {"device": "cpu"}}
    return parse_config(tree)


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory):
    """Six experts and six query heads on three KV heads: most layouts don't divide them."""
    path = tmp_path_factory.mktemp("odd") / "tiny"
    write_random_fixture(path, vocab_size=1024, num_layers=2, num_experts=6, num_qo_heads=6, num_kv_heads=3)
    return path


def test_every_reason_of_every_pool_is_named_at_once(odd_model):
    with pytest.raises(ConfigError) as caught:
        check_pools(config_of(odd_model, {"tp": 2}, {"tp": 4, "ep": 4}))
    assert "pool p: " in str(caught.value)
    assert "pool d: " in str(caught.value)
    assert "6 experts" in str(caught.value)
    assert "3 KV heads" in str(caught.value)


def test_a_context_past_the_models_is_refused(odd_model):
    with pytest.raises(ConfigError, match="131072"):
        check_pools(config_of(odd_model, {"tp": 1}, {"tp": 1}, max_model_len=131073))


def test_bring_up_refuses_before_it_starts_anything(odd_model, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="KV heads"):
        bring_up(config_of(odd_model, {"tp": 8}, {"tp": 1}), "never")
    assert list(tmp_path.iterdir()) == []
