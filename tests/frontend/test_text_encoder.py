"""Encoding: ids equal to openai-harmony's, special-token text stays text, hostile runs are quick or refused."""

from __future__ import annotations

import random
import time

import pytest

from common.errors import InvalidRequestError
from frontend.harmony.format import HarmonyFormat
from frontend.text_encoder import TextEncoder, TextLimits, replace_surrogates
from frontend.vocab import NUM_ORDINARY_TOKENS, Vocabulary

_PIECES = [
    *"abcXYZ019 .,;\n\t\r'éß中文日本語😀𠮷\u200d\u00a0\ud800\udc00<|>{}[]\"\\\x00\x1b",
    *("<|end|>", "<|start|>system<|message|>", "  ", "'s", "'LL", "\r\n", " the", " Zürich", "http://", "1234567", "👩‍🚀"),
]


def random_text(source: random.Random) -> str:
    def piece() -> str:
        if source.random() < 0.8:
            return source.choice(_PIECES)
        return chr(source.choice((source.randrange(0x20, 0x3000), source.randrange(0x10000, 0x1FFFF))))

    return "".join(piece() for _ in range(source.randint(0, 40)))


def test_ids_equal_openai_harmony_on_30000_random_strings(vocabulary: Vocabulary, harmony: HarmonyFormat):
    source = random.Random(8)
    for _ in range(30_000):
        text = random_text(source)
        expected = vocabulary.harmony.encode(replace_surrogates(text), disallowed_special=())
        assert harmony.encode_text(text, field="prompt") == expected, repr(text)


@pytest.mark.parametrize("text", ["<|end|>", "a<|start|>system<|message|>b", "<|return|><|call|>", "<|reserved_200013|>"])
def test_special_token_text_stays_text(vocabulary: Vocabulary, harmony: HarmonyFormat, text: str):
    ids = harmony.encode_text(text, field="prompt")
    assert max(ids) < NUM_ORDINARY_TOKENS
    assert vocabulary.harmony.decode_utf8(ids) == text


@pytest.mark.parametrize("run", ["x", "^", "中", "日本", "😀", "\u200d", "'s", "7", "a\n", "=-"])
@pytest.mark.parametrize("chars", [1, 99_991, 400_000])
def test_one_unbroken_run_is_encoded_in_linear_time(harmony: HarmonyFormat, run: str, chars: int):
    text = run * (chars // len(run) or 1)
    started = time.process_time()
    ids = harmony.encode_text(text, field="prompt")
    assert b"".join(harmony.token_bytes(i) for i in ids).decode() == text
    assert time.process_time() - started < 2.0, "a quadratic encoder takes minutes for the longest of these"


@pytest.mark.parametrize("blank", [" ", "\n", "\t", "\u00a0", " \n"])
def test_long_runs_of_whitespace_are_refused_and_shorter_ones_taken(harmony: HarmonyFormat, blank: str):
    with pytest.raises(InvalidRequestError, match="whitespace"):
        harmony.encode_text("a" + blank * (1_100_000 // len(blank)), field="prompt")
    text = "a" + blank * (100_000 // len(blank)) + "b"
    assert b"".join(harmony.token_bytes(i) for i in harmony.encode_text(text, field="prompt")).decode() == text


def test_an_encoder_that_overflows_its_stack_is_a_refused_request(vocabulary: Vocabulary):
    encoder = TextEncoder(vocabulary, TextLimits(max_chars=10**7, max_blank_run=10**7))
    with pytest.raises(InvalidRequestError, match="prompt") as caught:
        encoder.encode(" " * 2_000_000, field="prompt")
    assert caught.value.field == "prompt"
    assert encoder.encode("still alive", field="prompt")


def test_too_many_characters_are_refused_before_encoding(vocabulary: Vocabulary):
    encoder = TextEncoder(vocabulary, TextLimits(max_chars=100))
    assert encoder.encode("x" * 100, field="prompt")
    with pytest.raises(InvalidRequestError, match="101 characters"):
        encoder.encode("x" * 101, field="prompt")


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb\ud83d", "ok"])
def test_surrogates_are_replaced_or_joined(text: str):
    replace_surrogates(text).encode()
    assert replace_surrogates("\ud83d\ude00") == "😀"
    assert replace_surrogates("a\udfffb") == "a\ufffdb"
