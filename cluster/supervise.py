"""Keeps the controller of one Ray cluster running, from beside the head: Kubernetes' counterpart of `tandem up`.

Runs for ever in the head's own process namespace (a driver must see the raylet's pids). Starts the controller where there is none,
follows what it says, and starts another when it is gone. Never touches groups. Called by `tandem controller`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import ray

from cluster.local_ray import connect, namespace_of
from cluster.up import CONTROLLER, start_controller
from common.config import Config
from common.errors import ConfigError, ServingError

logger = logging.getLogger(__name__)
CLUSTER = "default"
POLL_S = 1.0
RETRY_S = 3.0
CALL_TIMEOUT_S = 30.0


def keep_controller(config: Config, *, goes_on: Callable[[], bool] = lambda: True) -> None:
    """Returns when `goes_on` says so, leaving the controller and its groups as they are.

    Raises: ConfigError if `cluster.ray_address` is not set
    """
    if config.cluster.ray_address is None:
        raise ConfigError("cluster.ray_address is unset: `tandem controller` joins a Ray cluster; `tandem up` starts one")
    said = ""
    while goes_on():
        try:
            if not ray.is_initialized():
                connect(config.cluster.ray_address, None, namespace_of(CLUSTER))
            said = _follow(_controller(config), said, goes_on)
        except (ServingError, ray.exceptions.RayError) as exc:
            said = _say(said, f"the controller is not running: {' '.join(str(exc).split())[:400]}")
            if ray.is_initialized():
                ray.shutdown()
            time.sleep(RETRY_S)


def waits_for(rows: list[dict]) -> str:
    """What a cluster that isn't complete lacks, in words; "" if every group is ready."""
    missing = [f"{row['group'] or row['pool']}: {row['error'] or row['state']}" for row in rows if row["state"] != "ready"]
    return "; ".join(sorted(missing))


def _controller(config: Config):
    """The running controller, or a new one that has started. Raises: ServingError, RayError"""
    try:
        return ray.get_actor(CONTROLLER, namespace=namespace_of(CLUSTER))
    except ValueError:
        logger.info("starting the controller")
    controller = start_controller(config, CLUSTER)
    try:
        ray.get(controller.start.remote(), timeout=CALL_TIMEOUT_S)
    except (ServingError, ray.exceptions.RayError):
        ray.kill(controller)
        raise
    return controller


def _follow(controller, said: str, goes_on: Callable[[], bool]) -> str:
    """Logs each change of what the groups wait for. Raises: RayError when the controller has died or hangs"""
    while goes_on():
        lacks = waits_for(ray.get(controller.status.remote(), timeout=CALL_TIMEOUT_S))
        said = _say(said, f"waits for {lacks}" if lacks else "every group is ready")
        time.sleep(POLL_S)
    return said


def _say(said: str, text: str) -> str:
    if text != said:
        logger.info("%s", text)
    return text
