"""The one Ray Serve application of a RayService: it runs once every pool has its minimum, and only then KubeRay switches clusters.

Carries no request of clients; those go to the router. Ray Serve imports it on the head (`import_path: cluster.serve_app:build`).
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster.local_ray import namespace_of
from cluster.nodes import HEAD_NODE
from cluster.supervise import CLUSTER, waits_for
from cluster.up import CONTROLLER
from common.config import load_config
from common.errors import WorkerLost

logger = logging.getLogger(__name__)
POLL_S = 1.0


class PoolsReady:
    """One replica, on the head. `minimum`: ready groups that each pool must have."""

    async def __init__(self, minimum: dict[str, int]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Returns when the pools are there: until then the application counts as deploying."""
        said = ""
        while lacks := await self._lacks(minimum):
            if lacks != said:
                said = lacks
                logger.info("waits for %s", lacks)
            await asyncio.sleep(POLL_S)

    async def check_health(self) -> None:
        """Raises: WorkerLost while there is no controller. A group that is replaced meanwhile is the controller's affair."""
        await _rows()

    async def __call__(self, request: Any) -> list[dict]:
        """What each group does, for whoever asks over HTTP."""
        return await _rows()

    async def _lacks(self, minimum: dict[str, int]) -> str:
        try:
            rows = await _rows()
        except WorkerLost as exc:
            return exc.message
        ready = [row["pool"] for row in rows if row["state"] == "ready"]
        missing = [f"{pool} ({ready.count(pool)} of {least} groups)" for pool, least in minimum.items() if ready.count(pool) < least]
        return "; ".join([*missing, waits_for(rows)]).strip("; ") if missing else ""


async def _rows() -> list[dict]:
    """The controller's status. Raises: WorkerLost while the head's supervisor has not started one"""
    try:
        controller = ray.get_actor(CONTROLLER, namespace=namespace_of(CLUSTER))
    except ValueError:
        raise WorkerLost("the controller") from None
    return await controller.status.remote()


def build(args: dict[str, str]) -> serve.Application:
    """`args["config"]`: path of the configuration on the head. Raises: ConfigError"""
    minimum = {pool.name: pool.replicas.min for pool in load_config(Path(args["config"])).pools}
    options = {"num_cpus": 0, "resources": {HEAD_NODE: 0.001}}
    return serve.deployment(name="pools-ready", num_replicas=1, ray_actor_options=options)(PoolsReady).bind(minimum)
