"""The cost model: its formulas on numbers worked out by hand, and what must hold for any load, price and request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cost_model import Corrections, PairLoad, PoolSpec, Shape, occupancy, predict, prepare_decode, prepare_prefill, score
from cluster.profile import DecodeCell, DecodeTable, PrefillCell, PrefillTable, Profile, TransferCell, builtin_profile
from common.kv_layout import KVGeometry

KV = KVGeometry(4, 8, 64, 16, "bfloat16", 128, (True, False, True, False))
SIMPLE = Profile(
    model="m",
    hardware="h",
    created="2026-01-01",
    obtained="made up",
    prefill=(PrefillTable(tp=1, ep=1, weights="fp8", cells=(PrefillCell(tokens=1000, ms=100.0, how="measured"),)),),
    decode=(
        DecodeTable(
            tp=2,
            ep=2,
            weights="mxfp4",
            cells=tuple(DecodeCell(batch=b, context_tokens=c, ms=1.0 + b, how="measured") for b in (1, 10) for c in (100, 10000)),
        ),
    ),
    transfer=TransferCell(gbytes_per_s=100.0, fixed_ms=2.0, how="measured"),
)
PREFILL = PoolSpec("p", weights="fp8", usd_per_gpu_hour=3.0)
DECODE = PoolSpec("d", tp=2, ep=2, usd_per_gpu_hour=4.0, max_batch=8, capacity_tokens=100_000)
H200 = builtin_profile(36, on_cuda=True)


def test_formulas_on_numbers_worked_out_by_hand():
    load = PairLoad(wait_ms=50.0, batch=3, context_tokens=3000)
    shape = Shape(prompt=1000, output=101, worst=1101)
    got = predict(SIMPLE, prepare_prefill(SIMPLE, PREFILL), prepare_decode(SIMPLE, DECODE), load, shape)
    assert got.queue_ms == 50.0
    assert got.prefill_ms == 100.0
    assert got.ttft_ms == 150.0
    assert got.itl_ms == pytest.approx(5.0)  # four sequences
    assert got.transfer_ms == 0.0  # no geometry known
    share = 1 / 8  # a batch place is more than 1101 / 100000 of the KV
    assert got.gpu_seconds == pytest.approx(0.1 + 2 * share * 0.5)
    assert got.cost_usd == pytest.approx((0.1 * 3.0 + 2 * share * 0.5 * 4.0) / 3600)
    assert got.latency_s == pytest.approx(0.15 + 0.5)


def test_transfer_hides_behind_prefill_except_for_the_last_layer():
    decode = replace(DECODE, kv=KV)
    shape = Shape(prompt=1000, output=2, worst=1002)
    got = predict(SIMPLE, prepare_prefill(SIMPLE, PREFILL), prepare_decode(SIMPLE, decode), PairLoad(), shape)
    copy_ms = KV.handover_bytes(1000) / 100e9 * 1e3
    assert got.transfer_ms == pytest.approx(2.0 + copy_ms / 4)
    slow = SIMPLE.model_copy(update={"transfer": SIMPLE.transfer.model_copy(update={"gbytes_per_s": 0.01})})
    got = predict(slow, prepare_prefill(slow, PREFILL), prepare_decode(slow, decode), PairLoad(), shape)
    assert got.transfer_ms == pytest.approx(2.0 + copy_ms * 1e4 - 100.0 * 3 / 4)


def test_one_token_needs_no_decode_pool():
    got = predict(SIMPLE, prepare_prefill(SIMPLE, PREFILL), None, PairLoad(wait_ms=5.0), Shape(1000, 1, 1001))
    assert (got.ttft_ms, got.transfer_ms, got.itl_ms) == (105.0, 0.0, 0.0)
    assert got.latency_s == pytest.approx(0.105)
    assert got.cost_usd == pytest.approx(0.1 * 3.0 / 3600)


def test_corrections_scale_their_parts():
    fix = Corrections(prefill=2.0, itl=3.0, dispatch_ms=7.0)
    shape = Shape(1000, 11, 1011)
    got = predict(SIMPLE, prepare_prefill(SIMPLE, PREFILL), prepare_decode(SIMPLE, DECODE), PairLoad(), shape, fix)
    assert got.prefill_ms == 200.0
    assert got.ttft_ms == 207.0
    assert got.itl_ms == pytest.approx(6.0)


def test_occupancy_is_the_larger_of_batch_place_and_kv():
    assert occupancy(DECODE, Shape(10, 1, 11)) == 1 / 8
    assert occupancy(DECODE, Shape(40_000, 10_000, 50_000)) == 0.5
    assert occupancy(DECODE, Shape(40_000, 10, 500_000)) == 1.0


layouts = st.sampled_from([1, 2, 4, 8])
formats = st.sampled_from(["fp8", "mxfp4"])
shapes = st.builds(lambda p, o, more: Shape(p, o, p + o + more), st.integers(1, 130_000), st.integers(1, 4000), st.integers(0, 1000))
loads = st.builds(PairLoad, st.floats(0, 1e5), st.integers(0, 200).map(float), st.floats(0, 1e7))
weights = st.floats(0, 1)


@st.composite
def pairs(draw):
    tp_p, tp_d = draw(layouts), draw(layouts)
    prefill = PoolSpec("p", tp=tp_p, ep=tp_p, weights=draw(formats), usd_per_gpu_hour=draw(st.floats(0.1, 20)))
    decode = PoolSpec(
        "d",
        tp=tp_d,
        ep=tp_d,
        weights=draw(formats),
        usd_per_gpu_hour=draw(st.floats(0.1, 20)),
        max_batch=draw(st.integers(1, 256)),
        capacity_tokens=draw(st.integers(10_000, 4_000_000)),
        kv=KV,
    )
    return prefill, decode


def scored(prefill: PoolSpec, decode: PoolSpec, load: PairLoad, shape: Shape, w: float) -> float:
    return score(predict(H200, prepare_prefill(H200, prefill), prepare_decode(H200, decode), load, shape), w)


@given(pairs(), loads, loads, shapes, weights)
def test_adding_load_never_makes_a_pair_look_better(pair, load, more, shape, w):
    heavier = PairLoad(load.wait_ms + more.wait_ms, load.batch + more.batch, load.context_tokens + more.context_tokens)
    assert scored(*pair, load, shape, w) <= scored(*pair, heavier, shape, w) * (1 + 1e-9)


@given(pairs(), loads, shapes, weights, st.floats(1, 10))
def test_a_dearer_pair_never_looks_better(pair, load, shape, w, factor):
    prefill, decode = pair
    before = scored(prefill, decode, load, shape, w)
    for dearer in (
        (replace(prefill, usd_per_gpu_hour=prefill.usd_per_gpu_hour * factor), decode),
        (prefill, replace(decode, usd_per_gpu_hour=decode.usd_per_gpu_hour * factor)),
    ):
        assert before <= scored(*dearer, load, shape, w) * (1 + 1e-9)


@given(pairs(), loads, shapes, weights, st.integers(0, 100_000))
def test_a_longer_prompt_never_looks_better(pair, load, shape, w, more):
    longer = Shape(shape.prompt + more, shape.output, shape.worst + more)
    assert scored(*pair, load, shape, w) <= scored(*pair, load, longer, w) * (1 + 1e-9)


@given(pairs(), loads, shapes, weights, st.floats(1, 10))
def test_a_slower_pair_at_the_same_price_never_looks_better(pair, load, shape, w, factor):
    prefill, decode = (prepare_prefill(H200, pair[0]), prepare_decode(H200, pair[1]))
    before = score(predict(H200, prefill, decode, load, shape), w)
    for fix in (Corrections(prefill=factor), Corrections(itl=factor)):
        assert before <= score(predict(H200, prefill, decode, load, shape, fix), w) * (1 + 1e-9)
