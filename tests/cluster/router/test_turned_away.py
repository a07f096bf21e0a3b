"""Requests that no queue takes are turned away before anything is made for them, and never one that the choice would have taken."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.cost_model import PoolSpec
from cluster.profile import builtin_profile
from cluster.router.choice import Aim
from cluster.router.chooser import Chooser, Objective
from cluster.router.pool import PoolSet
from cluster.router.queue import QueueLimits, Ticket
from common.errors import InvalidRequestError, OverloadedError, ServingError
from common.proto import router_pb2
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup
from tests.support.router_bed import bed, request_of, until
from tests.support.still_groups import add_decode, add_prefill

PROFILE = builtin_profile(36, on_cuda=True)
LIMITS = QueueLimits(max_requests=3, max_prompt_tokens=9000, max_wait_s=1.0)
pool_states = st.fixed_dictionaries(
    {
        "queued": st.lists(st.tuples(st.integers(1, 5000), st.floats(1, 600), st.integers(-1, 1)), max_size=4),
        "busy_ms": st.none() | st.floats(1, 3000),
        "is_open": st.sampled_from([True, True, False]),
        "groups": st.integers(0, 2),
        "longest": st.sampled_from([4000, 100_000]),
    }
)


def verdict(act) -> type[ServingError] | None:
    try:
        act()
    except ServingError as exc:
        return type(exc)
    return None


@given(st.lists(pool_states, min_size=1, max_size=3), st.integers(1, 6000), st.integers(-1, 1))
@settings(deadline=None)
def test_it_says_no_only_where_the_choice_does(states, prompt, priority):
    pools, now_s = PoolSet(), 100.0
    add_decode(pools, PoolSpec("d", tp=1, ep=1, max_batch=64, capacity_tokens=200_000), PROFILE, 1)
    for i, state in enumerate(states):
        spec = PoolSpec(f"p{i}", tp=1, ep=1, capacity_tokens=state["longest"])
        pool = add_prefill(pools, spec, PROFILE, state["groups"], LIMITS)
        for tokens, ms, level in state["queued"]:
            pool.queue.push(Ticket(tokens, ms, now_s + 50, now_s, priority=level), accepted_before=True)
        for link in pool.links.values():
            if state["busy_ms"] is not None:
                link.book.give(object(), state["busy_ms"], now_s)
                pool.refresh(link)
        pool.set_state(router_pb2.POOL_STATE_ACTIVE if state["is_open"] else router_pb2.POOL_STATE_DRAINING)
    chooser = Chooser(pools, PROFILE, Objective(), seed=1)
    early = verdict(lambda: chooser.check_room(prompt, priority, now_s))
    late = verdict(lambda: chooser.plan(chooser.shape_of(prompt, 100), Aim(0.5), now_s, priority))
    if early is not None:
        assert (early, late) == (OverloadedError, OverloadedError)
    elif late is OverloadedError:  # a pool without a queue, or one that the request is too long for, leaves it to the choice
        assert any(not s["queued"] or prompt + 100 > s["longest"] for s in states)
    assert late is not InvalidRequestError or early is None


async def test_the_refusal_says_when_the_queue_has_room_and_is_not_logged(caplog):
    prefill, decode = FakePrefillGroup(prefill_ms=lambda tokens: 5000.0), FakeDecodeGroup()
    async with bed(prefill, decode, limits=QueueLimits(max_requests=2)) as router:
        pool, metrics = router.router.pools.set.prefill["prefill"], router.router.generator.metrics
        waiting = [asyncio.create_task(router.generate(request_of((i,), max_tokens=1))) for i in range(4)]
        await until(lambda: len(pool.queue) == 2)
        with caplog.at_level(logging.INFO), pytest.raises(grpc.RpcError) as refused:
            await router.generate(request_of((7,) * 50))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "at most 2 may" in refused.value.details()
        mean_ms = pool.queue.service_ms / 2
        assert int(dict(refused.value.trailing_metadata())["retry-after-ms"]) == pytest.approx(mean_ms, abs=1.0)
        assert not [record for record in caplog.records if "failed" in record.message]
        counted = [line for line in metrics.metrics.render().decode().splitlines() if 'outcome="refused"' in line]
        assert [line.split()[-1] for line in counted] == ["1.0"]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
