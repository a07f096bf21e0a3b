"""Fixtures of the HTTP tests: a frontend on a real port before a router with a script, and texts as ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from frontend.harmony.format import HarmonyFormat
from frontend.settings import FrontendSettings
from frontend.vocab import Vocabulary
from tests.frontend.support.fake_router import Request, Script
from tests.frontend.support.stack import Stack, running_stack

ANSWER = "<|channel|>analysis<|message|>think 🍎<|end|><|start|>assistant<|channel|>final<|message|>The answer is 4.<|return|>"
Answer = str | Script | Callable[[Request, int], Script]


@pytest.fixture
def ids_of(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    return lambda text: vocabulary.harmony.encode(text, allowed_special="all")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stack(harmony: HarmonyFormat) -> AsyncIterator[Stack]:
    async with running_stack(harmony, lambda request, index: Script([200002])) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def start(harmony: HarmonyFormat, ids_of, shared_stack: Stack) -> AsyncIterator[Callable[..., Awaitable[Stack]]]:
    """`await start(answer)`: the module's stack, its router answering so. With `settings` it is a fresh one, counters at 0.

    `answer`: text, Script, or function of (request, index).
    """
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as fresh:

        async def run(answer: Answer = ANSWER, settings: FrontendSettings | None = None, key: str = "unused") -> Stack:
            assert asyncio.get_running_loop() is loop, "the test's module lacks pytest.mark.asyncio(loop_scope='module')"
            script = Script(ids_of(answer)) if isinstance(answer, str) else answer
            function = script if callable(script) else lambda request, index: script
            if settings is not None:
                return await fresh.enter_async_context(running_stack(harmony, function, settings, key))
            shared_stack.router.reset(function)
            return shared_stack

        yield run
        await shared_stack.until_idle()
