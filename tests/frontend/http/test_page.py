"""What serves the web page: its files, their headers, and the pools that its second tab shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import frontend
from frontend.settings import FrontendSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
FILES = sorted(path.name for path in (Path(frontend.__file__).parent / "page").iterdir())


async def test_every_file_is_served_with_its_type_and_a_strict_policy(start):
    stack = await start()
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    for name in FILES:
        response = await stack.http.get("/" if name == "index.html" else f"/page/{name}")
        assert response.status_code == 200, name
        assert response.headers["content-type"].startswith(types[name.rpartition(".")[2]])
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert not re.search(r"https?://|//[a-z]+\.", response.text), "nothing comes from another host"
    for missing in ("/page/nothing.js", "/page/..%2fserver.py", "/page/%2e%2e/server.py"):
        assert (await stack.http.get(missing)).status_code == 404


async def test_pools_are_told_with_load_kv_use_queue_replicas_and_price(start):
    stack = await start()
    body = (await stack.http.get("/page/loads")).json()
    assert [pool["name"] for pool in body["pools"]] == ["prefill-tp1", "decode-ep4"]
    prefill, decode = body["pools"]
    assert prefill["queue"] == {"requests": 2, "prompt_tokens": 640, "predicted_wait_s": 0.25}
    assert decode["queue"] is None
    assert (decode["layout"], decode["gpus_per_group"], decode["usd_per_gpu_hour"]) == ("TP4 EP4", 4, 3.0)
    group = decode["groups"][0]
    assert group["load"] == {"running": 5, "waiting": 1, "draining": False, "free_blocks": 250, "total_blocks": 1000}
    assert body["running_requests"] == 7


async def test_pools_need_a_key_and_the_page_none(start, tmp_path: Path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: sk-first-key}\n")
    stack = await start(settings=FrontendSettings(keys_file=keys))
    assert (await stack.http.get("/")).status_code == 200
    assert (await stack.http.get("/page/loads")).status_code == 401
