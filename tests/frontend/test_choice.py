"""Log probabilities go with the text of their tokens: held while it is held, gone where a stop string cuts it off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.proto import types_pb2
from frontend.chat_format import ContentDelta
from frontend.choice import Choice, ChoiceUpdate
from frontend.raw import RawReplyParser


def feed(choice: Choice, text: str) -> ChoiceUpdate:
    ids = text.encode()
    return choice.feed(ids, [types_pb2.TokenLogprobs(logprob=-float(i)) for i in ids])


def said(update: ChoiceUpdate) -> tuple[str, str]:
    """The text, and the tokens whose log probabilities came with it."""
    text = "".join(event.text for event in update.events if isinstance(event, ContentDelta))
    assert all(token.logprobs.logprob == -token.token_id for token in update.visible)
    return text, bytes(token.token_id for token in update.visible).decode()


def test_tokens_of_held_text_wait_for_it():
    choice = Choice(0, RawReplyParser(), ["###"])
    assert [said(feed(choice, piece)) for piece in ("a", "#", "#b", "##")] == [("a", "a"), ("", ""), ("##b", "##b"), ("", "")]
    assert said(choice.finish("length")) == ("##", "##")


def test_tokens_of_a_stop_string_are_not_told():
    choice = Choice(0, RawReplyParser(), ["###"])
    assert said(feed(choice, "ab#")) == ("ab", "ab")
    assert said(feed(choice, "##c")) == ("", "")
    assert said(choice.finish("stop")) == ("", "")


def test_a_token_that_a_stop_string_cuts_in_two_is_told():
    class Words(RawReplyParser):
        def feed(self, token_ids):
            return self._content("".join({1: "one#", 2: "#two"}[token] for token in token_ids))

    choice = Choice(0, Words(), ["##"])
    first, second = (choice.feed([i], [types_pb2.TokenLogprobs(logprob=-float(i))]) for i in (1, 2))
    assert [token.token_id for token in (*first.visible, *second.visible)] == [1]


@pytest.mark.parametrize("stops", [[], ["ab"], ["b", "aab"]])
@given(text=st.text(alphabet="abc", max_size=20), sizes=st.lists(st.integers(0, 4), max_size=8))
def test_tokens_join_to_the_text_in_any_chunks(stops: list[str], text: str, sizes: list[int]):
    choice, at, told = Choice(0, RawReplyParser(), stops), 0, []
    for size in [*sizes, len(text)]:
        told.append(said(feed(choice, text[at : at + size])))
        at += size
    told.append(said(choice.finish("stop")))
    assert [tokens for _, tokens in told] == [words for words, _ in told]
