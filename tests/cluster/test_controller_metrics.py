"""What the controller exports of pools that have every field set, and of groups in each state."""

from types import SimpleNamespace

from cluster.controller_metrics import ControllerMetrics, Target, targets_page
from cluster.group import GroupState
from cluster.live import scrape_of
from cluster.reconcile import Phase
from common.config import parse_config


def group(pool: str, state: GroupState, phase: Phase):
    return SimpleNamespace(spec=SimpleNamespace(pool=pool), state=state, phase=phase)


def test_groups_gpus_and_prices_of_pools():
    pools = [
        {"name": "p", "role": "prefill", "layout": {"tp": 2}, "replicas": {"min": 1, "max": 3}},
        {"name": "d", "role": "decode", "layout": {"tp": 4, "ep": 4}, "usd_per_gpu_hour": 2.0},
    ]
    config = parse_config({"model": {"path": "x"}, "pools": pools, "autoscale": {"gpu_budget": 10}})
    metrics = ControllerMetrics(config)
    groups = [
        group("p", GroupState.READY, Phase.READY),
        group("p", GroupState.PLACING, Phase.STARTING),
        group("p", GroupState.READY, Phase.LEAVING),
        group("d", GroupState.LOADING, Phase.STARTING),
    ]
    metrics.refresh(config, groups, {"p": 2, "d": 1})
    metrics.scaled("p", 1, 2, "by hand")
    seen = scrape_of([metrics.metrics.render().decode()], 0.0)
    assert {s: seen.total("tandem_groups", pool="p", state=s) for s in ("placing", "loading", "ready", "stopping")} == {
        "placing": 1, "loading": 0, "ready": 1, "stopping": 1,
    }  # fmt: skip
    assert seen.total("tandem_pool_gpus", pool="p", role="prefill") == 4, "one that waits for a place holds none"
    assert seen.total("tandem_pool_usd_per_hour", pool="p") == 12.0
    assert seen.total("tandem_pool_usd_per_hour", pool="d") == 8.0
    assert seen.total("tandem_groups_wanted") == 3
    assert seen.total("tandem_autoscaler_decisions_total", direction="up") == 1


def test_targets_without_an_address_are_left_out():
    page = targets_page([Target("127.0.0.1:1", {"process": "router"}), Target("", {"process": "decode"})])
    assert page == b'[{"targets": ["127.0.0.1:1"], "labels": {"process": "router"}}]'
