"""Every field of a request, wrong in every way, is refused at the edge with its name; complete ones survive the wire."""

import math
import time

import pytest

from common.errors import InvalidRequestError
from common.proto import router_pb2
from common.requests import ModelLimits, parse_request, sampling_from_proto, sampling_to_proto
from tests.support.pace import within

LIMITS = ModelLimits(vocab_size=201088, max_model_len=4096, has_vocab=True)


def good(**sampling) -> router_pb2.GenerateRequest:
    message = router_pb2.GenerateRequest(request_id="r")
    message.tokenized.input_ids.extend([1, 2, 3])
    for name, value in sampling.items():
        field = getattr(message.sampling_params, name)
        if name == "logit_bias":
            for key, bias in value.items():
                field[key] = bias
        elif isinstance(value, list):
            field.extend(value)
        else:
            setattr(message.sampling_params, name, value)
    return message


BAD_SAMPLING = [
    *[(name, value) for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
      for value in (math.nan, math.inf, -math.inf, 1e30, -5.0)],
    ("top_p", 0.0), ("repetition_penalty", 0.0), ("top_k", -2), ("top_k", 201089), ("max_tokens", 0), ("max_tokens", -1),
    ("max_tokens", 4094), ("min_tokens", -1), ("min_tokens", 5000), ("n", 0), ("n", 17), ("logprobs", -1), ("logprobs", 21),
    ("stop_token_ids", [201088]), ("stop_token_ids", [1] * 129), ("logit_bias", {201088: 5.0}), ("logit_bias", {4294967295: 5.0}),
    ("logit_bias", {1: math.nan}), ("logit_bias", dict.fromkeys(range(1025), 1.0)), ("allowed_token_ids", [201088]),
    ("allowed_token_ids", list(range(2000))), ("stop", [""]), ("stop", ["x" * 1025]), ("stop", ["x"] * 17), ("stop", ["x" * (1 << 20)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING, ids=lambda v: str(v)[:24])
def test_a_sampling_value_out_of_range_is_refused_by_name(name, value):
    started = time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(good(**{name: value}).SerializeToString(), LIMITS)
    assert caught.value.field == f"sampling_params.{name}"
    assert time.monotonic() - started < within(0.1)


def change(**fields):
    message = good()
    for name, value in fields.items():
        target, _, leaf = name.rpartition("__")
        setattr(getattr(message, target) if target else message, leaf, value)
    return message


def with_ids(ids):
    message = good()
    message.tokenized.ClearField("input_ids")
    message.tokenized.input_ids.extend(ids)
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (router_pb2.GenerateRequest(), "tokenized.input_ids"),
        (with_ids([]), "tokenized.input_ids"),
        (with_ids([201088]), "tokenized.input_ids"),
        (with_ids([2**32 - 1]), "tokenized.input_ids"),
        (with_ids([1] * 4096), "tokenized.input_ids"),
        (change(request_id="x" * (1 << 20)), "request_id"),
        (change(priority=101), "priority"),
        (change(latency_weight=math.nan), "latency_weight"),
        (change(latency_weight=1.5), "latency_weight"),
        (change(slo__ttft_ms=0.0), "slo.ttft_ms"),
        (change(slo__itl_ms=math.inf), "slo.itl_ms"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_request_field_out_of_range_is_refused_by_name(message, field):
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(message.SerializeToString(), LIMITS)
    assert caught.value.field == field


def wrong_wire_type(number: int) -> bytes:
    """The field as a fixed32, which none of ours but floats is."""
    return good().SerializeToString() + bytes([number << 3 | 5]) + b"\0\0\0\0"


@pytest.mark.parametrize("field", [f for f in router_pb2.GenerateRequest.DESCRIPTOR.fields], ids=lambda f: f.name)
def test_a_field_of_the_wrong_type_is_refused_by_name(field):
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(wrong_wire_type(field.number), LIMITS)
    assert caught.value.field == field.name


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff", b"{}", b"\x12\x02\x08"])
def test_bytes_that_are_no_request_are_refused(data):
    with pytest.raises(InvalidRequestError):
        parse_request(data, LIMITS)


def test_an_unknown_field_is_refused_rather_than_ignored():
    with pytest.raises(InvalidRequestError, match="#15: no such field"):
        parse_request(good().SerializeToString() + bytes([15 << 3, 1]), LIMITS)


def test_a_message_of_five_megabytes_is_refused_in_time():
    started = time.monotonic()
    with pytest.raises(InvalidRequestError):
        parse_request(b"\x0a" + b"x" * (5 << 20), LIMITS)
    assert time.monotonic() - started < within(0.1)


@pytest.mark.parametrize("stop", [["x"], []])
def test_stop_strings_need_a_vocabulary(stop):
    limits = ModelLimits(vocab_size=1024, max_model_len=64)
    if stop:
        with pytest.raises(InvalidRequestError, match=r"model\.vocab"):
            parse_request(good(stop=stop).SerializeToString(), limits)
    else:
        assert parse_request(good().SerializeToString(), limits).sampling.stop == ()


def test_defaults_fill_the_rest_of_the_context():
    request = parse_request(good().SerializeToString(), LIMITS)
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.logprobs) == (4093, 1.0, None)


def test_zero_seed_and_zero_logprobs_are_values_not_absence():
    sampling = parse_request(good(seed=0, logprobs=0).SerializeToString(), LIMITS).sampling
    assert (sampling.seed, sampling.logprobs) == (0, 0)


def test_checked_params_survive_the_wire():
    message = good(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, max_tokens=9, min_tokens=2, stop=["ab"], stop_token_ids=[5],
                   logit_bias={7: -1.5}, allowed_token_ids=[1, 7], seed=-(2**63), n=2, logprobs=3, ignore_eos=True,
                   presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5)  # fmt: skip
    sampling = parse_request(message.SerializeToString(), LIMITS).sampling
    assert sampling_from_proto(sampling_to_proto(sampling)) == sampling
