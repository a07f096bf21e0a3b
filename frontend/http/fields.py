"""Field types and rules that all request models share: strict values, named refusals, errors by field.

Owns the policy for fields: a model lists what is supported; IGNORED fields are accepted without effect; REFUSED ones
and unknown ones are answered 400 by name, so that nobody believes in an effect that isn't there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from common.errors import InvalidRequestError
from common.requests import MAX_LOGPROBS, MAX_N, MAX_STOP_BYTES, MAX_STOP_STRINGS
from frontend.http.errors import HttpError
from frontend.text_encoder import replace_surrogates

_INT64_MAX = 2**63 - 1
_MAX_VALUES = 200_000  # of one body, counted roughly before it is parsed: the parser holds the event loop
_MAX_MESSAGE_CHARS = 500  # of an error message; a hostile field name is not echoed in full

Number = Annotated[float, Field(allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX)]
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
ChoiceCount = Annotated[int, Field(ge=1, le=MAX_N)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_BYTES)]
StopStrings = StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
Objects = Annotated[list[dict[str, Any]], FailFast(), Field(max_length=20_000)]
Metadata = Annotated[dict[str, Any], Field(max_length=16)]

_Model = TypeVar("_Model", bound="RequestModel")


class StreamOptions(BaseModel):
    """`stream_options` of chat and text completions."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class RequestModel(BaseModel):
    """Base of the request models; values are taken strictly (no "1" for 1, no true for 1)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    REFUSED: ClassVar[Mapping[str, str]] = {}
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # refused, unless the value asks for nothing

    @classmethod
    def parse(cls: type[_Model], body: bytes) -> _Model:
        """The checked request. Raises: InvalidRequestError naming the first wrong field, HttpError if it is no JSON."""
        return cls.check(read_json_object(body))

    @classmethod
    def check(cls: type[_Model], fields: Mapping[str, Any]) -> _Model:
        """Like `parse`, of decoded JSON. A field that is null counts as absent."""
        kept = {}
        for name, value in fields.items():
            if value is None or name in cls.IGNORED or value in cls.NEUTRAL.get(name, ()):
                continue
            if name in cls.REFUSED:
                raise InvalidRequestError(name, cls.REFUSED[name])
            if name not in cls.model_fields:
                raise InvalidRequestError(name[:100], "no such field")
            kept[name] = value
        try:
            return cls.model_validate(kept)
        except ValidationError as exc:
            raise _first_error(exc) from None


def read_json_object(body: bytes) -> dict[str, Any]:
    """The body's JSON object, lone surrogates in it replaced by U+FFFD: what is said back must have a UTF-8 form.

    Raises: HttpError 400 if it is something else, 413 if it has too many values
    """
    if body.count(b",") + body.count(b"{") + body.count(b"[") > _MAX_VALUES:
        raise HttpError(413, f"the body has more than {_MAX_VALUES} commas and brackets", code="request_too_large")
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:  # only an escape can bring one in
            value = json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError) as exc:  # UnicodeDecodeError and numbers without end are ValueErrors
        reason = "nested too deep" if isinstance(exc, RecursionError) else str(exc)[:200]
        raise HttpError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # it could not be sent back
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _first_error(exc: ValidationError) -> InvalidRequestError:
    first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    path = str(first["loc"][0]) if first["loc"] else "body"
    for part in first["loc"][1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif path == "stream_options":  # elsewhere a word in the path is a branch of a union, which no client knows
            path += f".{part}"
    message = "no such field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    return InvalidRequestError(path[:100], message[:_MAX_MESSAGE_CHARS])
