"""The real frontend on a real port before a fake router, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import httpx
import openai

from frontend.chat_format import ChatFormat
from frontend.http.app import FrontendApp, build_app
from frontend.http.service import Service
from frontend.server import FrontendServer
from frontend.settings import FrontendSettings
from tests.frontend.support.fake_router import FakeRouter, Request, Script, running_router


@dataclass
class Stack:
    """`http` and `openai` are clients of the frontend; `router` shows what reached the other side."""

    router: FakeRouter
    server: FrontendServer
    service: Service
    url: str
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    grpc_port: int | None
    metrics_address: str

    async def metrics(self) -> str:
        async with httpx.AsyncClient() as scraper:
            return (await scraper.get(f"http://{self.metrics_address}/metrics")).text

    async def until_idle(self, within_s: float = 2.0) -> None:
        """Waits until the router has no open request; fails if it still has one."""
        await self.router.until_open(0, within_s)


@contextlib.asynccontextmanager
async def running_frontend(chat_format: ChatFormat, settings: FrontendSettings) -> AsyncIterator[tuple[FrontendServer, FrontendApp, str]]:
    """A frontend on a real port in this event loop: server, application, URL."""
    app = build_app(settings, chat_format)
    server = FrontendServer(settings, app)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # uvicorn has no event for it
        assert not serving.done(), serving
        await asyncio.sleep(0.005)
    try:
        yield server, app, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def running_stack(
    chat_format: ChatFormat,
    script: Callable[[Request, int], Script],
    settings: FrontendSettings | None = None,
    api_key: str = "unused",
) -> AsyncIterator[Stack]:
    async with running_router(script) as router:
        chosen = replace(settings or FrontendSettings(), router=router.address, port=0, includes_date=False)
        auth = {"authorization": f"Bearer {api_key}"}
        async with (
            running_frontend(chat_format, chosen) as (server, app, url),
            httpx.AsyncClient(base_url=url, headers=auth, timeout=30) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=30) as client,
        ):
            yield Stack(router, server, app.state.service, url, http, client, app.state.grpc_port, app.state.metrics_address)
