"""A Ray cluster that is gone, or was never there, is a clear error at once; what Tandem knew of it can still be taken down."""

from __future__ import annotations

import logging
import socket
import time

import pytest

from cluster.local_ray import connect, free_port
from cluster.state import ClusterState, load_state, save_state
from cluster.up import take_down
from common.errors import ConfigError
from tests.support.pace import within


def test_connecting_where_nobody_listens_says_so_at_once():
    address = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}"):
        connect(address, None, "tandem-test")
    assert time.monotonic() - began < within(1.0)


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_a_place_where_somebody_listens_is_left_to_ray(monkeypatch, form):
    asked = []
    monkeypatch.setattr("cluster.local_ray.ray.init", lambda address, **_: asked.append(address))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = form.format(f"127.0.0.1:{server.getsockname()[1]}")
        connect(address, None, "tandem-test")
    assert asked == [address]


def test_a_down_without_its_ray_ends_and_says_what_it_could_not_stop(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    address = f"127.0.0.1:{free_port()}"
    save_state(ClusterState(name="lost", ray_address=address))
    with caplog.at_level(logging.WARNING):
        assert take_down("lost")
    assert f"no Ray cluster answers at {address}" in caplog.text
    assert "was not stopped" in caplog.text
    assert load_state("lost") is None
    assert not take_down("lost")
