"""`tandem frontend` as a process of its own: its settings come from the config, and on SIGTERM running streams finish."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.frontend_settings import frontend_settings
from common.config import FrontendNode, parse_config
from common.errors import ConfigError
from frontend.settings import FrontendSettings
from frontend.vocab import load_vocabulary
from tests.frontend.support.fake_router import Script, running_router

TREE = {"model": {"path": "/models/m"}, "pools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]}


def test_every_field_of_the_config_node_reaches_the_frontend():
    changed = {
        "listen": "127.0.0.1:8123",
        "grpc_listen": "127.0.0.1:8124",
        "model_names": ["m"],
        "keys_file": "/keys.yaml",
        "cors_origins": ["https://page.example"],
        "max_body_bytes": 5000,
        "max_chars": 77,
        "max_streams": 3,
        "stalled_client_s": 4.5,
        "default_deadline_s": 5.5,
        "drain_s": 6.5,
        "includes_date": False,
        "encoder_threads": 2,
        "token_file": "/token",
        "metrics_port": 9107,
    }
    assert set(changed) | {"https"} == set(FrontendNode.model_fields)
    plain = frontend_settings(parse_config(TREE), "127.0.0.1:1")
    assert (plain.host, plain.port, plain.router) == ("127.0.0.1", 8000, "127.0.0.1:1")
    for name, value in changed.items():
        node = parse_config(TREE | {"frontend": {name: value}})
        assert frontend_settings(node, "127.0.0.1:1") != plain, name
    default = FrontendSettings(router="127.0.0.1:1")
    assert plain == default, "the defaults of both agree"


@pytest.mark.parametrize("listen", ["8000", "host:", "host:x"])
def test_an_address_that_is_none_is_refused(listen: str):
    with pytest.raises(ConfigError, match=r"frontend\.listen"):
        frontend_settings(parse_config(TREE | {"frontend": {"listen": listen}}), "127.0.0.1:1")


def test_https_needs_a_certificate():
    with pytest.raises(ConfigError, match=r"security\.tls"):
        parse_config(TREE | {"frontend": {"https": True}})


async def test_a_terminated_frontend_finishes_its_streams(tmp_path: Path):
    vocabulary = load_vocabulary()
    words = 150
    ids = vocabulary.harmony.encode("<|channel|>final<|message|>" + " so" * words + "<|return|>", allowed_special="all")
    config, ready = tmp_path / "config.yaml", tmp_path / "address"
    config.write_text(yaml.safe_dump(TREE | {"frontend": {"listen": "127.0.0.1:0"}}))
    async with running_router(lambda request, index: Script(ids, gap_s=0.02)) as router:
        command = ["-m", "cluster.cli", "frontend", "--config", str(config), "--router", router.address, "--ready-file", str(ready)]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(100):
                while not ready.exists():
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
            async with httpx.AsyncClient(base_url=f"http://{ready.read_text()}", timeout=60) as http:
                body = {"model": "gpt-oss-20b", "messages": [{"role": "user", "content": "hi"}], "stream": True}
                running = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(3)]
                await router.until_open(3, within_s=30)
                process.send_signal(signal.SIGTERM)
                responses = await asyncio.gather(*running)
            assert all(response.text.count(" so") == words and response.text.endswith("[DONE]\n\n") for response in responses)
            async with asyncio.timeout(30):
                _, log = await process.communicate()
            assert process.returncode in (0, -signal.SIGTERM), log.decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
