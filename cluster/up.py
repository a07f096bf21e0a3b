"""Brings a whole cluster up and down: Ray (if there is none), controller, groups, router process.

Used by the CLI, the demo and the tests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.check import check_pools
from cluster.controller import Controller
from cluster.goals import Goals
from cluster.guard import Guard
from cluster.local_ray import LocalRay, connect, namespace_of, start_local_ray, stop_local_ray
from cluster.nodes import HEAD_NODE
from cluster.placement import remove_leftovers
from cluster.rank_actor import RankActor
from cluster.specs import security_of
from cluster.state import ClusterState, clear_state, load_state, save_state, spawn_held, state_dir
from common.config import Config
from common.errors import ConfigError, WorkerLost
from common.keyring import Keyring
from common.wire import Wire

logger = logging.getLogger(__name__)
CONTROLLER = "tandem-controller"
Rows = list[dict]


def bring_up(config: Config, name: str, on_progress: Callable[[Rows], None] = lambda rows: None) -> ClusterState:
    """Starts everything and returns when every pool has its minimum of ready groups and the router answers.

    `on_progress` gets the controller's status rows a few times a second.
    Raises: ConfigError if this name runs already or the config can't be served; WorkerLost if a group does not come up. What was
    started is stopped again then, also if this process is killed meanwhile.
    """
    check_pools(config)
    if load_state(name) is not None:
        raise ConfigError(f"cluster {name!r} is up already; `tandem down --name {name}` first")
    folder = state_dir(name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    guard = Guard(name, folder)
    try:
        state = _start_ray(config, name, folder)
        connect(state.ray_address, state.ray_token_file, namespace_of(name))
        controller = start_controller(config, name)
        state = state.model_copy(update=ray.get(controller.start.remote()))
        save_state(state)
        _wait_ready(controller, config, on_progress)
        state = _start_router(config, state, folder)
        if config.frontend.listen is not None:
            state = _start_frontend(state, folder)
    except BaseException:
        _take_down(name)
        guard.done()
        raise
    guard.done()
    return state


def take_down(name: str) -> bool:
    """Stops router, groups, controller and, if `bring_up` started it, Ray. Returns: whether there was anything to stop

    Goes on by itself if this process is killed meanwhile.
    """
    if load_state(name) is None:
        return False
    guard = Guard(name, state_dir(name))
    _take_down(name)
    guard.done()
    return True


def _take_down(name: str) -> None:
    """May be repeated at any point."""
    state = load_state(name)
    if state is None:
        return
    for process in (state.frontend_process, state.router_process):
        if process is not None:
            process.stop(timeout_s=10)
    if state.ray_process is None or not state.ray_process.is_dead():
        _stop_controller(state)
    if ray.is_initialized():
        ray.shutdown()
    if state.ray_process is not None:
        stop_local_ray(state.ray_process, state.ray_folder)
    if state.ray_token_file is not None:
        state.ray_token_file.unlink(missing_ok=True)
    clear_state(name)


def controller_of(state: ClusterState):
    """The controller's actor handle; connects to Ray if this process has not yet."""
    if not ray.is_initialized():
        connect(state.ray_address, state.ray_token_file, namespace_of(state.name))
    return ray.get_actor(CONTROLLER, namespace=namespace_of(state.name))


def device_of(config: Config) -> str:
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def _start_ray(config: Config, name: str, folder: Path) -> ClusterState:
    """The state is on disk before anything runs."""
    state = ClusterState(name=name, ray_address=config.cluster.ray_address or "")
    if config.cluster.ray_address is not None:
        save_state(state)
        return state

    def record(node: LocalRay) -> None:
        nonlocal state
        about = {"ray_process": node.process, "ray_token_file": node.token_file, "ray_folder": node.folder}
        state = state.model_copy(update=about | {"ray_address": node.address})
        save_state(state)

    ranks = sum(pool.replicas.max * pool.layout.tp for pool in config.pools)
    start_local_ray(folder, num_cpus=max(4, ranks), record=record)
    return state


def start_controller(config: Config, name: str, actor_class: type = RankActor):
    """A new controller actor on the head node, where routers look for it; its `start` is the caller's to call. Ray starts it again when it
    dies. `actor_class`: of the rank actors; tests have others."""
    key = Keyring.of_file(config.cluster.key_file).current() if config.cluster.key_file else secrets.token_bytes(32)
    where = {"num_cpus": 0, "resources": {HEAD_NODE: 0.001}, "namespace": namespace_of(name)}
    actor = ray.remote(Controller).options(name=CONTROLLER, lifetime="detached", max_concurrency=64, max_restarts=-1, **where)
    return actor.remote(config.model_dump_json(), key, device_of(config), namespace_of(name), actor_class)


def _wait_ready(controller, config: Config, on_progress: Callable[[Rows], None]) -> None:
    """Raises: WorkerLost with the reason as soon as a group has failed"""
    wanted = sum(pool.replicas.min for pool in config.pools)
    deadline = time.monotonic() + config.cluster.start_timeout_s
    while True:
        rows = ray.get(controller.status.remote())
        on_progress(rows)
        failed = [row for row in rows if row["state"] == "failed"]
        if failed:
            raise WorkerLost("; ".join(f"pool {row['pool']}: {row['error']}" for row in failed))
        if sum(row["state"] == "ready" for row in rows) >= wanted:
            return
        if time.monotonic() > deadline:
            waiting = ", ".join(f"{row['group']} ({row['state']})" for row in rows if row["state"] != "ready")
            raise WorkerLost(f"not ready within {config.cluster.start_timeout_s:.0f} s: {waiting}")
        time.sleep(0.1)


def _start_router(config: Config, state: ClusterState, folder: Path) -> ClusterState:
    """Raises: WorkerLost with the end of the router's log"""
    config_file, log, ready = folder / "config.json", folder / "router.log", folder / "router.address"
    config_file.write_text(config.model_dump_json(indent=1))
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "cluster.cli", "router", "--config", str(config_file)]
    command += ["--controller", str(state.controller_address), "--ready-file", str(ready)]
    held = spawn_held(command, log, _router_environment())
    process = held.process
    state = state.model_copy(update={"router_process": process})
    save_state(state)
    held.release()
    wire = Wire(security_of(config))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not process.is_dead():
        if ready.exists() and _is_serving(ready.read_text(), wire):
            state = state.model_copy(update={"router_address": ready.read_text()})
            save_state(state)
            return state
        time.sleep(0.05)
    raise WorkerLost(f"the router did not start: {' '.join(log.read_text().split())[-400:]}")


def _start_frontend(state: ClusterState, folder: Path) -> ClusterState:
    """Raises: WorkerLost with the end of the frontend's log"""
    log, ready = folder / "frontend.log", folder / "frontend.address"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "cluster.cli", "frontend", "--config", str(folder / "config.json")]
    command += ["--router", str(state.router_address), "--ready-file", str(ready)]
    held = spawn_held(command, log, _router_environment())
    process = held.process
    state = state.model_copy(update={"frontend_process": process})
    save_state(state)
    held.release()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not process.is_dead():
        if ready.exists():
            state = state.model_copy(update={"frontend_address": ready.read_text()})
            save_state(state)
            return state
        time.sleep(0.05)
    raise WorkerLost(f"the frontend did not start: {' '.join(log.read_text().split())[-400:]}")


def _is_serving(address: str, wire: Wire) -> bool:
    """Whether the router has found a pair of groups."""
    with wire.blocking_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="tandem.router.v1.Router")
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


def _router_environment() -> dict[str, str]:
    """Router and frontend are no members of the Ray cluster and get none of its secrets."""
    return {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}


def _stop_controller(state: ClusterState) -> None:
    """Ends the controller and its groups, and whatever a controller that is gone has left."""
    try:
        controller = controller_of(state)
    except ConfigError as exc:
        logger.warning("%s; what may run there was not stopped", exc.message)
        controller = None
    except ValueError:
        controller = None  # it never started
    if controller is not None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(controller.shutdown.remote(), timeout=30)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(controller)
    if ray.is_initialized():
        remove_leftovers(namespace_of(state.name), set())
        Goals.forget_all(namespace_of(state.name))
