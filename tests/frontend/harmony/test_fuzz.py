"""Random replies: what the library parses, we parse alike; what it can't, still gives all that the model said."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import Role

from frontend.harmony.parse import HarmonyReplyParser
from frontend.vocab import Vocabulary
from tests.frontend.support import fuzz
from tests.frontend.support.replies import read
from tests.frontend.support.sequences import ODD_IDS, SPECIALS, Sampler

_NOT_MENDING = {"empty_arguments", "call_without_recipient"}  # kinds that well-formed headers may have


def test_well_formed_replies_agree_with_the_strict_parser(vocabulary: Vocabulary):
    sampler = Sampler(vocabulary, random.Random(5))
    for number in range(3_000):
        ids = sampler.well_formed()
        expected = []
        for message in vocabulary.harmony.parse_messages_from_completion_tokens(ids, Role.ASSISTANT):
            text = message.content[0].text
            if message.recipient:
                expected.append(["call", message.recipient.removeprefix("functions."), text or "{}"])
            elif text:
                expected.append(["reasoning" if message.channel == "analysis" else "content", "", text])
        reply = read(HarmonyReplyParser(vocabulary.token_bytes), ids, chunk=fuzz.CHUNKS[number % 3])
        assert reply.messages == expected, ids
        assert reply.finish is not None
        assert set(reply.finish.repairs) <= _NOT_MENDING, ids


@pytest.mark.parametrize("seed", [11, 12])
def test_mutated_replies_break_no_rule(vocabulary: Vocabulary, seed: int):
    repairs = fuzz.run(10_000, seed, vocabulary)
    assert len(repairs) >= 20, "the generator no longer reaches most kinds of malformed input"


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(
        st.one_of(st.sampled_from([*SPECIALS, *ODD_IDS, 173781, 35644, 17196, 316, 28, 44580]), st.integers(0, 199_997)), max_size=40
    ),
    reason=st.sampled_from(["stop", "length"]),
)
def test_any_ids_give_the_same_reply_for_every_chunking(vocabulary: Vocabulary, ids: list[int], reason):
    replies = [read(HarmonyReplyParser(vocabulary.token_bytes), ids, chunk=chunk, reason=reason) for chunk in (1, 2, 7, 1000)]
    assert all(reply == replies[0] for reply in replies)


def test_a_loss_is_noticed_by_the_check_itself(vocabulary: Vocabulary):
    sampler = Sampler(vocabulary, random.Random(1))
    ids = [*SPECIALS[2:3], *sampler.ids("final"), 200008, *sampler.ids(" wombat"), 200002]
    reply = fuzz.check_sequence(vocabulary, ids, None, "stop")
    reply.messages.clear()
    with pytest.raises(AssertionError, match="wombat"):
        fuzz.check_no_silent_loss(vocabulary, ids, reply)
