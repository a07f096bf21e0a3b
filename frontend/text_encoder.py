"""Encodes plain text with one vocabulary: exact ids, linear time, no special tokens, bounded input.

Owns the limits that keep an encoder from freezing or dying on hostile text; formats call it. Thread-safe, and tiktoken
releases the GIL while it works, so a thread pool keeps an event loop free.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import InvalidRequestError
from frontend.vocab import Vocabulary

_BLANKS = re.compile(r"\s+")


@dataclass(frozen=True)
class TextLimits:
    """`max_chars`: characters of one request, all texts together; `max_blank_run`: whitespace characters in a row (the
    pre-token regex recurses on them, and a million overflow its stack)."""

    max_chars: int = 2_000_000
    max_blank_run: int = 100_000


class TextEncoder:
    """Text to ids of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, limits: TextLimits):
        self._vocabulary = vocabulary
        self.limits = limits

    def encode(self, text: str, *, field: str) -> list[int]:
        """Ids of `text`; what looks like a special token is text like any other, a lone surrogate becomes U+FFFD.

        Raises: InvalidRequestError naming `field` if the text is beyond the limits or the encoder gives up on it.
        """
        self.check_size(len(text), field)
        if len(text) > self.limits.max_blank_run:
            longest = max(map(len, _BLANKS.findall(text)), default=0)
            if longest > self.limits.max_blank_run:
                raise InvalidRequestError(
                    field, f"has {longest} whitespace characters in a row; at most {self.limits.max_blank_run} are accepted"
                )
        try:
            return self._vocabulary.text.encode_ordinary(replace_surrogates(text))
        except BaseException as exc:
            if type(exc).__name__ != "PanicException":  # how the Rust encoder reports that its stack overflowed
                raise
            raise InvalidRequestError(field, "cannot be encoded: it holds too long a run of one kind of character") from exc

    def check_size(self, chars: int, field: str) -> None:
        """Raises InvalidRequestError naming `field` if a request has more characters than the limit."""
        if chars > self.limits.max_chars:
            raise InvalidRequestError(field, f"{chars} characters; at most {self.limits.max_chars} are accepted")


def replace_surrogates(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD: they have no UTF-8 form, so no encoder takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
