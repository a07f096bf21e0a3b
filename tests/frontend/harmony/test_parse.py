"""Replies as real models write them, well-formed and not: what a client gets, and which repair is counted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import pytest

from frontend.chat_format import ContentDelta, FinishReason
from frontend.harmony.format import HarmonyFormat
from frontend.harmony.parse import HarmonyReplyParser
from frontend.vocab import Vocabulary
from tests.frontend.support.replies import Reply, read

THOUGHT = "<|channel|>analysis<|message|>a<|end|>"
NEXT = "<|start|>assistant"
CALL = 'to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a":1}<|call|>'
STRANGE = (200_000, 200_013, 201_087)


@dataclass(frozen=True)
class Case:
    """`text`: special tokens by name, or ids as they are. The rest: what has to come out."""

    text: str | tuple[int, ...] = ""
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"
    repairs: frozenset[str] = field(default_factory=frozenset)
    engine_says: FinishReason = "stop"
    tools: frozenset[str] | None = None


def mended(text: str | tuple[int, ...], content: str = "", *repairs: str, **other) -> Case:
    return Case(text, content, repairs=frozenset(repairs), **other)


def call(text: str | tuple[int, ...], *repairs: str, name: str = "f", arguments: str = "{}", **other) -> Case:
    return Case(text, calls=((name, arguments),), finish="tool_calls", repairs=frozenset(repairs), **other)


WELL_FORMED = {
    "thought and answer": Case(THOUGHT + NEXT + "<|channel|>final<|message|>b<|return|>", "b", "a"),
    "two thoughts": Case(THOUGHT + NEXT + THOUGHT + NEXT + "<|channel|>final<|message|>b<|return|>", "b", "aa"),
    "preamble": Case("<|channel|>commentary<|message|>I will call<|end|>", "I will call"),
    "preamble and call": replace(
        call(f"<|channel|>commentary<|message|>Let me see<|end|>{NEXT} {CALL}", arguments='{"a":1}'), content="Let me see"
    ),
    "recipient in channel section": call("<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
    "with constrain": call('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>', arguments='{"a":1}'),
    "no space before constrain": call("<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>"),
    "recipient in role section": call(" " + CALL, arguments='{"a":1}'),
    "bare code type": call(" to=functions.f<|channel|>commentary code<|message|>{}<|call|>"),
    "call ended by end": call("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|end|>"),
    "no-break space": call("<|channel|>commentary\u00a0to=functions.f<|message|>{}<|call|>"),
    "newlines in header": call("<|channel|>commentary\nto=functions.f\n<|constrain|>json<|message|>{}<|call|>"),
    "python on analysis": call("<|channel|>analysis to=python code<|message|>print(1)<|call|>", name="python", arguments="print(1)"),
    "message to the assistant": Case("<|channel|>analysis to=assistant<|message|>x<|end|>", reasoning="x"),
    "empty answer": Case("<|channel|>final<|message|><|return|>"),
    "blank answer": Case("<|channel|>final<|message|> \n <|return|>", " \n "),
    "constrained answer": Case("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}"),
    "role said again": Case("assistant<|channel|>final<|message|>c<|return|>", "c"),
    "two calls": Case(
        f"<|channel|>commentary to=functions.f<|message|>{{}}<|end|>{NEXT}<|channel|>commentary to=functions.g<|message|>[]<|call|>",
        calls=(("f", "{}"), ("g", "[]")),
        finish="tool_calls",
    ),
}
CUT = {
    "nothing": Case("", engine_says="length", finish="length"),
    "in a thought": Case(
        "<|channel|>analysis<|message|>partial thought", reasoning="partial thought", engine_says="length", finish="length"
    ),
    "after message": Case("<|channel|>analysis<|message|>", engine_says="length", finish="length"),
    "in the next role": mended(THOUGHT + NEXT, "", "missing_channel", reasoning="a", engine_says="length", finish="length"),
    "after end": Case(THOUGHT, reasoning="a", engine_says="length", finish="length"),
    "in the channel": mended(
        THOUGHT + NEXT + "<|channel|>fin", "", "unknown_channel", reasoning="a", engine_says="length", finish="length"
    ),
    "in a recipient": mended("<|channel|>commentary to=functions.get_we", "", "cut_header", engine_says="length", finish="length"),
    "in arguments": Case(" " + CALL[:-10], calls=(("f", '{"a":'),), engine_says="length", finish="length"),
    "before arguments": Case(" to=functions.f<|channel|>commentary<|message|>", calls=(("f", ""),), engine_says="length", finish="length"),
    "exactly at the stop": Case("<|channel|>final<|message|>a<|return|>", "a", engine_says="length"),
    "no message marker": mended("<|channel|>final hi there", "hi there", "missing_message", engine_says="length", finish="length"),
}
MISSING_MARKERS = {
    "no header": mended("Hello there<|return|>", "Hello there", "missing_message"),
    "no header, ended by end": mended("Sorry, I can’t do that.<|end|>", "Sorry, I can’t do that.", "missing_message"),
    "no header, looks like one": mended("to be or not<|return|>", "to be or not", "missing_message"),
    "no header, a channel's name": mended("final answer is 4<|return|>", "final answer is 4", "missing_message"),
    "only a channel's name": mended("final<|return|>", "final", "missing_message"),
    "only the role": mended("assistant<|return|>", "assistant", "missing_message"),
    "no header, line breaks": mended("  line1\n\n  line2 <|return|>", "  line1\n\n  line2 ", "missing_message"),
    "no channel": mended("<|message|>hi<|return|>", "hi", "missing_channel"),
    "no channel name": mended("<|channel|><|message|>hi<|end|>", "hi", "missing_channel"),
    "no message": mended("<|channel|>final hi there<|return|>", "hi there", "missing_message"),
    "no message, one word": mended("<|channel|>final hi<|end|>", "hi", "missing_message"),
    "no message, long": mended("<|channel|>final" + " so on" * 40 + "<|return|>", ("so on " * 40).strip(), "missing_message"),
    "no message, glued": mended("<|channel|>finalHello there<|return|>", "Hello there", "missing_message", "channel_spelling"),
    "no message, thought": mended("<|channel|>analysis we think so<|end|>", "", "missing_message", reasoning="we think so"),
    "no message, json": mended('<|channel|>final<|constrain|>json{"a":1}<|return|>', '{"a":1}', "missing_message"),
    "no message, later": mended(
        THOUGHT + NEXT + "<|channel|>final hi\n\n there<|return|>", "hi\n\n there", "missing_message", reasoning="a"
    ),
    "no message, call": call(' to=functions.f<|channel|>commentary json{"a": 1}<|call|>', "missing_message", arguments='{"a": 1}'),
    "no message, code call": call(" to=functions.f code print(1)<|call|>", "missing_message", "missing_channel", arguments="print(1)"),
    "no message, empty call": call("<|channel|>commentary to=functions.f<|call|>", "missing_message", "empty_arguments"),
    "no start": mended(
        THOUGHT + "hello <|channel|>final<|message|>b<|return|>",
        "hello b",
        "missing_start",
        "missing_message",
        "missing_end",
        reasoning="a",
    ),
    "no start, no header": mended("a<|end|>b<|return|>", "ab", "missing_start", "missing_message"),
    "no start, only message": mended(THOUGHT + "<|message|>b<|return|>", "b", "missing_start", "missing_channel", reasoning="a"),
    "no end, start": mended("<|channel|>final<|message|>b<|start|>assistant more<|return|>", "bmore", "missing_end", "missing_message"),
    "no end, channel": mended("<|channel|>analysis<|message|>t<|channel|>final<|message|>b<|return|>", "b", "missing_end", reasoning="t"),
    "no role": mended(THOUGHT + "<|start|><|channel|>final<|message|>b<|return|>", "b", "missing_role", reasoning="a"),
    "no channel marker": mended("<|start|>assistant final<|message|>b<|return|>", "b", "duplicate_start", "channel_without_marker"),
}
WRONG_MARKERS = {
    "only return": Case("<|return|>"),
    "only end": Case("<|end|>"),
    "only call": Case("<|call|>"),
    "end and return": mended("<|channel|>final<|message|>a<|end|><|return|>", "a", "extra_stop"),
    "end and end": mended(THOUGHT + "<|end|>", "", "extra_stop", reasoning="a"),
    "return twice": mended("<|channel|>final<|message|>a<|return|><|return|>", "a", "tokens_after_stop"),
    "text before message": mended("Hello <|message|>world<|return|>", "Hello world", "missing_message", "stray_marker"),
    "start twice": mended(
        THOUGHT + "<|start|><|start|>assistant<|channel|>final<|message|>b<|return|>", "b", "duplicate_start", reasoning="a"
    ),
    "start though given": mended("<|start|>assistant<|channel|>final<|message|>b<|return|>", "b", "duplicate_start"),
    "start 1000 times": mended(THOUGHT + "<|start|>" * 1000, "", "duplicate_start", reasoning="a"),
    "channel 1000 times": mended("<|channel|>" * 1000 + "final<|message|>a<|return|>", "a", "duplicate_channel"),
    "message 1000 times": mended("<|channel|>final" + "<|message|>" * 1000 + "x<|return|>", "x", "stray_marker"),
    "message inside": mended("<|channel|>final<|message|>b<|message|>more<|return|>", "bmore", "stray_marker"),
    "constrain inside": mended("<|channel|>final<|message|>a<|constrain|>json b<|return|>", "ajson b", "stray_marker"),
    "two channels": mended("<|channel|>analysis<|channel|>final<|message|>hi<|return|>", "hi", "duplicate_channel"),
    "endoftext inside": mended(
        "<|channel|>final<|message|>b<|endoftext|>c<|return|>", "bc", "stray_special", "missing_start", "missing_message"
    ),
    "endoftext in header": mended(
        "<|channel|>final<|endoftext|><|message|>c<|return|>", "c", "stray_special", "missing_start", "missing_channel"
    ),
    "call ends an answer": mended("<|channel|>final<|message|>a<|call|>", "a", "call_without_recipient"),
    "return ends a call": call("<|channel|>commentary to=functions.f<|message|>{}<|return|>"),
}
WRONG_HEADERS = {
    "unknown channel": mended("<|channel|>banana<|message|>hi<|return|>", "hi", "unknown_channel"),
    "junk channel": mended("<|channel|>commentary?commentary?<|message|>x<|end|>", "x", "channel_spelling"),
    "emoji channel": mended("<|channel|>fin😀al<|message|>c<|return|>", "c", "unknown_channel"),
    "capital channel": mended("<|channel|>Final<|message|>c<|return|>", "c", "channel_spelling"),
    "glued channel": mended("<|channel|>finalHello<|message|>c<|return|>", "c", "channel_spelling"),
    "glued analysis": mended("<|channel|>analysis!<|message|>c<|end|>", "", "channel_spelling", reasoning="c"),
    "space before channel": Case("<|channel|> final<|message|>c<|return|>", "c"),
    "words in header": mended("<|channel|>final foo bar<|message|>c<|return|>", "c", "header_words"),
    "words behind recipient": call("<|channel|>commentary to=functions.f foo bar baz<|message|>{}<|call|>", "header_words"),
    "recipient twice": call(" to=functions.f<|channel|>commentary to=functions.f<|message|>{}<|call|>", "duplicate_recipient"),
    "two recipients": call(" to=functions.f<|channel|>commentary to=functions.g<|message|>{}<|call|>", "duplicate_recipient"),
    "constrain before recipient": call("<|channel|>commentary <|constrain|>json to=functions.f<|message|>{}<|call|>"),
    "space after constrain": call("<|channel|>commentary <|constrain|> json to=functions.f<|message|>{}<|call|>"),
    "bare recipient": call("<|channel|>commentary functions.f<|message|>{}<|call|>", "bare_recipient"),
    "bare offered name": call("<|channel|>commentary f<|message|>{}<|call|>", "bare_recipient", tools=frozenset({"f"})),
    "empty recipient": mended("<|channel|>commentary to= <|message|>{}<|call|>", "{}", "empty_recipient", "call_without_recipient"),
    "empty arguments": call("<|channel|>commentary to=functions.f<|message|><|call|>", "empty_arguments"),
    "unknown role": mended(THOUGHT + "<|start|>robot<|channel|>final<|message|>b<|return|>", "b", "unknown_role", reasoning="a"),
    "user's turn": mended(
        THOUGHT + "<|start|>user<|message|>and now?<|end|>", "", "foreign_role", "missing_channel", reasoning="aand now?"
    ),
    "tool's turn": mended(
        THOUGHT + "<|start|>functions.f to=assistant<|channel|>commentary<|message|>b<|end|>", "", "foreign_role", reasoning="ab"
    ),
    "name in other case": call("<|channel|>commentary to=functions.F<|message|>{}<|call|>", "unknown_tool", tools=frozenset({"f", "g"})),
    "name without namespace": call("<|channel|>commentary to=f<|message|>{}<|call|>", tools=frozenset({"f"})),
    "tool not offered": call("<|channel|>commentary to=functions.h<|message|>{}<|call|>", "unknown_tool", name="h", tools=frozenset({"f"})),
    "no tools, analysis": mended(
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        "",
        "call_without_tools",
        "call_without_recipient",
        reasoning="1+1",
        tools=frozenset(),
    ),
    "no tools, commentary": mended(
        "<|channel|>commentary to=functions.f<|message|>{}<|call|>", "{}", "call_without_tools", "call_without_recipient", tools=frozenset()
    ),
}
ODD_IDS = {
    **{f"special {i}": mended((200005, 17196, 200008, 65, i, 66, 200002), "bc", "stray_special") for i in STRANGE},
    **{
        f"unknown {i}": mended((200005, 17196, 200008, 65, i, 66, 66, 200002), "b\ufffdcc", "unknown_id")
        for i in (201_088, 201_089, 2**32 - 1, 2**63, -1, -5)
    },
    "unknown in header": mended((200005, 17196, 201_089, 200008, 65, 200002), "b", "unknown_id"),
    "invalid byte in header": mended((200005, 17196, 188, 200008, 65, 200002), "b", "channel_spelling"),
    "answer then stop twice": mended((200005, 17196, 200008, 17045, 200007, 200002, 200002), "Answer", "extra_stop", "tokens_after_stop"),
    "refusal": mended(
        (40, 4572, 23045, 11, 889, 357, 665, 1573, 1652, 483, 484, 13, 200007), "I’m sorry, but I can’t help with that.", "missing_message"
    ),
    "call on analysis": call(
        (200005, 35644, 316, 28, 44580, 1940, 17407, 3490, 200008, 10848, 29563, 7534, 16660, 18583, 200012),
        name="grep",
        arguments='{"pattern":"foo"}',
    ),
}
ALL = WELL_FORMED | CUT | MISSING_MARKERS | WRONG_MARKERS | WRONG_HEADERS | ODD_IDS


def ids_of(vocabulary: Vocabulary, text: str | tuple[int, ...]) -> list[int]:
    return vocabulary.harmony.encode(text, allowed_special="all") if isinstance(text, str) else list(text)


def parse(vocabulary: Vocabulary, text: str | tuple[int, ...], chunk: int = 1, reason: FinishReason = "stop", tools=None) -> Reply:
    return read(HarmonyReplyParser(vocabulary.token_bytes, tool_names=tools), ids_of(vocabulary, text), chunk=chunk, reason=reason)


@pytest.mark.parametrize("chunk", [1, 2, 7, 10_000])
@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_reply_is_the_best_faithful_one(vocabulary: Vocabulary, case: Case, chunk: int):
    reply = parse(vocabulary, case.text, chunk, case.engine_says, case.tools)
    assert reply.finish is not None
    assert (reply.content, reply.reasoning, tuple(reply.calls)) == (case.content, case.reasoning, case.calls)
    assert reply.finish.reason == case.finish
    assert set(reply.finish.repairs) == case.repairs
    assert reply.finish.is_content_missing == (bool(case.text) and not case.content and not case.calls)


@pytest.mark.parametrize("name", WELL_FORMED)
@pytest.mark.parametrize("stops", [(200002,), (200002, 200002), (200007, 200002), (200007, 200007)], ids=str)
def test_extra_stop_tokens_change_nothing(vocabulary: Vocabulary, name: str, stops: tuple[int, ...]):
    ids = ids_of(vocabulary, WELL_FORMED[name].text)
    assert parse(vocabulary, (*ids, *stops)).messages == parse(vocabulary, tuple(ids)).messages


@pytest.mark.parametrize("answer", ["I’m sorry, but I can’t.", "toto", "to=", "ass", "finally", "{}", "😀", "…", "user: hi", "1", " x"])
@pytest.mark.parametrize("end", ["<|end|>", "<|return|>", ""])
def test_a_reply_without_any_marker_is_the_answer(vocabulary: Vocabulary, answer: str, end: str):
    assert parse(vocabulary, answer + end).content == answer


def test_a_reply_without_markers_streams_from_its_first_words(vocabulary: Vocabulary):
    parser = HarmonyReplyParser(vocabulary.token_bytes)
    ids = ids_of(vocabulary, "I’m sorry, but I can’t help with that.")
    assert parser.feed(ids[:1]) == [ContentDelta("I", 0)]


@pytest.mark.parametrize("text", ["𠮷", "𓀀", "👩‍🚀", "𠮷x𓀀", "é中👩‍🚀!"])
def test_characters_of_several_tokens_are_sent_whole(vocabulary: Vocabulary, text: str):
    body = vocabulary.text.encode_ordinary(text)
    head = ids_of(vocabulary, "<|channel|>final<|message|>")
    assert parse(vocabulary, (*head, *body, 200002)).content == text
    for cut in range(len(body)):
        content = parse(vocabulary, (*head, *body[:cut]), reason="length").content
        assert content.count("\ufffd") <= 1
        assert text.startswith(content.rstrip("\ufffd"))
    parser = HarmonyReplyParser(vocabulary.token_bytes)
    events = [event for token in (*head, *body) for event in parser.feed([token])]
    assert "\ufffd" not in "".join(event.text for event in events)


def test_invalid_utf8_reaches_the_client_as_replacement_characters(vocabulary: Vocabulary):
    table = vocabulary.token_bytes
    byte = {value: table.index(bytes([value])) for value in (0xF0, 0x80, 0xFF, 0xED, 0xA0, ord("A"))}
    head = (200005, 17196, 200008)
    for values in ([0xF0, ord("A")], [0xFF], [0x80, 0x80], [0xED, 0xA0, 0x80], [0xF0], [0xF0, 0x80, ord("A"), 0xF0]):
        ids = [byte[value] for value in values]
        assert parse(vocabulary, (*head, *ids, 200002)).content == bytes(values).decode("utf-8", "replace")


def test_marker_text_written_in_plain_tokens_stays(vocabulary: Vocabulary):
    plain = vocabulary.text.encode_ordinary("use <|start|> and <|end|>")
    assert parse(vocabulary, (200005, 17196, 200008, *plain, 200002)).content == "use <|start|> and <|end|>"


@pytest.mark.parametrize("after", ["", NEXT + "<|channel|>final<|message|>x<|return|>", "junk", "<|end|>"])
def test_the_reply_ends_at_the_call(vocabulary: Vocabulary, after: str):
    reply = parse(vocabulary, " " + CALL + after)
    assert reply.messages == [["call", "f", '{"a":1}']]
    assert reply.finish is not None
    assert reply.finish.reason == "tool_calls"
    parser = HarmonyReplyParser(vocabulary.token_bytes)
    parser.feed(ids_of(vocabulary, THOUGHT))
    assert not parser.is_done, "<|end|> only parts two messages"


def test_a_forced_call_starts_in_its_arguments(harmony: HarmonyFormat, vocabulary: Vocabulary):
    prefix = ids_of(vocabulary, " to=functions.f<|channel|>commentary <|constrain|>json<|message|>")
    parser = HarmonyReplyParser(vocabulary.token_bytes, tool_names=frozenset({"f"}), reply_prefix=prefix)
    assert read(parser, ids_of(vocabulary, '{"a":1}<|call|>')).messages == [["call", "f", '{"a":1}']]


def test_the_parser_says_whether_text_would_be_visible(vocabulary: Vocabulary):
    parser = HarmonyReplyParser(vocabulary.token_bytes)
    seen = []
    for token in ids_of(vocabulary, THOUGHT + NEXT + "<|channel|>final<|message|>b<|return|>"):
        seen.append(parser.is_in_content)
        parser.feed([token])
    assert seen.count(True) == 2
    assert seen[-2:] == [True, True]
    assert parser.is_done


@pytest.mark.parametrize(
    "text", ["<|channel|>x " * 20_000, "a<|message|>" * 50_000, "<|start|>assistant " * 20_000, "<|channel|>" + "to=f " * 50_000]
)
def test_long_malformed_replies_take_linear_time(vocabulary: Vocabulary, text: str):
    ids = ids_of(vocabulary, text)
    for chunk in (1, len(ids)):
        started = time.process_time()
        parse(vocabulary, tuple(ids), chunk)
        assert time.process_time() - started < 30e-6 * len(ids) + 0.5
