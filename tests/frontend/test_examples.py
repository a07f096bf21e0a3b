"""The examples run as they are, against a real frontend."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from frontend.harmony.format import HarmonyFormat
from frontend.settings import FrontendSettings
from tests.frontend.support.fake_router import Script
from tests.frontend.support.stack import running_stack

ROOT = Path(__file__).parents[2]
NEXT = "<|start|>assistant"
ANSWER = "<|channel|>final<|message|>Hello, friend.<|return|>"
CALL = f'<|channel|>analysis<|message|>t<|end|>{NEXT} to=functions.get_weather<|channel|>commentary<|message|>{{"city":"Paris"}}<|call|>'


async def run(*command: str) -> str:
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(*command, **pipes, env={**os.environ, "PYTHONPATH": str(ROOT)})
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.fixture
async def stack(harmony: HarmonyFormat):
    encode = harmony.vocabulary.harmony.encode

    def script(request, index):
        prompt = request.tokenized.input_ids
        wants_call = 200012 not in prompt and encode(" Paris", allowed_special="all")[0] in prompt
        return Script(encode(CALL if wants_call else ANSWER, allowed_special="all"))

    async with running_stack(harmony, script, FrontendSettings(grpc_listen="127.0.0.1:0")) as running:
        yield running


async def test_openai_client(stack):
    output = await run(sys.executable, str(ROOT / "examples" / "chat_openai.py"), stack.url)
    assert "route: prefill=prefill-tp1; decode=decode-ep4" in output
    assert output.count("Hello, friend.") == 2
    assert 'get_weather({"city":"Paris"})' in output


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
async def test_curl(stack):
    output = await run(str(ROOT / "examples" / "chat_curl.sh"), stack.url)
    assert '"candidates"' in output
    assert "data: [DONE]" in output
    assert '"token_ids"' in output


async def test_grpc(stack):
    output = await run(sys.executable, str(ROOT / "examples" / "chat_grpc.py"), f"127.0.0.1:{stack.grpc_port}")
    assert output.startswith("[prefill-tp1 -> decode-ep4, predicted TTFT 120.5 ms]\nHello, friend.\n[")
