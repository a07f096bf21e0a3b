"""`tandem up` that is interrupted or killed at any moment leaves nothing behind, and `tandem down` ends what runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.local_ray import family_of_ray
from cluster.state import ClusterState, Process
from tests.support.local_cluster import cluster_config

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
DEADLINE_S = 120.0


@pytest.fixture
def config_file(checkpoint, tmp_path):
    pools = [
        {"name": "prefill", "role": "prefill", "kv_blocks": 256, "chunk_tokens": 256},
        {"name": "decode", "role": "decode", "kv_blocks": 256, "max_batch": 8},
    ]
    path = tmp_path / "config.json"
    path.write_text(cluster_config(checkpoint, pools=pools).model_dump_json())
    return path


def tandem(tmp_path: Path, *args: str) -> subprocess.Popen:
    environment = {**os.environ, "TANDEM_STATE_DIR": str(tmp_path / "state")}
    command = [sys.executable, "-m", "cluster.cli", *args]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(holds, what: str):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)
    return found


def state_of(tmp_path: Path) -> ClusterState | None:
    try:
        return ClusterState.model_validate_json((tmp_path / "state" / "t" / "state.json").read_text())
    except OSError:
        return None


def family_of(state: ClusterState) -> set[Process]:
    assert state.ray_process is not None
    return family_of_ray(state.ray_process, state.ray_folder) | {state.ray_process}


@pytest.mark.parametrize("moment", ["ray begins", "controller runs"])
def test_an_up_that_is_killed_takes_everything_with_it(config_file, tmp_path, moment):
    up = tandem(tmp_path, "up", "--name", "t", "--config", str(config_file))
    reached = (lambda s: s) if moment == "ray begins" else (lambda s: s and s.controller_address)
    state = until(lambda: reached(state_of(tmp_path)) and state_of(tmp_path), moment)
    if moment == "ray begins":
        until(lambda: len(family_of(state)) > 2, "Ray's daemons")
    family = family_of(state)
    up.kill()
    up.communicate()
    until(lambda: state_of(tmp_path) is None, "the end of the state file")
    assert [p.pid for p in family | family_of(state) if not p.is_dead()] == []
    assert not Path(str(state.ray_folder)).exists()


def test_ctrl_c_during_up_takes_everything_with_it(config_file, tmp_path):
    up = tandem(tmp_path, "up", "--name", "t", "--config", str(config_file))
    state = until(lambda: state_of(tmp_path), "the state file")
    until(lambda: len(family_of(state)) > 2, "Ray's daemons")
    family = family_of(state)
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=DEADLINE_S)
    assert up.returncode == 130, output
    assert state_of(tmp_path) is None
    assert [p.pid for p in family | family_of(state) if not p.is_dead()] == []


def test_what_is_up_goes_on_without_the_command_and_a_down_that_is_killed_still_ends_it(config_file, tmp_path):
    up = tandem(tmp_path, "up", "--name", "t", "--config", str(config_file))
    output, _ = up.communicate(timeout=DEADLINE_S)
    assert up.returncode == 0, output
    state = state_of(tmp_path)
    assert state is not None
    assert state.router_process is not None
    family = family_of(state)
    again = tandem(tmp_path, "up", "--name", "t", "--config", str(config_file))
    assert "up already" in again.communicate(timeout=DEADLINE_S)[0]
    assert all(not p.is_dead() for p in (state.ray_process, state.router_process))
    down = tandem(tmp_path, "down", "--name", "t")
    until(lambda: state.router_process.is_dead(), "the router's end")
    down.kill()
    down.communicate()
    until(lambda: state_of(tmp_path) is None, "the end of the state file")
    assert [p.pid for p in family | family_of(state) if not p.is_dead()] == []
