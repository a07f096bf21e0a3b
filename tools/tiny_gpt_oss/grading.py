"""Is a completion well-formed Harmony, and does it do what was asked? Works on decoded text, special tokens spelled out.

Pure functions, no tokeniser and no torch, so that the same rules grade any server's output. Called by `evaluate`.
"""

import json
import re
from dataclasses import dataclass

_HEADER = re.compile(
    r"(?: to=(?P<before>[\w.]+))?<\|channel\|>(?P<channel>analysis|commentary|final)(?: to=(?P<after>[\w.]+))?"
    r"(?P<json> ?<\|constrain\|>json)?"
)
_STOPS = re.compile(r"<\|(end|return|call)\|>")
_NEXT = "<|start|>assistant"
_FORBIDDEN = ("<|", "<?>", "�")


class MalformedCompletion(Exception):
    """A completion that does not parse strictly, or ends in the wrong stop token."""


@dataclass(frozen=True)
class Part:
    """One assistant message of a completion."""

    channel: str
    recipient: str | None
    is_json: bool
    text: str
    stop: str


@dataclass(frozen=True)
class Grade:
    is_well_formed: bool
    is_right: bool


def parse_completion(text: str) -> list[Part]:
    """Messages of a completion whose prompt ended in <|start|>assistant. Raises MalformedCompletion."""
    parts: list[Part] = []
    while True:
        header, found, rest = text.partition("<|message|>")
        match = _HEADER.fullmatch(header)
        stop = _STOPS.search(rest)
        if not found or match is None or stop is None:
            raise MalformedCompletion(f"no complete message at {text[:60]!r}")
        body = rest[: stop.start()]
        if any(mark in body for mark in _FORBIDDEN) or (match["before"] and match["after"]):
            raise MalformedCompletion(f"bad content or header at {text[:60]!r}")
        recipient = match["before"] or match["after"]
        parts.append(Part(match["channel"], recipient, match["json"] is not None, body, stop[1]))
        text = rest[stop.end() :]
        expected = "call" if recipient else "return" if match["channel"] == "final" else "end"
        if stop[1] != expected:
            raise MalformedCompletion(f"message ends in {stop[1]}, expected {expected}")
        if expected != "end":
            break
        if not text.startswith(_NEXT):
            raise MalformedCompletion(f"no next message at {text[:60]!r}")
        text = text[len(_NEXT) :]
    if text:
        raise MalformedCompletion(f"text after the stop token: {text[:60]!r}")
    return parts


def grade(task: str, gold: str, values: list[str], text: str) -> Grade:
    """Compares a completion with the gold one: a call by all its fields, a final answer by the values in it."""
    try:
        got = parse_completion(text)[-1]
    except MalformedCompletion:
        return Grade(False, False)
    want = parse_completion(gold)[-1]
    if want.recipient is not None:
        return Grade(True, _is_same_call(want, got))
    if got.channel != "final":
        return Grade(True, False)
    if task == "arithmetic":
        return Grade(True, re.findall(r"(?:(?<== )-)?\d+", got.text)[-1:] == values)
    return Grade(True, all(_has_word(got.text, value) for value in values))


def _is_same_call(want: Part, got: Part) -> bool:
    try:
        is_same = json.loads(want.text) == json.loads(got.text)
    except json.JSONDecodeError:
        return False
    return is_same and (want.recipient, want.channel, want.is_json) == (got.recipient, got.channel, got.is_json)


def _has_word(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None
