"""The web page and what feeds its second tab: files as they are, no build step, nothing from other hosts.

Owns `/`, `/page/*` and the JSON of pools and loads. The page itself needs no key; what it asks for does.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.resources
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.errors import ServingError
from common.proto import router_pb2, types_pb2
from frontend.http.errors import HttpError, error_response
from frontend.http.service import Service

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_FILES = ("index.html", "style.css", "page.js", "route.js", "pools.js")
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Routes of the page, for the application."""
    return [
        Route("/", _file, methods=["GET"]),
        Route("/page/loads", _loads, methods=["GET"]),
        Route("/page/{name}", _file, methods=["GET"]),
    ]


async def _file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in _FILES:
        return error_response(HttpError(404, f"no file {name[:60]!r}", code="not_found"))
    return Response(_read(name), headers={**_HEADERS, "content-type": _TYPES[name.rpartition(".")[2]]})


@functools.cache
def _read(name: str) -> bytes:
    return (importlib.resources.files("frontend") / "page" / name).read_bytes()


async def _loads(request: Request) -> Response:
    service: Service = request.app.state.service
    try:
        service.keys.caller(request.headers)
        router = service.generator.router
        pools, loads = await asyncio.gather(router.pools(), router.loads())
    except ServingError as exc:
        return error_response(exc)
    return JSONResponse(describe(pools.pools, loads))


def describe(pools: Any, loads: router_pb2.GetLoadsResponse) -> dict[str, Any]:
    """Pools with their groups and queues, prefill pools first. Prices in USD per GPU and hour."""
    queues = {queue.pool: queue for queue in loads.queues}
    out = []
    for pool in sorted(pools, key=lambda pool: (pool.role, pool.name)):
        queue = queues.get(pool.name)
        out.append(
            {
                "name": pool.name,
                "role": types_pb2.Role.Name(pool.role).removeprefix("ROLE_").lower(),
                "layout": f"TP{pool.layout.tp}" + (f" EP{pool.layout.ep}" if pool.layout.ep > 1 else ""),
                "weights": pool.weights,
                "draining": pool.state == router_pb2.POOL_STATE_DRAINING,
                "gpus_per_group": pool.gpus_per_group,
                "usd_per_gpu_hour": pool.usd_per_gpu_hour,
                "queue": None
                if queue is None
                else {"requests": queue.requests, "prompt_tokens": queue.prompt_tokens, "predicted_wait_s": queue.predicted_wait_s},
                "groups": [_group(group) for group in loads.groups if group.description.pool == pool.name],
            }
        )
    return {"pools": out, "running_requests": loads.running_requests}


def _group(group: router_pb2.GroupStatus) -> dict[str, Any]:
    load = group.load
    return {
        "name": group.description.group,
        "healthy": group.healthy,
        "max_batch": group.description.max_batch,
        "load": {
            "running": load.running,
            "waiting": load.waiting,
            "draining": load.draining,
            "free_blocks": load.free_full_blocks,
            "total_blocks": load.total_full_blocks,
        },
    }
