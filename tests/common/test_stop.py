"""Stop strings and stop tokens over every way to cut text into tokens."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.output import Output
from common.proto import types_pb2
from common.stop import StopMatcher, StopRules

RULES = StopRules(max_tokens=10_000, min_tokens=0, stop_token_ids=frozenset(), stop=())
CONTROL = None


def play(tokens: list[bytes | None], rules: StopRules):
    """Feeds tokens whose id is their index. Returns: (tokens released after each push, finish or None)"""
    matcher = StopMatcher(rules, lambda token_id: tokens[token_id])
    released = []
    for token_id in range(len(tokens)):
        finish = matcher.push(token_id)
        released.append(matcher.num_released)
        if finish is not None:
            return released, finish
    return released, None


def joined(tokens: list[bytes | None]) -> bytes:
    return b"".join(b"|" if token is CONTROL else token for token in tokens)


def visible_text(tokens: list[bytes | None], released: int, finish) -> bytes:
    return joined(tokens[:released]) + (finish.trailing_text if finish else b"")


def expected_text(tokens: list[bytes | None], stops: tuple[bytes, ...]) -> tuple[bytes, str | None]:
    """Plain reading of the rule: byte by byte, the first stop string to end wins, the longest of those that end together."""
    shown, run = b"", b""
    for text in tokens:
        if text is None:
            shown, run = shown + run + b"|", b""
            continue
        for byte in text:
            run += bytes([byte])
            ended = [stop for stop in stops if run.endswith(stop)]
            if ended:
                stop = max(ended, key=len)
                return shown + run[: -len(stop)], stop.decode()
    return shown + run, None


@st.composite
def cut_text(draw):
    """A text over two letters and control tokens, cut into tokens at random, and stop strings over the same letters."""
    letters = st.text(alphabet="abé", max_size=24).map(str.encode)
    tokens: list[bytes | None] = []
    for part in draw(st.lists(letters, max_size=4)):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(part) - 1)), max_size=6)))
        tokens += [part[i:j] for i, j in zip([0, *cuts], [*cuts, len(part)], strict=True) if i < j <= len(part)]
        if draw(st.booleans()):
            tokens.append(CONTROL)
    stops = draw(st.lists(st.text(alphabet="abé", min_size=1, max_size=6), min_size=1, max_size=3))
    return tokens, tuple(text.encode() for text in stops)


@settings(max_examples=400, deadline=None)
@given(cut_text())
def test_text_is_the_same_for_every_cutting_and_ends_before_the_first_stop_string(case):
    tokens, stops = case
    released, finish = play(tokens, replace(RULES, stop=stops))
    text, stop = expected_text(tokens, stops)
    assert (finish.stop if finish else None) == stop
    if stop is None:  # what is still held may yet become part of a stop string
        held = joined(tokens[released[-1] if released else 0 :])
        assert visible_text(tokens, released[-1] if released else 0, None) + held == text
    else:
        assert visible_text(tokens, released[-1], finish) == text


@settings(max_examples=300, deadline=None)
@given(cut_text())
def test_what_was_released_is_never_part_of_the_stop_string_and_nothing_waits_without_need(case):
    tokens, stops = case
    released, _finish = play(tokens, replace(RULES, stop=stops))
    text, _ = expected_text(tokens, stops)
    for seen, count in enumerate(released, 1):
        assert text.startswith(joined(tokens[:count])), "a byte of the stop string was sent"
        run = joined(tokens[:seen]).rsplit(b"|")[-1]
        longest = max((n for stop in stops for n in range(len(stop)) if run.endswith(stop[:n])), default=0)
        held = joined(tokens[count:seen])
        if seen < len(released):
            first_held = tokens[count] if count < seen else b""
            assert len(held) - len(first_held or b"") < longest or not held, "a token was held that no stop string can reach"


def test_report_s06_alphabet_is_held_and_flushed():
    stop = (b"DEFGHIJ",)
    text = b"alphabet: ABCDEFGXYZDEFGHIJ after"
    for size in range(1, len(text)):
        tokens = [text[i : i + size] for i in range(0, len(text), size)]
        released, finish = play(tokens, replace(RULES, stop=stop))
        assert visible_text(tokens, released[-1], finish) == b"alphabet: ABCDEFGXYZ"


def test_held_tokens_are_flushed_when_the_output_ends_by_length_or_stop_token():
    tokens = [b"x", b"AB", b"C"]
    released, finish = play(tokens, replace(RULES, stop=(b"ABCD",), max_tokens=3))
    assert released == [1, 1, 3]
    assert finish.reason == types_pb2.FINISH_REASON_LENGTH
    released, finish = play(tokens, replace(RULES, stop=(b"ABCD",), stop_token_ids=frozenset({2})))
    assert released == [1, 1, 3]
    assert finish.WhichOneof("matched") == "stop_token_id"
    assert finish.stop_token_id == 2


def test_stop_token_wins_over_max_tokens_on_the_last_token():
    _, finish = play([b"a", b"b"], replace(RULES, max_tokens=2, stop_token_ids=frozenset({1})))
    assert finish.reason == types_pb2.FINISH_REASON_STOP


def test_control_token_breaks_a_match():
    released, finish = play([b"AB", CONTROL, b"CD"], replace(RULES, stop=(b"ABCD",)))
    assert finish is None
    assert released == [0, 2, 3]


def test_stop_string_within_min_tokens_does_not_count_but_a_later_one_does():
    tokens = [b"AB", b"xx", b"AB", b"y"]
    released, finish = play(tokens, replace(RULES, stop=(b"AB",), min_tokens=2))
    assert released == [1, 2, 2]
    assert finish.stop == "AB"


def test_trailing_text_is_the_part_of_a_straddling_token_before_the_stop_string():
    released, finish = play([b"one ", b"two#", b"##x"], replace(RULES, stop=(b"###",)))
    assert released[-1] == 1
    assert finish.trailing_text == b"two"


def output_for(tokens: list[bytes | None], rules: StopRules, sent: int) -> Output:
    return Output("id", tuple(range(sent)), rules, lambda token_id: tokens[token_id])


@settings(max_examples=200, deadline=None)
@given(cut_text(), st.data())
def test_resumed_output_leaves_no_gap_and_no_repeat(case, data):
    """An attempt dies anywhere; the next one starts from what was sent; the client's tokens are those of one undisturbed run."""
    tokens, stops = case
    rules = replace(RULES, stop=stops)
    whole, whole_finish = [], None
    output = output_for(tokens, rules, 0)
    for token_id in range(len(tokens)):
        step = output.push(token_id, None)
        assert step.first_index == len(whole)
        whole += step.token_ids
        if step.HasField("finish"):
            whole_finish = step.finish
            break
    sent = data.draw(st.integers(0, len(whole)))
    if whole_finish is not None and sent == len(whole) and sent == len(tokens):
        return  # nothing is left to resume
    resumed, got, finish = output_for(tokens, rules, sent), list(range(sent)), None
    for token_id in range(sent, len(tokens)):
        step = resumed.push(token_id, None)
        if step.token_ids:
            assert step.first_index == len(got)
        got += step.token_ids
        if step.HasField("finish"):
            finish = step.finish
            break
    assert got == whole
    assert finish == whole_finish


def test_logprobs_travel_with_their_tokens():
    tokens = [b"A", b"B", b"x"]
    output = output_for(tokens, replace(RULES, stop=(b"ABC",)), 0)
    logprobs = [types_pb2.TokenLogprobs(logprob=-i) for i in range(3)]
    sent = [output.push(i, logprobs[i]) for i in range(3)]
    assert [len(step.token_ids) for step in sent] == [0, 0, 3]
    assert list(sent[-1].logprobs) == logprobs


@pytest.mark.parametrize("stop", [b"a" * 1024, b"ab" * 512])
def test_long_repetitive_stop_string_over_a_long_near_miss(stop):
    tokens = [stop[:-1] + b"!"] * 20 + [stop]
    released, finish = play(tokens, replace(RULES, stop=(stop,)))
    assert finish.stop == stop.decode()
    assert released[-1] == 20
