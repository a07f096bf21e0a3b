"""`ray up` truly run against this machine over ssh, then `tandem up` and a request; and what the chart's head does beside Ray."""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from cluster.local_ray import free_port, namespace_of
from cluster.up import CONTROLLER
from tests.support.local_cluster import cluster_config
from tests.support.loopback_ssh import Loopback, loopback_ssh
from tests.support.pace import within

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
POOLS = [
    {"name": "prefill", "role": "prefill", "kv_blocks": 64, "chunk_tokens": 64},
    {"name": "decode", "role": "decode", "kv_blocks": 128, "max_batch": 4},
]
_CONTROLLER = f"import ray, sys; ray.init(sys.argv[1], namespace={namespace_of('default')!r}); c = ray.get_actor({CONTROLLER!r})"


@dataclass(frozen=True)
class Head:
    """What `ray up` brought: its GCS, and the environment of a user who may join it."""

    address: str
    environment: dict[str, str]
    yaml_file: Path

    def run(self, *command: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environment,
        )

    def tandem(self, *args: str) -> str:
        result = self.run(sys.executable, "-m", "cluster.cli", *args)
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray-up")
    with loopback_ssh(folder) as loopback:
        port = free_port()
        file = folder / "local.yaml"
        file.write_text(yaml.safe_dump(_for_here(loopback, port, folder)))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        environment |= {"PYTHONPATH": str(ROOT), "TANDEM_STATE_DIR": str(folder / "state"), "RAY_USAGE_STATS_ENABLED": "0"}
        joined = environment | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(loopback.home / ".tandem" / "ray-token")}
        head = Head(f"127.0.0.1:{port}", joined, file)
        up = head.run(str(BIN / "ray"), "up", "-y", "--no-config-cache", str(file))
        assert up.returncode == 0, up.stdout[-2000:] + up.stderr[-2000:]
        yield head


def _for_here(loopback: Loopback, port: int, folder: Path) -> dict:
    """The shipped file with this machine's user, key and port, a small folder to copy, and this environment instead of an installation."""
    text = (ROOT / "cluster" / "ray" / "local.yaml").read_text().replace("~/tandem/.venv/bin", str(BIN)).replace("6379", str(port))
    config = yaml.safe_load(text)
    mounted = folder / "project"
    mounted.mkdir()
    (mounted / "marker").write_text("copied")
    install, make_token = config["setup_commands"]
    assert "pip install" in install
    config |= {"cluster_name": f"test-{secrets.token_hex(4)}", "file_mounts": {"~/tandem": str(mounted)}, "setup_commands": [make_token]}
    config["auth"] = {
        "ssh_user": getpass.getuser(), "ssh_private_key": str(loopback.key), "ssh_proxy_command": loopback.proxy_command
    }  # fmt: skip
    (start,) = config["head_start_ray_commands"]
    small = f"--num-cpus=4 --object-store-memory=100000000 --include-dashboard=false --temp-dir={_short_temp_dir()}"
    config["head_start_ray_commands"] = [f"{start} {small}"]
    return config


def _short_temp_dir() -> str:
    """Ray's sockets lie in it, and their paths may have 107 bytes."""
    return f"/tmp/ray-up-{secrets.token_hex(3)}"


def write_config(folder: Path, checkpoint: Path, head: Head, **changes) -> Path:
    tree = json.loads(cluster_config(checkpoint, pools=POOLS).model_dump_json())
    tree["cluster"] |= {"ray_address": head.address}
    for section, values in changes.items():
        tree[section] |= values
    (folder / "config.json").write_text(json.dumps(tree))
    return folder / "config.json"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_ray_up_on_this_machine_then_tandem_up_and_a_request(head, checkpoint, tmp_path):
    copied = head.run(str(BIN / "ray"), "exec", str(head.yaml_file), "cat ~/tandem/marker", "--no-config-cache")
    assert "copied" in copied.stdout, copied.stderr
    again = head.run(str(BIN / "ray"), "up", "-y", "--no-config-cache", "--restart-only", str(head.yaml_file))
    assert again.returncode == 0, "a head that runs is left alone"
    started = head.tandem("up", "--config", str(write_config(tmp_path, checkpoint, head)))
    try:
        router = started.split()[-1]
        answer = head.tandem("generate", "--router", router, "--input-ids", "5,6,7", "--max-tokens", "4", "--ignore-eos")
        assert len(answer.split()) == 4
    finally:
        head.tandem("down")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_supervisor_beside_a_head_starts_a_controller_and_replaces_one_that_died(head, checkpoint, tmp_path):
    """The chart's way: `tandem controller` in the head's pod, routers elsewhere that know the directory's fixed address."""
    directory = f"127.0.0.1:{free_port()}"
    listen = f"127.0.0.1:{free_port()}"
    config = write_config(tmp_path, checkpoint, head, cluster={"controller_listen": directory}, router={"listen": listen})
    log = tmp_path / "supervisor.log"
    command = [sys.executable, "-m", "cluster.cli"]
    with log.open("w") as stderr:
        supervisor = subprocess.Popen([*command, "controller", "--config", str(config)], env=head.environment, stderr=stderr)
    router = None
    try:
        _wait_for(log, "every group is ready")
        router = subprocess.Popen([*command, "router", "--config", str(config), "--controller", directory], env=head.environment)
        _wait_until_serving(head, config)
        ask = ("generate", "--router", listen, "--input-ids", "5,6,7", "--max-tokens", "4")
        first = head.tandem(*ask, "--ignore-eos")
        kill = f"{_CONTROLLER}; ray.kill(c)"
        killed = head.run(sys.executable, "-c", kill, head.address)
        assert killed.returncode == 0, killed.stderr
        _wait_for(log, "the controller is not running")
        _wait_for(log, "every group is ready", times=2)
        _wait_until_serving(head, config)
        assert head.tandem(*ask, "--ignore-eos") == first
    finally:
        for process in (supervisor, *([router] if router else [])):
            process.terminate()
            process.wait(30)
        head.run(sys.executable, "-c", f"{_CONTROLLER}; ray.get(c.shutdown.remote()); ray.kill(c)", head.address)


def _wait_for(log: Path, text: str, times: int = 1) -> None:
    deadline = time.monotonic() + within(30)
    while len(re.findall(re.escape(text), log.read_text())) < times:
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


def _wait_until_serving(head: Head, config: Path) -> None:
    deadline = time.monotonic() + within(30)
    while (asked := head.run(sys.executable, "-m", "cluster.cli", "probe", "--ready", "--config", str(config))).returncode != 0:
        assert time.monotonic() < deadline, asked.stderr
        time.sleep(0.2)
