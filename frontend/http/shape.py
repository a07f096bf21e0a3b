"""Pieces of answers that several endpoints share: usage, log probabilities, route, text of several messages."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from common.proto import router_pb2
from frontend.chat_format import ChatFormat, ContentDelta, Finish, ReasoningDelta
from frontend.choice import VisibleToken
from frontend.generation import Outcome

_LEAST_LOGPROB = -9999.0  # what OpenAI answers for a token that could not come
_BETWEEN_MESSAGES = "\n\n"
COMPACT = (",", ":")  # JSON separators of events, of which there is one per token


class MessageJoiner:
    """Joins the messages of one choice into one text per kind: a blank line stands between two of them."""

    def __init__(self) -> None:
        self._last: dict[type, int] = {}

    def text(self, event: ContentDelta | ReasoningDelta) -> str:
        """What of this delta is sent, with the blank line before it if a new message begins."""
        last = self._last.get(type(event))
        self._last[type(event)] = event.message_index
        return event.text if last in (None, event.message_index) else _BETWEEN_MESSAGES + event.text


def new_id(prefix: str) -> str:
    """A fresh id such as `chatcmpl-4f0c...`."""
    return f"{prefix}{secrets.token_hex(12)}"


def usage_of(outcome: Outcome) -> dict[str, Any]:
    """`usage` as in chat and text completions."""
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens},
    }


def logprobs_of(chat_format: ChatFormat, tokens: Sequence[VisibleToken]) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`, one per visible token."""
    return [
        {
            **token_of(chat_format, token.token_id, token.logprobs.logprob),
            "top_logprobs": [token_of(chat_format, top.token_id, top.logprob) for top in token.logprobs.top],
        }
        for token in tokens
    ]


def token_of(chat_format: ChatFormat, token_id: int, logprob: float) -> dict[str, Any]:
    """One token with its probability; a special token is named by its id, never by its marker."""
    raw = chat_format.token_bytes(token_id)
    text = raw.decode("utf-8", "replace") if raw else f"token_id:{token_id}"
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw) if raw else None}


def finite(logprob: float) -> float:
    """`logprob` as JSON can say it."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def flags_of(finish: Finish) -> dict[str, Any]:
    """`tandem` of a choice: only there when something had to be mended or is missing."""
    if not finish.is_content_missing and not finish.repairs:
        return {}
    return {"tandem": {"content_missing": finish.is_content_missing, "repairs": dict(finish.repairs)}}


def route_headers(outcome: Outcome) -> dict[str, str]:
    """`x-tandem-route`: the chosen pools and what was predicted; empty while the router has told nothing."""
    decision = outcome.report.decision if outcome.report is not None else outcome.decision
    chosen = next((c for c in decision.candidates if c.chosen), None) if decision is not None else None
    if chosen is None:
        return {}
    predicted = chosen.prediction
    return {
        "x-tandem-route": (
            f"prefill={chosen.prefill_pool}; decode={chosen.decode_pool}; ttft_ms={predicted.ttft_ms:.3f}; "
            f"itl_ms={predicted.itl_ms:.3f}; cost_usd={predicted.cost_usd:.9f}"
        )
    }


def route_of(outcome: Outcome) -> dict[str, Any] | None:
    """The whole route report (or the decision alone, if the request ended early) as JSON."""
    message: router_pb2.RouteReport | None = outcome.report
    if message is None and outcome.decision is not None:
        message = router_pb2.RouteReport(decision=outcome.decision)
    return None if message is None else MessageToDict(message, preserving_proto_field_name=True)
