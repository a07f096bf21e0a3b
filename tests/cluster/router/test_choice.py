"""The choice: objective, SLOs, exclusions with reasons, spreading, determinism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cost_model import PairLoad, PoolSpec, Shape, itl_ms, predict, prefill_ms, prepare_decode, prepare_prefill
from cluster.profile import builtin_profile
from cluster.router.choice import Aim, Exclusion, Out, choose, explain, spread
from common.errors import InvalidRequestError, LayoutMismatch, OverloadedError, WorkerLost
from common.kv_layout import KVGeometry
from tests.support.offers import DecodeOffer, PrefillOffer, decode_side, pairs, prefill_side

KV = KVGeometry(4, 8, 64, 16, "bfloat16", 128, (True, False, True, False))
PROFILE = builtin_profile(36, on_cuda=True)
SHAPE = Shape(prompt=4000, output=200, worst=4200)


def prefill(name: str = "p", shape: Shape = SHAPE, *, tp: int = 1, wait_ms: float = 0.0, usd: float = 3.0, out=None) -> PrefillOffer:
    pool = prepare_prefill(PROFILE, PoolSpec(name, tp=tp, ep=tp, weights="fp8", usd_per_gpu_hour=usd))
    return PrefillOffer(pool, wait_ms, prefill_ms(pool, shape.prompt), out)


def decode(
    name: str = "d",
    shape: Shape = SHAPE,
    *,
    tp: int = 4,
    batch: float = 0,
    context: float = 0.0,
    wait_ms: float = 0.0,
    usd: float = 3.0,
    out=None,
) -> DecodeOffer:
    pool = prepare_decode(PROFILE, PoolSpec(name, tp=tp, ep=tp, usd_per_gpu_hour=usd, capacity_tokens=1 << 20, kv=KV))
    return DecodeOffer(pool, itl_ms(pool, PairLoad(0.0, batch, context), shape), wait_ms, out=out)


def decide(prefills, decodes, w: float = 0.5, shape: Shape = SHAPE, seed: int = 1, not_joinable=(), **slo):
    sides = prefill_side(prefills), decode_side(decodes, shape, PROFILE), pairs(prefills, decodes, dict(not_joinable))
    return choose(PROFILE, *sides, shape, Aim(w, **slo), seed)


def names(decision) -> tuple[str, str]:
    return decision.prefill_pool.name, decision.decode_pool.name if decision.decode_pool else ""


prices = st.floats(0.1, 20)
tps = st.sampled_from([1, 2, 4, 8])
prefill_lists = st.lists(st.tuples(tps, st.floats(0, 5000), prices), min_size=1, max_size=5)
decode_lists = st.lists(st.tuples(tps, st.integers(0, 100), prices), min_size=1, max_size=5)
weights = st.floats(0, 1)
seeds = st.integers(0, 2**64 - 1)


def offers(prefill_params, decode_params):
    return (
        [prefill(f"p{i}", tp=tp, wait_ms=wait, usd=usd) for i, (tp, wait, usd) in enumerate(prefill_params)],
        [decode(f"d{i}", tp=tp, batch=b, context=b * 4000.0, usd=usd) for i, (tp, b, usd) in enumerate(decode_params)],
    )


@given(prefill_lists, decode_lists, weights, seeds)
def test_all_pairs_at_once_equal_one_pair_at_a_time(prefill_params, decode_params, w, seed):
    prefills, decodes = offers(prefill_params, decode_params)
    decision = decide(prefills, decodes, w, seed=seed)
    for i, p in enumerate(prefills):
        for j, d in enumerate(decodes):
            batch = decode_params[j][1]
            alone = predict(PROFILE, p.pool, d.pool, PairLoad(p.wait_ms, batch, batch * 4000.0), SHAPE)
            assert np.allclose([*vars(alone).values()], [*vars(decision.prediction_of((i, j))).values()])


@given(prefill_lists, decode_lists, seeds)
def test_w_1_picks_the_fastest_and_w_0_the_cheapest(prefill_params, decode_params, seed):
    prefills, decodes = offers(prefill_params, decode_params)
    fastest, cheapest = decide(prefills, decodes, 1.0, seed=seed), decide(prefills, decodes, 0.0, seed=seed)
    assert fastest.prediction.latency_s <= np.min(fastest.terms.latency_s) * (1 + 1e-8)
    assert cheapest.prediction.cost_usd <= np.min(cheapest.terms.cost_usd) * (1 + 1e-8)


@given(prefill_lists, decode_lists, weights, seeds, st.floats(0.1, 1e4), st.integers(1, 50))
def test_load_or_price_added_to_a_loser_never_makes_it_win(prefill_params, decode_params, w, seed, more_ms, more_batch):
    prefills, decodes = offers(prefill_params, decode_params)
    before = names(decide(prefills, decodes, w, seed=seed))
    for i, p in enumerate(prefills):
        if p.pool.spec.name == before[0]:
            continue
        changed = [replace(q, wait_ms=q.wait_ms + more_ms) if q is p else q for q in prefills]
        assert names(decide(changed, decodes, w, seed=seed))[0] != p.pool.spec.name
        tp, wait, usd = prefill_params[i]
        dearer = [prefill(f"p{i}", tp=tp, wait_ms=wait, usd=usd * 1.5) if q is p else q for q in prefills]
        assert names(decide(dearer, decodes, w, seed=seed))[0] != p.pool.spec.name
    for j, d in enumerate(decodes):
        if d.pool.spec.name == before[1]:
            continue
        tp, batch, usd = decode_params[j]
        busier = decode(f"d{j}", tp=tp, batch=batch + more_batch, context=(batch + more_batch) * 4000.0, usd=usd)
        assert names(decide(prefills, [busier if e is d else e for e in decodes], w, seed=seed))[1] != d.pool.spec.name


@given(prefill_lists, decode_lists, weights, seeds, st.floats(0.05, 1))
def test_a_pool_that_gets_faster_at_the_same_price_is_never_chosen_less(prefill_params, decode_params, w, seed, factor):
    prefills, decodes = offers(prefill_params, decode_params)
    row, column = decide(prefills, decodes, w, seed=seed).chosen
    faster = [replace(p, prefill_ms=p.prefill_ms * factor) if i == row else p for i, p in enumerate(prefills)]
    assert decide(faster, decodes, w, seed=seed).chosen[0] == row or factor > 1 - 1e-6
    quicker = [replace(d, itl_ms=d.itl_ms * factor) if j == column else d for j, d in enumerate(decodes)]
    assert decide(prefills, quicker, w, seed=seed).chosen[1] == column or factor > 1 - 1e-6


@given(prefill_lists, decode_lists, weights, seeds)
def test_same_state_and_seed_give_the_same_decision(prefill_params, decode_params, w, seed):
    first, second = (decide(*offers(prefill_params, decode_params), w, seed=seed) for _ in range(2))
    assert explain(first) == explain(second)


def test_64_at_once_spread_over_4_equal_pools():
    """Each choice sees the load of those before it, as the router adds its own before it scores the next."""
    idle_prefills, idle_decodes = [prefill(f"p{k}") for k in range(4)], [decode(f"d{k}") for k in range(4)]
    steps = [itl_ms(idle_decodes[0].pool, PairLoad(0.0, b, b * 4000.0), SHAPE) for b in range(65)]
    for round_number in range(100):
        waits, batches = [0.0] * 4, [0] * 4
        counts_p, counts_d = [0] * 4, [0] * 4
        for i in range(64):
            prefills = [replace(offer, wait_ms=wait) for offer, wait in zip(idle_prefills, waits, strict=True)]
            decodes = [replace(offer, itl_ms=steps[batch]) for offer, batch in zip(idle_decodes, batches, strict=True)]
            decision = decide(prefills, decodes, seed=round_number * 1000 + i)
            row, column = decision.chosen
            waits[row] += prefills[row].prefill_ms
            batches[column] += 1
            counts_p[row] += 1
            counts_d[column] += 1
        assert max(counts_p) / 16 <= 1.25
        assert max(counts_d) / 16 <= 1.25


def test_equals_are_spread_by_the_seed():
    prefills, decodes = [prefill(f"p{k}") for k in range(4)], [decode()]
    chosen = [decide(prefills, decodes, seed=seed).chosen[0] for seed in range(400)]
    assert all(80 <= chosen.count(k) <= 120 for k in range(4))


@given(seeds, st.integers(1, 1000))
def test_spread_is_an_index(seed, count):
    assert 0 <= spread(seed, count) < count


def test_slo_excludes_who_breaks_it_while_another_meets_it():
    slow, fast = prefill("slow", tp=1, usd=0.1), prefill("fast", tp=8, usd=10.0)
    assert names(decide([slow, fast], [decode()], 0.0))[0] == "slow"
    bound = (slow.prefill_ms + fast.prefill_ms) / 2
    decision = decide([slow, fast], [decode()], 0.0, ttft_slo_ms=bound)
    assert names(decision)[0] == "fast"
    assert "SLO" in next(c.reason for c in explain(decision).candidates if c.prefill_pool == "slow")
    assert names(decide([slow, fast], [decode()], 0.0, ttft_slo_ms=0.001))[0] == "slow"
    lazy, quick = decode("lazy", tp=1, usd=0.1), decode("quick", tp=8, usd=10.0)
    assert names(decide([slow], [lazy, quick], 0.0, itl_slo_ms=(lazy.itl_ms + quick.itl_ms) / 2))[1] == "quick"


def test_pools_without_room_are_out_while_another_has_some():
    full, free = decode("full", tp=8, wait_ms=100.0, usd=0.1), decode("free", tp=1, usd=10.0)
    decision = decide([prefill()], [full, free])
    assert names(decision)[1] == "free"
    assert "room" in explain(decision).candidates[0].reason
    only = decide([prefill(wait_ms=30.0)], [full])
    assert names(only)[1] == "full"
    assert only.prediction.queue_ms == 100.0


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Out.DRAINING, WorkerLost),
        (Out.UNHEALTHY, WorkerLost),
        (Out.FULL, OverloadedError),
        (Out.TOO_LONG, InvalidRequestError),
    ],
)
def test_exclusions_show_their_reason_and_end_typed_when_nobody_is_left(kind, error):
    out = Exclusion(kind, "because")
    decision = decide([prefill("a", out=out), prefill("b")], [decode()])
    assert names(decision)[0] == "b"
    reason = next(c.reason for c in explain(decision).candidates if c.prefill_pool == "a")
    assert kind.value in reason
    assert "because" in reason
    for nobody in (([prefill(out=out)], [decode()]), ([prefill()], [decode(out=out)])):
        with pytest.raises(error, match="because"):
            decide(*nobody)


def test_pairs_that_cannot_be_joined_are_out():
    bad = {("a", "d"): "block_size_tokens 16 != 32"}
    assert names(decide([prefill("a"), prefill("b", usd=9.0)], [decode()], 0.0, not_joinable=bad)) == ("b", "d")
    with pytest.raises(LayoutMismatch, match="block_size_tokens"):
        decide([prefill("a")], [decode()], not_joinable=bad)


def test_one_token_chooses_no_decode_pool():
    shape = Shape(prompt=100, output=1, worst=101)
    decision = decide([prefill(shape=shape)], [decode(shape=shape, out=Exclusion(Out.UNHEALTHY))], shape=shape)
    assert names(decision) == ("p", "")
    (candidate,) = explain(decision).candidates
    assert candidate.decode_pool == ""


def test_explanation_lists_every_pair_once_and_says_why():
    prefills, decodes = [prefill("p1"), prefill("p4", tp=4)], [decode("d1", tp=1), decode("d4")]
    shown = explain(decide(prefills, decodes, seed=7))
    assert [(c.prefill_pool, c.decode_pool) for c in shown.candidates] == [("p1", "d1"), ("p1", "d4"), ("p4", "d1"), ("p4", "d4")]
    assert sum(c.chosen for c in shown.candidates) == 1
    best = min(shown.candidates, key=lambda c: c.prediction.score)
    assert best.chosen
    assert all(c.reason.startswith(("chosen", "lost")) for c in shown.candidates)
    assert (shown.seed, shown.expected_output_tokens, shown.latency_weight) == (7, 200, 0.5)
