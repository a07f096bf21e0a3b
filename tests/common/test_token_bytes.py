"""Token bytes from the vocabulary file, against the tokenizer library, and refusal of any other file."""

import pytest
import tiktoken

from common.errors import ConfigError
from common.token_bytes import VOCAB_FILE, TokenBytes
from frontend.vocab import find_vocabulary, load_vocabulary


@pytest.fixture(scope="module")
def tokens() -> TokenBytes:
    return TokenBytes(find_vocabulary().parent).load()


@pytest.mark.parametrize("text", ["hello", " world", "naïve café", "𠮷𓀀👩‍🚀", "\r\n\t ", "数据"])
def test_bytes_of_tokens_join_to_the_text(tokens, text):
    ids = load_vocabulary().text.encode(text)
    assert b"".join(tokens.of(token) for token in ids).decode() == text


def test_every_ordinary_token_agrees_with_the_library_and_no_other_has_text(tokens):
    encoding: tiktoken.Encoding = load_vocabulary().text
    assert all(tokens.of(token) == encoding.decode_single_token_bytes(token) for token in range(0, 199_998, 37))
    assert [tokens.of(token) for token in (199_998, 200_002, 200_012, 201_087)] == [None] * 4


def test_missing_or_other_file_is_refused_when_it_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        TokenBytes(tmp_path).load()
    (tmp_path / VOCAB_FILE).write_bytes(b"IQ== 0\n")
    with pytest.raises(ConfigError, match="not the o200k vocabulary"):
        TokenBytes(tmp_path).of(5)
