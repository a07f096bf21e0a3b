"""Errors name the field that the client of this path has sent, not the one that the router got."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequestError
from frontend.http.errors import CHAT, COMPLETIONS, RESPONSES, status_and_body


@pytest.mark.parametrize(
    ("path", "router_field", "param"),
    [
        (CHAT, "tokenized.input_ids", "messages"),
        (COMPLETIONS, "tokenized.input_ids", "prompt"),
        (RESPONSES, "tokenized.input_ids", "input"),
        (CHAT, "sampling_params.max_tokens", "max_completion_tokens"),
        (COMPLETIONS, "sampling_params.max_tokens", "max_tokens"),
        (RESPONSES, "sampling_params.max_tokens", "max_output_tokens"),
        (COMPLETIONS, "sampling_params.logprobs", "logprobs"),
        (CHAT, "sampling_params.stop_token_ids", "stop"),
        (RESPONSES, "sampling_params.top_p", "top_p"),
    ],
)
def test_the_routers_fields_have_the_names_of_the_path(path: str, router_field: str, param: str):
    status, body = status_and_body(InvalidRequestError(router_field, "longer than the context"), path)
    assert status == 400
    assert body["error"]["param"] == param
    assert body["error"]["message"].startswith(f"{param}: ")
