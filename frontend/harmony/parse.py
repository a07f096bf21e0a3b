"""Reads a Harmony reply from token ids, as a stream, and never loses what the model said.

Owns the state between tokens (header, content, between messages) and the mending of malformed input; what a header
says is `frontend.harmony.header`'s. Special tokens never become text, ordinary tokens always do. Called through
`HarmonyFormat.reply_parser`.

    HEADER --<|message|>--> CONTENT --<|end|>--> BETWEEN --<|start|>--> HEADER ...
       |                        |
       +-- <|return|>, <|call|> +--> DONE
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from frontend.chat_format import (
    ContentDelta,
    Event,
    Finish,
    FinishReason,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from frontend.harmony import tokens
from frontend.harmony.header import Header, SectionKind, read_header
from frontend.vocab import NUM_ORDINARY_TOKENS

_NUM_TOKENS = 201_088  # rows of the model's vocabulary; ids beyond are no tokens at all
_MAX_SECTIONS = 16  # of one header; no honest one has more than three
_REPLACEMENT = "\ufffd"
_new_decoder = codecs.getincrementaldecoder("utf-8")


class _State(Enum):
    HEADER = 1
    CONTENT = 2
    BETWEEN = 3
    DONE = 4


class _Stream(Enum):
    """Where the text of the current message goes."""

    CONTENT = 1
    REASONING = 2
    CALL = 3


class HarmonyReplyParser:
    """Implements `frontend.chat_format.ReplyParser` for one reply that follows `<|start|>assistant`."""

    def __init__(self, token_bytes: Sequence[bytes], *, tool_names: frozenset[str] | None = None, reply_prefix: Sequence[int] = ()):
        """`token_bytes[id]`: bytes of ordinary token id; `reply_prefix`: ids of the reply that stand in the prompt."""
        self._token_bytes = token_bytes
        self._tool_names = tool_names
        self._repairs: Counter[str] = Counter()
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._decoder = _new_decoder("replace")
        self._state = _State.HEADER
        self._stream = _Stream.CONTENT
        self._message_index = -1
        self._num_calls = 0
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
        self._has_content = False
        self._has_arguments = False
        self._has_half_character = False  # bytes of one that wait in the decoder
        self._sections: list[tuple[SectionKind, bytearray]] = []
        self._is_role_given = True
        self._open_header(is_role_given=True)
        self._consume(reply_prefix)

    @property
    def is_done(self) -> bool:
        """The reply has ended by <|return|> or <|call|>; later ids are ignored."""
        return self._state is _State.DONE

    @property
    def is_in_content(self) -> bool:
        """An ordinary token fed next would be a part of the visible answer."""
        return self._state is _State.CONTENT and self._stream is _Stream.CONTENT

    def feed(self, token_ids: Sequence[int]) -> list[Event]:
        """Events of these ids, adjacent deltas joined. Never raises on any id; see `ReplyParser.feed`."""
        if len(token_ids) == 1 and self._state is _State.CONTENT and not self._has_half_character:
            plain = self._feed_plain(token_ids[0])
            if plain is not None:
                return plain
        self._num_tokens += len(token_ids)
        self._consume(token_ids)
        return self._take_events()

    def finish(self, reason: FinishReason) -> list[Event]:
        """Flushes held text, ends open calls and adds `Finish`; `reason` is the engine's."""
        is_cut = reason == "length" and self._state is not _State.DONE
        if self._state is _State.HEADER:
            self._close_header(is_cut=is_cut)
        if self._state is _State.CONTENT:
            self._end_message(is_cut=is_cut)
        self._state = _State.DONE
        ended_by: FinishReason = "length" if is_cut else "tool_calls" if self._num_calls else "stop"
        is_missing = self._num_tokens > 0 and not self._has_content and not self._num_calls
        self._events.append(Finish(ended_by, is_missing, dict(self._repairs), self._num_reasoning_tokens))
        return self._take_events()

    def _feed_plain(self, token: int) -> list[Event] | None:
        """The short way of nearly every token: whole characters amid a message. None if it is anything else."""
        if not 0 <= token < NUM_ORDINARY_TOKENS or self._stream is _Stream.CALL:
            return None
        try:
            text = self._token_bytes[token].decode()
        except UnicodeDecodeError:
            return None
        self._num_tokens += 1
        if self._stream is _Stream.CONTENT:
            self._has_content = True
            return [ContentDelta(text, self._message_index)]
        self._num_reasoning_tokens += 1
        return [ReasoningDelta(text, self._message_index)]

    # -- tokens

    def _consume(self, token_ids: Sequence[int]) -> None:
        position, total = 0, len(token_ids)
        while position < total:
            if self._state is _State.CONTENT:
                end = position
                while end < total and 0 <= token_ids[end] < NUM_ORDINARY_TOKENS:
                    end += 1
                if end > position:
                    raw = b"".join([self._token_bytes[token] for token in token_ids[position:end]])
                    self._add_text(self._decode(raw))
                    if self._stream is _Stream.REASONING:
                        self._num_reasoning_tokens += end - position
                    position = end
                    continue
            self._step(token_ids[position])
            position += 1

    def _step(self, token: int) -> None:
        if self._state is _State.DONE:
            self._repairs["tokens_after_stop"] += 1
        elif 0 <= token < NUM_ORDINARY_TOKENS:
            self._on_header_text(self._token_bytes[token])
        elif token == tokens.START:
            self._on_start()
        elif token == tokens.MESSAGE:
            self._on_message()
        elif token == tokens.CHANNEL:
            self._on_section("channel")
        elif token == tokens.CONSTRAIN:
            self._on_section("constrain")
        elif token in tokens.MESSAGE_ENDS or token == tokens.END_OF_TEXT:
            self._on_end(token)
        else:
            self._on_foreign_token(token)

    def _on_header_text(self, raw: bytes) -> None:
        if self._state is _State.BETWEEN:
            self._repairs["missing_start"] += 1
            self._open_header(is_role_given=True)
        self._sections[-1][1].extend(raw)
        header = self._read_header()
        if not header.is_open:
            self._begin_without_marker(header)

    def _on_start(self) -> None:
        if self._state is _State.CONTENT:
            self._repairs["missing_end"] += 1
            self._end_message()
        elif self._state is _State.HEADER:
            if len(self._sections) == 1 and not self._sections[0][1].strip():
                self._repairs["duplicate_start"] += 1
            else:
                self._close_header()
        self._open_header(is_role_given=False)

    def _on_section(self, kind: SectionKind) -> None:
        if self._state is _State.CONTENT:
            if kind == "constrain":
                self._repairs["stray_marker"] += 1
                return
            self._repairs["missing_end"] += 1
            self._end_message()
            self._open_header(is_role_given=True)
        elif self._state is _State.BETWEEN:
            self._repairs["missing_start"] += 1
            self._open_header(is_role_given=True)
        elif len(self._sections) >= _MAX_SECTIONS or (kind == self._sections[-1][0] and not self._sections[-1][1]):
            self._repairs["duplicate_channel" if kind == "channel" else "stray_marker"] += 1
            return
        self._sections.append((kind, bytearray()))

    def _on_message(self) -> None:
        if self._state is _State.CONTENT:
            self._repairs["stray_marker"] += 1
            return
        if self._state is _State.BETWEEN:
            self._repairs["missing_start"] += 1
            self._open_header(is_role_given=True)
        header = self._read_header()
        self._repairs.update(repair for repair in header.repairs if repair != "call_words")
        if header.has_stray_words:
            self._repairs["header_words"] += 1
        self._begin_message(header)

    def _on_end(self, token: int) -> None:
        if token == tokens.END_OF_TEXT:
            self._repairs["stray_special"] += 1
        elif self._state is _State.BETWEEN:
            self._repairs["extra_stop"] += 1
        if self._state is _State.HEADER:
            self._close_header()
        if self._state is _State.CONTENT:
            if token == tokens.CALL and self._stream is not _Stream.CALL:
                self._repairs["call_without_recipient"] += 1
            self._end_message()
        self._state = _State.DONE if token in tokens.REPLY_ENDS else _State.BETWEEN

    def _on_foreign_token(self, token: int) -> None:
        is_special = NUM_ORDINARY_TOKENS <= token < _NUM_TOKENS
        self._repairs["stray_special" if is_special else "unknown_id"] += 1
        if not is_special and self._state is _State.CONTENT:
            self._add_text(self._decode(b"", is_last=True) + _REPLACEMENT)

    # -- headers

    def _open_header(self, *, is_role_given: bool) -> None:
        self._state = _State.HEADER
        self._sections = [("role", bytearray())]
        self._is_role_given = is_role_given

    def _read_header(self) -> Header:
        decoded = [(kind, raw.decode("utf-8", "replace")) for kind, raw in self._sections]
        return read_header(decoded, is_role_given=self._is_role_given, tool_names=self._tool_names)

    def _begin_without_marker(self, header: Header) -> None:
        """The header turned out to hold text of a message whose <|message|> is missing."""
        self._repairs["missing_message"] += 1
        # A character may be cut at the end of the header: its bytes go on in the decoder, not in the header's text.
        raw = bytes(self._sections[-1][1])
        held = _incomplete_suffix(raw)
        body = header.body.removesuffix(held.decode("utf-8", "replace")) if held else header.body
        if header.is_plain:
            header.recipient = header.channel = None
        else:
            self._repairs.update(header.repairs)
        self._begin_message(header)
        self._decode(held)
        self._add_text(body)

    def _close_header(self, *, is_cut: bool = False) -> None:
        """The header ends without <|message|>: what it holds is a message if it has a body or names a tool."""
        header = self._read_header()
        is_call = header.recipient is not None and not header.is_plain
        if is_cut and is_call:  # a call whose name may be cut is none
            self._repairs["cut_header"] += 1
            return
        if is_call or header.body.strip():
            self._begin_without_marker(header)
            self._end_message()
        elif len(self._sections) > 1 or self._sections[0][1].strip():
            self._repairs.update(header.repairs)
            if header.role != tokens.ASSISTANT:
                self._repairs["foreign_role"] += 1

    # -- messages

    def _begin_message(self, header: Header) -> None:
        self._state = _State.CONTENT
        self._message_index += 1
        self._decoder = _new_decoder("replace")
        self._has_half_character = False
        if header.role != tokens.ASSISTANT:
            self._repairs["foreign_role"] += 1
            self._stream = _Stream.REASONING
            return
        name = self._call_name(header.recipient)
        if name is not None:
            self._stream = _Stream.CALL
            self._has_arguments = False
            self._events.append(ToolCallStart(self._num_calls, name, self._message_index))
            self._num_calls += 1
        else:
            self._stream = _Stream.REASONING if header.channel == tokens.ANALYSIS else _Stream.CONTENT

    def _call_name(self, recipient: str | None) -> str | None:
        """The tool that a recipient means; None when the message is no call."""
        if recipient is None or recipient in tokens.ROLES or recipient == "all":
            return None
        name = recipient.removeprefix(tokens.FUNCTIONS)
        if not name:
            self._repairs["empty_recipient"] += 1
            return None
        if self._tool_names is None or name in self._tool_names:
            return name
        if not self._tool_names:
            self._repairs["call_without_tools"] += 1
            return None
        self._repairs["unknown_tool"] += 1
        alike = [offered for offered in self._tool_names if offered.casefold() == name.casefold()]
        return alike[0] if len(alike) == 1 else name

    def _end_message(self, *, is_cut: bool = False) -> None:
        self._add_text(self._decode(b"", is_last=True))
        self._flush_text()
        if self._stream is _Stream.CALL:
            if not self._has_arguments and not is_cut:
                self._repairs["empty_arguments"] += 1
                self._events.append(ToolCallArguments(self._num_calls - 1, "{}"))
            self._events.append(ToolCallEnd(self._num_calls - 1))
        self._state = _State.BETWEEN

    # -- events

    def _decode(self, raw: bytes, *, is_last: bool = False) -> str:
        text = self._decoder.decode(raw, is_last)
        self._has_half_character = bool(self._decoder.getstate()[0])
        return text

    def _add_text(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _flush_text(self) -> None:
        """Joins the pieces of the current message since the last flush into one event."""
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces = []
        if self._stream is _Stream.CALL:
            self._has_arguments = True
            self._events.append(ToolCallArguments(self._num_calls - 1, text))
        elif self._stream is _Stream.CONTENT:
            self._has_content = True
            self._events.append(ContentDelta(text, self._message_index))
        else:
            self._events.append(ReasoningDelta(text, self._message_index))

    def _take_events(self) -> list[Event]:
        self._flush_text()
        taken, self._events = self._events, []
        return taken


def _incomplete_suffix(raw: bytes) -> bytes:
    """The bytes at the end of `raw` that begin a UTF-8 character but don't end it."""
    decoder = _new_decoder("replace")
    decoder.decode(raw)
    return decoder.getstate()[0]
