"""A request as the engines see it, and the checks that everything from outside passes once, at the router.

Engines trust a `Request`: whatever could break one (ids past the vocabulary, NaN, lists without end) is refused here with the field's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from common.errors import InvalidRequestError
from common.proto import router_pb2, types_pb2

MAX_LABEL_BYTES = 256
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 1024
MAX_LOGPROBS = 20
MAX_N = 16
MAX_MESSAGE_BYTES = 4 << 20


@dataclass(frozen=True)
class ModelLimits:
    """What requests are checked against. `has_vocab`: token bytes are known, so that stop strings can be matched."""

    vocab_size: int
    max_model_len: int
    has_vocab: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens. Every value is checked and complete; `temperature` 0 is greedy; `top_k` 0 is off; `max_tokens` >= 1.

    `seed` None asks for randomness of the router's choosing; engines always get a number.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: frozenset[int] = frozenset()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """A checked request. `label` is the client's own id; ids inside are the router's. None in an SLO: no bound."""

    label: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    ttft_slo_ms: float | None = None
    itl_slo_ms: float | None = None
    priority: int = 0
    latency_weight: float | None = None
    explain: bool = False


def parse_request(data: bytes, limits: ModelLimits) -> Request:
    """Decodes and checks one `GenerateRequest` as it came from the wire.

    Raises: InvalidRequestError naming the field
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError("request", f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES} are taken")
    message = router_pb2.GenerateRequest()
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise InvalidRequestError("request", "not a tandem.router.v1.GenerateRequest") from exc
    _refuse_unknown_fields(message, "")
    return check_request(message, limits)


def check_request(message: router_pb2.GenerateRequest, limits: ModelLimits) -> Request:
    """Raises: InvalidRequestError naming the first wrong field"""
    _require(len(message.request_id.encode()) <= MAX_LABEL_BYTES, "request_id", f"at most {MAX_LABEL_BYTES} bytes")
    prompt = tuple(message.tokenized.input_ids)
    _require(len(prompt) > 0, "tokenized.input_ids", "at least one token id is needed")
    _require(
        len(prompt) < limits.max_model_len,
        "tokenized.input_ids",
        f"{len(prompt)} tokens leave no room for output; the context is {limits.max_model_len}",
    )
    _check_ids(prompt, "tokenized.input_ids", limits)
    slo = message.slo
    weight = message.latency_weight if message.HasField("latency_weight") else None
    if weight is not None:
        _in_range(weight, 0, 1, "latency_weight")
    _in_range(message.priority, -100, 100, "priority")
    return Request(
        label=message.request_id,
        prompt_ids=prompt,
        sampling=check_sampling(message.sampling_params, len(prompt), limits),
        ttft_slo_ms=_positive(slo, "ttft_ms", "slo.ttft_ms"),
        itl_slo_ms=_positive(slo, "itl_ms", "slo.itl_ms"),
        priority=message.priority,
        latency_weight=weight,
        explain=message.explain,
    )


def check_sampling(params: types_pb2.SamplingParams, prompt_tokens: int, limits: ModelLimits) -> SamplingParams:
    """Fills in defaults and checks every field against its range.

    Raises: InvalidRequestError naming the field
    """

    def value(name: str, default: float) -> float:
        return getattr(params, name) if params.HasField(name) else default

    def number(name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        x = value(name, default)
        _in_range(x, low, high, f"sampling_params.{name}", above=above)
        return x

    room = limits.max_model_len - prompt_tokens
    max_tokens = int(value("max_tokens", room))
    _require(1 <= max_tokens <= room, "sampling_params.max_tokens", f"{max_tokens}; 1 to {room} fit with {prompt_tokens} prompt tokens")
    n = int(number("n", 1, 1, MAX_N))
    top_k = int(number("top_k", 0, -1, limits.vocab_size))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=number("temperature", 1.0, 0, 100),
        top_p=number("top_p", 1.0, 0, 1, above=True),
        top_k=max(top_k, 0),
        min_p=number("min_p", 0.0, 0, 1),
        presence_penalty=number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=number("frequency_penalty", 0.0, -2, 2),
        repetition_penalty=number("repetition_penalty", 1.0, 0, 10, above=True),
        min_tokens=int(number("min_tokens", 0, 0, max_tokens)),
        stop=_check_stop(params, limits),
        stop_token_ids=frozenset(_check_list(params.stop_token_ids, MAX_STOP_TOKENS, "sampling_params.stop_token_ids", limits)),
        logit_bias=_check_bias(params, limits),
        allowed_token_ids=frozenset(_check_list(params.allowed_token_ids, MAX_ALLOWED_TOKENS, "sampling_params.allowed_token_ids", limits)),
        seed=params.seed if params.HasField("seed") else None,
        n=n,
        logprobs=int(number("logprobs", 0, 0, MAX_LOGPROBS)) if params.HasField("logprobs") else None,
        ignore_eos=params.ignore_eos,
    )


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """The complete message that groups get. `seed` must be chosen by then."""
    message = types_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=sorted(params.stop_token_ids),
        logit_bias=params.logit_bias,
        allowed_token_ids=sorted(params.allowed_token_ids),
        n=params.n,
        ignore_eos=params.ignore_eos,
    )
    if params.seed is not None:
        message.seed = params.seed
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    return message


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Inverse of `sampling_to_proto`, for messages from our own router: trusts them."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=frozenset(message.allowed_token_ids),
        seed=message.seed if message.HasField("seed") else None,
        n=message.n,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        ignore_eos=message.ignore_eos,
    )


def _require(ok: bool, name: str, message: str) -> None:
    if not ok:
        raise InvalidRequestError(name, message)


def _in_range(x: float, low: float, high: float, name: str, *, above: bool = False) -> None:
    ok = math.isfinite(x) and (low < x if above else low <= x) and x <= high
    _require(ok, name, f"{x}; must lie in {'(' if above else '['}{low}, {high}]")


def _positive(message: Message, attribute: str, name: str) -> float | None:
    if not message.HasField(attribute):
        return None
    x = getattr(message, attribute)
    _require(math.isfinite(x) and x > 0, name, f"{x}; must be above 0")
    return x


def _check_ids(ids: Iterable[int], name: str, limits: ModelLimits) -> None:
    worst = max(ids, default=0)
    _require(worst < limits.vocab_size, name, f"id {worst} is past the vocabulary of {limits.vocab_size}")


def _check_list(ids, most: int, name: str, limits: ModelLimits) -> tuple[int, ...]:
    _require(len(ids) <= most, name, f"{len(ids)} ids; at most {most}")
    _check_ids(ids, name, limits)
    return tuple(ids)


def _check_bias(params: types_pb2.SamplingParams, limits: ModelLimits) -> dict[int, float]:
    name = "sampling_params.logit_bias"
    _check_list(params.logit_bias, MAX_LOGIT_BIAS, name, limits)
    for bias in params.logit_bias.values():
        _in_range(bias, -100, 100, name)
    return dict(params.logit_bias)


def _check_stop(params: types_pb2.SamplingParams, limits: ModelLimits) -> tuple[str, ...]:
    name = "sampling_params.stop"
    _require(len(params.stop) <= MAX_STOP_STRINGS, name, f"{len(params.stop)} strings; at most {MAX_STOP_STRINGS}")
    for text in params.stop:
        _require(0 < len(text.encode()) <= MAX_STOP_BYTES, name, f"each must have 1 to {MAX_STOP_BYTES} bytes")
    _require(not params.stop or limits.has_vocab, name, "this deployment has no vocabulary (model.vocab) to match text with")
    return tuple(params.stop)


def _refuse_unknown_fields(message: Message, path: str) -> None:
    """A field that has a known number and the wrong wire type parses as unknown; so does a field of a newer protocol."""
    for unknown in UnknownFieldSet(message):
        known = message.DESCRIPTOR.fields_by_number.get(unknown.field_number)
        name = path + (known.name if known else f"#{unknown.field_number}")
        raise InvalidRequestError(name, "wrong type" if known else "no such field")
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None and isinstance(value, Message):
            _refuse_unknown_fields(value, f"{path}{descriptor.name}.")
