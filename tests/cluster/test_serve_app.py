"""The application that a RayService waits for: deploying until every pool has its minimum, healthy while there is a controller."""

from __future__ import annotations

import asyncio
import json

import pytest

from common.errors import WorkerLost

serve_app = pytest.importorskip("cluster.serve_app", reason="ray[serve] is not installed")


class FakeController:
    """Stands for the actor's handle."""

    def __init__(self):
        self.rows = []
        self.status = self

    async def remote(self):
        return self.rows


def row(pool: str, state: str) -> dict:
    return {"pool": pool, "group": f"{pool}-1", "state": state, "error": None, "tp": 1}


async def test_it_is_deploying_until_every_pool_has_its_minimum(monkeypatch):
    controller, there = FakeController(), []

    def get_actor(name, namespace):
        if not there:
            raise ValueError(name)
        return controller

    monkeypatch.setattr(serve_app.ray, "get_actor", get_actor)
    monkeypatch.setattr(serve_app, "POLL_S", 0)
    app = object.__new__(serve_app.PoolsReady)
    minimum = {"p": 1, "d": 1, "wakes-later": 0}
    assert await app._lacks(minimum) == "the controller"
    with pytest.raises(WorkerLost):
        await app.check_health()
    starting = asyncio.create_task(app.__init__(minimum))
    there.append(True)
    controller.rows = [row("p", "ready"), row("d", "loading")]
    assert await app._lacks(minimum) == "d (0 of 1 groups); d-1: loading"
    for _ in range(10):
        await asyncio.sleep(0)
    assert not starting.done()
    controller.rows = [row("p", "ready"), row("d", "ready")]
    await asyncio.wait_for(starting, 30)
    await app.check_health()
    assert await app(None) == controller.rows


def test_serve_builds_it_from_the_configuration_alone(tmp_path):
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": "/m"}, "pools": pools}))
    assert serve_app.build({"config": str(tmp_path / "config.json")}) is not None
