"""The byte format: proof that the seam between frontend and chat format carries a second format."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequestError
from frontend.chat_format import ChatFormat, ChatInput
from frontend.raw import STOP, RawFormat
from tests.frontend.support.replies import read


def test_raw_format_renders_lines_of_bytes():
    chat_format: ChatFormat = RawFormat()
    prompt = chat_format.render(ChatInput([{"role": "user", "content": "Grüße \ud800"}]))
    assert bytes(prompt.token_ids).decode() == "user: Grüße \ufffd\n"
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content"):
        chat_format.render(ChatInput([{"role": "user", "content": None}]))


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_raw_parser_gives_the_same_content_for_every_chunking(chunk: int):
    chat_format = RawFormat()
    ids = [*"naïve 🍎!".encode(), 999, -1, STOP, 65, 66]
    reply = read(chat_format.reply_parser(chat_format.render(ChatInput([]))), ids, chunk=chunk, reason="length")
    assert reply.content == "naïve 🍎!"
    assert reply.finish is not None
    assert reply.finish.reason == "stop"


def test_raw_parser_flags_a_reply_without_content():
    parser = RawFormat().reply_parser(RawFormat().render(ChatInput([])))
    reply = read(parser, [STOP])
    assert reply.finish is not None
    assert reply.finish.is_content_missing
