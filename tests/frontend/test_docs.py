"""docs/api.md tells of every field, header and repair that the code knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.http.chat_fields import EFFORTS, ChatRequest
from frontend.http.completions import CompletionRequest
from frontend.http.fields import RequestModel, StreamOptions
from frontend.http.responses_fields import ResponsesRequest
from frontend.vocab import Vocabulary
from tests.frontend.support import fuzz

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "api.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "model"), [("Chat completions", ChatRequest), ("Responses", ResponsesRequest), ("Completions", CompletionRequest)]
)
def test_every_field_is_documented(title: str, model: type[RequestModel]):
    chat_sampling = set(ChatRequest.model_fields) if title == "Completions" else set()
    for name in {*model.model_fields, *model.IGNORED, *model.REFUSED}:
        assert f"`{name}" in section(title) or name in chat_sampling, name


def test_stream_options_efforts_and_headers_are_documented():
    for name in (*StreamOptions.model_fields, *EFFORTS):
        assert name in section("Chat completions")
    source = (ROOT / "frontend" / "http" / "sampling.py").read_text()
    headers = {part.split('"')[0] for part in source.split('"x-tandem-')[1:]}
    assert len(headers) == 6
    for name in headers:
        assert f"x-tandem-{name}" in section("Headers"), name


def test_every_repair_is_documented(vocabulary: Vocabulary):
    for kind in fuzz.run(3_000, 77, vocabulary):
        assert f"`{kind}`" in section("Metrics"), kind
