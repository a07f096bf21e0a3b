"""Reports of several routers become one observation per pool; routers that start again or fall silent distort nothing."""

from __future__ import annotations

import pytest

from cluster.autoscaler.types import DecodeLoad, PrefillLoad
from cluster.demand import SILENT_S, Demand
from common.proto import control_pb2, types_pb2


def report(router: str, *, arrived_s: float = 0.0, **fields) -> control_pb2.LoadReport:
    load = control_pb2.PoolLoad(pool="p", role=types_pb2.ROLE_PREFILL, groups=2, arrived_prefill_s=arrived_s, **fields)
    return control_pb2.LoadReport(router_id=router, pools=[load])


def prefill(demand: Demand, now_s: float) -> PrefillLoad:
    load = demand.observe({"p": 2}, now_s)["p"].load
    assert isinstance(load, PrefillLoad)
    return load


def test_rates_are_sums_over_routers_since_the_last_observation():
    demand = Demand()
    demand.report(report("a", arrived_s=100.0), 0.0)
    demand.report(report("b", arrived_s=7.0), 0.0)
    assert prefill(demand, 0.0).arriving_s_per_s == 0.0, "what came before is not this second's load"
    demand.report(report("a", arrived_s=103.0), 2.0)
    demand.report(report("b", arrived_s=8.0), 2.0)
    assert prefill(demand, 2.0).arriving_s_per_s == pytest.approx((3.0 + 1.0) / 2)
    assert prefill(demand, 4.0).arriving_s_per_s == 0.0


def test_a_router_that_starts_again_counts_from_zero():
    demand = Demand()
    demand.report(report("a", arrived_s=50.0), 0.0)
    demand.observe({"p": 1}, 0.0)
    demand.report(report("a", arrived_s=2.0), 1.0)
    assert prefill(demand, 1.0).arriving_s_per_s == pytest.approx(2.0)


def test_queues_add_up_and_work_on_shared_groups_counts_once():
    demand = Demand()
    demand.report(report("a", queued_s=1.0, running_s=4.0, queue_wait_s=0.5), 0.0)
    demand.report(report("b", queued_s=2.0, running_s=4.0, queue_wait_s=2.5, waiting=3), 0.0)
    load = prefill(demand, 0.0)
    assert (load.backlog_s, load.queue_wait_s, load.waiting) == (7.0, 2.5, 3)


def test_silent_routers_count_no_more_and_without_any_there_is_no_observation():
    demand = Demand()
    demand.report(report("a", queued_s=1.0), 0.0)
    demand.report(report("b", queued_s=2.0), SILENT_S)
    assert prefill(demand, SILENT_S + 1).backlog_s == 2.0
    assert demand.observe({"p": 2}, 3 * SILENT_S) == {}


def test_decode_pools_are_seen_whole():
    demand = Demand()
    for router, sequences in (("a", 5), ("b", 9)):
        load = control_pb2.PoolLoad(
            pool="d", role=types_pb2.ROLE_DECODE, groups=2, sequences=sequences, sequences_per_group=30 + sequences, itl_ms=sequences,
            kv_blocks_used=40, kv_blocks_total=200,
        )  # fmt: skip
        demand.report(control_pb2.LoadReport(router_id=router, pools=[load]), 0.0)
    assert demand.observe({"d": 2, "unknown": 1}, 0.0)["d"].load == DecodeLoad(
        sequences=14, sequences_per_group=35, itl_ms=9, kv_blocks_used=40, kv_blocks_per_group=100
    )


def test_somebody_who_waits_for_a_pool_that_sleeps_is_told_at_once():
    assert Demand().report(report("a", waiting=1), 0.0)
    assert not Demand().report(report("a"), 0.0)
