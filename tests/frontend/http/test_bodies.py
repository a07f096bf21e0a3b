"""Generated bodies never give a 5xx and leave good streams alone; the document they follow tells of every field."""

from __future__ import annotations

from frontend.http.openapi import openapi
from tests.frontend.support import bodies


def test_generated_bodies_give_no_5xx_and_harm_no_stream():
    result = bodies.run(250, seed_=7)
    assert not result.server_errors
    assert result.bad_streams == 0
    assert result.good_streams >= 1
    assert result.statuses[200] > 20, "the generator still reaches the router"
    assert result.statuses[400] > 20


def test_the_document_names_every_request():
    document = openapi()
    assert {path for path, operations in document["paths"].items() if "post" in operations} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
    }
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert set(chat["required"]) == {"model", "messages"}
    assert chat["additionalProperties"] is False
