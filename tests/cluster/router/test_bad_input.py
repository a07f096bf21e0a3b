"""Every field of `GenerateRequest` made wrong in every way: refused by name, at once, and no group hears of it."""

from __future__ import annotations

import math
import struct
import time
from dataclasses import dataclass

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from common.proto import router_pb2, types_pb2
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup, tokens_of
from tests.support.router_bed import Bed, bed, request_of

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Case:
    id: str
    data: bytes
    field: str


def sampling(**fields) -> bytes:
    return request_of(**fields).SerializeToString()


def with_slo(**fields) -> bytes:
    return request_of(slo=types_pb2.Slo(**fields)).SerializeToString()


def top(**fields) -> bytes:
    message = request_of()
    for name, value in fields.items():
        setattr(message, name, value)
    return message.SerializeToString()


def prompt(ids) -> bytes:
    return request_of(ids).SerializeToString()


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def wrong_type(field: FieldDescriptor) -> bytes:
    """The field's number with a wire type that its type can't have: fixed32, or a varint for floats."""
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING):
        return varint(field.number << 3) + b"\x01"
    return varint(field.number << 3 | 5) + struct.pack("<I", 7)


def nested(number: int, inside: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(inside)) + inside


RANGES = {
    "temperature": (-0.1, 100.5),
    "top_p": (0.0, 1.1),
    "top_k": (-2, 201089),
    "min_p": (-0.1, 1.1),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "repetition_penalty": (0.0, 10.5),
    "max_tokens": (0, 131072),
    "min_tokens": (-1, 9),
    "n": (0, 17),
    "logprobs": (-1, 21),
}
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def cases() -> list[Case]:
    found = [
        Case("prompt-missing", router_pb2.GenerateRequest().SerializeToString(), "tokenized.input_ids"),
        Case("prompt-empty", prompt(()), "tokenized.input_ids"),
        Case("prompt-past-vocabulary", prompt((1, 201088)), "tokenized.input_ids"),
        Case("prompt-too-long", prompt([1] * 131072), "tokenized.input_ids"),
        Case("prompt-1-MB", prompt([200_000] * 350_000), "tokenized.input_ids"),
        Case("label-1-MB", top(request_id="x" * (1 << 20)), "request_id"),
        Case("priority-low", top(priority=-101), "priority"),
        Case("priority-high", top(priority=101), "priority"),
        Case("latency_weight-low", top(latency_weight=-0.1), "latency_weight"),
        Case("latency_weight-high", top(latency_weight=1.1), "latency_weight"),
        Case("latency_weight-nan", top(latency_weight=NAN), "latency_weight"),
        Case("stop-1-MB", sampling(stop=["x" * (1 << 20)]), "sampling_params.stop"),
        Case("stop-empty", sampling(stop=[""]), "sampling_params.stop"),
        Case("stop-17", sampling(stop=["a"] * 17), "sampling_params.stop"),
        Case("stop_token_ids-past-vocabulary", sampling(stop_token_ids=[201088]), "sampling_params.stop_token_ids"),
        Case("stop_token_ids-129", sampling(stop_token_ids=range(129)), "sampling_params.stop_token_ids"),
        Case("allowed_token_ids-past-vocabulary", sampling(allowed_token_ids=[2**32 - 1]), "sampling_params.allowed_token_ids"),
        Case("allowed_token_ids-2000", sampling(allowed_token_ids=range(2000)), "sampling_params.allowed_token_ids"),
        Case("allowed_token_ids-1-MB", sampling(allowed_token_ids=[100_000] * 350_000), "sampling_params.allowed_token_ids"),
        Case("logit_bias-past-vocabulary", sampling(logit_bias={201088: 5.0}), "sampling_params.logit_bias"),
        Case("logit_bias-1025", sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling_params.logit_bias"),
        Case("logit_bias-nan", sampling(logit_bias={1: NAN}), "sampling_params.logit_bias"),
        Case("logit_bias-inf", sampling(logit_bias={1: -INF}), "sampling_params.logit_bias"),
        Case("logit_bias-101", sampling(logit_bias={1: 101.0}), "sampling_params.logit_bias"),
        Case("not-protobuf", b"\xff" * 64, "request"),
        Case("cut-short", request_of().SerializeToString()[:-3], "request"),
        Case("1-MB-of-noise", bytes(range(256)) * 4096, "request"),
        Case("5-MB", b"\x00" * (5 << 20), "request"),
        Case("unknown-field", request_of().SerializeToString() + varint(900 << 3) + b"\x01", "#900"),
    ]
    for name, (low, high) in RANGES.items():
        found += [Case(f"{name}-{label}", sampling(**{name: x}), f"sampling_params.{name}") for label, x in (("low", low), ("high", high))]
    for name in FLOATS:
        found += [Case(f"{name}-{x}", sampling(**{name: x}), f"sampling_params.{name}") for x in (NAN, INF, -INF)]
    for name in ("ttft_ms", "itl_ms"):
        found += [Case(f"{name}-{x}", with_slo(**{name: x}), f"slo.{name}") for x in (0.0, -1.0, NAN, INF)]
    good = request_of().SerializeToString()
    for field in router_pb2.GenerateRequest.DESCRIPTOR.fields:
        found.append(Case(f"{field.name}-wrong-type", good + wrong_type(field), field.name))
    for number, prefix, message in (
        (2, "tokenized", types_pb2.TokenizedInput),
        (3, "sampling_params", types_pb2.SamplingParams),
        (4, "slo", types_pb2.Slo),
    ):
        for field in message.DESCRIPTOR.fields:
            found.append(Case(f"{prefix}.{field.name}-wrong-type", good + nested(number, wrong_type(field)), f"{prefix}.{field.name}"))
    return found


async def refusal(router: Bed, case: Case) -> float:
    """Returns: ms until the refusal"""
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as refused:
        await router.raw(case.data)
    took_ms = (time.monotonic() - began) * 1e3
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, (case.id, refused.value.code(), refused.value.details())
    assert refused.value.details().startswith(case.field), (case.id, refused.value.details())
    return took_ms


async def test_every_wrong_field_is_refused_by_name_and_no_group_hears_of_it():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        took_ms = {case.id: await refusal(router, case) for case in cases()}
        slow = {name: ms for name, ms in took_ms.items() if ms >= 100}
        for name in slow:  # once more: a busy machine may have slept in between, the router may not
            assert await refusal(router, next(case for case in cases() if case.id == name)) < 100, name
        assert prefill.calls == []
        assert decode.calls == []
        assert (await router.generate(request_of((1,), max_tokens=5))).tokens[0] == tokens_of((1,), 5)


async def test_seeds_at_the_ends_of_their_range_work_and_repeat():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        for seed in (2**63 - 1, -(2**63), 0):
            await router.generate(request_of(seed=seed, max_tokens=2))
            await router.generate(request_of(seed=seed, max_tokens=2))
    assert [work.sampling.seed for work in prefill.prefilled] == [2**63 - 1] * 2 + [-(2**63)] * 2 + [0] * 2


async def test_two_requests_without_a_seed_get_different_ones():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        await router.generate(request_of(max_tokens=2))
        await router.generate(request_of(max_tokens=2))
    first, second = prefill.prefilled
    assert first.sampling.seed != second.sampling.seed
