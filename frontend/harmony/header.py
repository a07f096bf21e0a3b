"""Reads the header of one Harmony message, tolerantly: pure functions on its decoded sections.

Owns the question what a header says and what in it is no header at all (text of a reply that lost its markers). It
knows no token ids and keeps no state. Called by `frontend.harmony.parse` for each token of a header, which is short.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from frontend.harmony.tokens import ASSISTANT, CHANNELS, CONTENT_TYPES, FUNCTIONS, ROLES

SectionKind = Literal["role", "channel", "constrain"]
MAX_HEADER_CHARS = 512  # longer than any honest header: beyond it the text is content
MAX_STRAY_CHARS = 48  # words after a channel that are no header words; held this long in case <|message|> comes

_WORD = re.compile(r"\S+")
_RECIPIENT = re.compile(r"to=([^\s{<]*)")
_CONTENT_TYPE = re.compile(r"[\w.+/-]+")
_BUILTIN_TOOLS = ("python", "browser", "container")


@dataclass
class Header:
    """What a header says.

    Attributes: `role` the author's word; `channel` one of CHANNELS, or None when missing or unknown; `body` what is
    content if no <|message|> follows, `is_plain` that it then has no header at all; `has_stray_words` words that are lost
    if <|message|> does follow; `is_open` whether the next tokens may still be header; `repairs` kinds mended so far.
    """

    role: str = ASSISTANT
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    body: str = ""
    is_plain: bool = False
    has_stray_words: bool = False
    is_open: bool = True
    repairs: list[str] = field(default_factory=list)


@dataclass
class _Section:
    kind: SectionKind
    text: str
    is_last: bool
    stray: str = ""  # from the first word that is no header word


class _Reader:
    def __init__(self, is_role_given: bool, tool_names: frozenset[str] | None):
        self.header = Header()
        self._is_role_given = is_role_given
        self._tool_names = tool_names or frozenset()
        self._channel_word: str | None = None
        self._is_role_known = True
        self._bare_channel = False

    def read(self, sections: Sequence[tuple[SectionKind, str]]) -> Header:
        parts = [_Section(kind, text, i == len(sections) - 1) for i, (kind, text) in enumerate(sections)]
        for part in parts:
            self._read_section(part)
        if not self._is_role_given and not parts[0].text.strip():
            self.header.repairs.append("missing_role")
        if not self._is_role_known:
            self.header.repairs.append("unknown_role")
            self.header.role = ASSISTANT
        self._settle_channel()
        stray = "".join(part.stray for part in parts)
        self.header.has_stray_words = bool(stray.strip())
        self.header.body = self._body(parts, stray)
        self.header.is_open = self._is_open(parts, stray)
        return self.header

    def _read_section(self, part: _Section) -> None:
        if part.kind == "channel" and self._channel_word is not None:
            self.header.repairs.append("duplicate_channel")
        for number, match in enumerate(_WORD.finditer(part.text)):
            used = self._read_first(part, match.group()) if number == 0 else None
            if used is None:
                used = self._read_word(match.group(), is_after_channel=part.kind != "role")
            if used < len(match.group()):
                part.stray = part.text[match.start() + used :]
                return

    def _read_first(self, part: _Section, word: str) -> int | None:
        """Characters of the first word of a section that are header; None when it has to be read as any other word."""
        if part.kind == "channel":
            self._channel_word = word
            return len(word)
        if part.kind == "constrain":
            match = _CONTENT_TYPE.match(word)
            if match is None or word.startswith("to="):
                return None
            self.header.content_type = match.group()
            if match.group() not in CONTENT_TYPES:
                self.header.repairs.append("unknown_content_type")
            return match.end()
        if word == ASSISTANT:
            return len(word)
        if self._is_role_given or word.startswith("to="):
            return None
        self.header.role = word
        self._is_role_known = word in ROLES or word.startswith(FUNCTIONS)
        return len(word)

    def _read_word(self, word: str, *, is_after_channel: bool) -> int:
        """Characters of `word` that are header: all, a part, or 0."""
        header = self.header
        match = _RECIPIENT.match(word)
        if match:
            if header.recipient is None:
                header.recipient = match.group(1)
            else:
                header.repairs.append("duplicate_recipient")
            return match.end()
        if not is_after_channel and header.recipient is None and header.channel is None and word in CHANNELS:
            header.channel = word
            self._bare_channel = True
            return len(word)
        if is_after_channel and header.recipient is None and (word.startswith(FUNCTIONS) or word in self._tool_names):
            header.recipient = word
            header.repairs.append("bare_recipient")
            return len(word)
        kind = word.partition("{")[0]  # `json{"a":1}` has lost its <|message|>
        if kind in CONTENT_TYPES and header.content_type is None and (is_after_channel or header.recipient is not None):
            header.content_type = kind
            return len(kind)
        return 0

    def _settle_channel(self) -> None:
        header, word = self.header, self._channel_word
        if word is None:
            header.repairs.append("channel_without_marker" if self._bare_channel else "missing_channel")
            return
        header.channel = next((name for name in CHANNELS if word.lower().startswith(name)), None)
        if header.channel is None:
            header.repairs.append("unknown_channel")
        elif header.channel != word:
            header.repairs.append("channel_spelling")

    def _body(self, parts: list[_Section], stray: str) -> str:
        header = self.header
        is_call = header.recipient is not None and is_tool(header.recipient, self._tool_names)
        if is_call or (header.recipient is not None and self._channel_word is not None):
            start = max(stray.find("{"), 0)
            if stray[:start].strip():
                header.repairs.append("call_words")
            return stray[start:]
        if self._channel_word is None:
            header.is_plain = True
            text = "".join(part.text for part in parts)
            if self._is_role_given or not self._is_role_known:
                return text
            return text.lstrip().removeprefix(header.role).lstrip()
        glued = self._channel_word[len(header.channel or "") :]
        if header.channel is None and not stray.strip() and any(name.startswith(glued) for name in CHANNELS):
            glued = ""  # a channel name that was cut off
        last = next(part for part in reversed(parts) if part.kind == "channel")
        between = last.text[last.text.find(self._channel_word) + len(self._channel_word) :] if glued else stray
        return (glued + between).lstrip()

    def _is_open(self, parts: list[_Section], stray: str) -> bool:
        if sum(len(part.text) for part in parts) > MAX_HEADER_CHARS:
            return False
        if not stray.strip():
            return True
        if self._channel_word is not None or self.header.recipient is not None:
            return len(stray) <= MAX_STRAY_CHARS and not (self.header.recipient is not None and "{" in stray)
        last = parts[-1]
        candidates = ("to=", *CHANNELS, *((ASSISTANT,) if self._is_role_given else ()))
        is_one_word = len(stray.split()) == 1 and not stray[-1].isspace() and last.stray == stray
        return is_one_word and any(name.startswith(stray) for name in candidates)


def is_tool(recipient: str, tool_names: frozenset[str]) -> bool:
    """Whether `recipient` names a tool beyond doubt: by its namespace, or because the request offered it."""
    return recipient.startswith(FUNCTIONS) or recipient in tool_names or recipient.split(".")[0] in _BUILTIN_TOOLS


def read_header(sections: Sequence[tuple[SectionKind, str]], *, is_role_given: bool, tool_names: frozenset[str] | None) -> Header:
    """Reads a header as far as it has come.

    `sections` hold the decoded text after each marker, in order, the first being the role section. `is_role_given`: the
    prompt has already said `<|start|>assistant`. `tool_names`: the tools that the request offered, None if unknown.
    Source: openai-harmony 0.0.8, whose strict parser this agrees with on well-formed headers.
    """
    return _Reader(is_role_given, tool_names).read(sections)
