"""`tandem scale`, `drain`, `rollout` and `pools`: what an operator asks of a running cluster's controller."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.table import Table

from cluster.cli.app import ConfigOption, NameOption, SetOption, app, err, out, read_config
from common.errors import InvalidRequestError, ServingError
from common.proto import control_pb2, control_pb2_grpc

ControllerOption = Annotated[str | None, typer.Option("--controller", help="host:port; unset = the controller of --name on this machine.")]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Stay until it is done; what was asked goes on if you leave.")]
POLL_S = 0.2
AUTOMATIC = "auto"


@app.command()
def pools(name: NameOption = "default", controller: ControllerOption = None) -> None:
    """Show what each pool wants and has, what is waited for, and the latest changes with their reasons."""
    from cluster.client import controller_stub

    with controller_stub(name, controller) as stub:
        status = stub.Status(control_pb2.StatusRequest(), timeout=10)
    table = Table("pool", "wanted", "bounds", "ready", "starting", "draining", "by hand", "last error")
    for pool in status.pools:
        table.add_row(
            pool.pool, str(pool.wanted), f"{pool.min}-{pool.max}", str(pool.ready), str(pool.starting), str(pool.draining),
            "yes" if pool.pinned else "", pool.error,
        )  # fmt: skip
    out.print(table)
    for group in status.groups:
        stale = " (older configuration)" if group.stale else ""
        out.print(f"{group.group}: {group.state}{stale}{'; ' + group.detail if group.detail else ''}")
    out.print(f"GPUs: {status.gpus_held} of {status.gpu_budget} held" + (f"; waits: {status.waits_for}" if status.waits_for else ""))
    for change in status.changes:
        when = time.strftime("%H:%M:%S", time.localtime(change.unix_s))
        would = " (dry run, nothing was done)" if change.dry_run else ""
        out.print(f"{when} {change.pool}: {change.before} -> {change.after}{would}: {change.reason}")


@app.command()
def scale(
    pool: Annotated[str, typer.Argument(help="Name of the pool.")],
    replicas: Annotated[str, typer.Argument(help="Groups wanted, 0 up to replicas.max; or `auto`: the autoscaler decides again.")],
    wait: WaitOption = True,
    name: NameOption = "default",
    controller: ControllerOption = None,
) -> None:
    """Set a pool's number of groups by hand.

    The number holds until `tandem scale POOL auto`. Groups that are too many are drained: nothing new, running requests finish within
    cluster.drain_grace_s. More groups start as the GPU budget and free GPUs allow.
    """
    from cluster.client import controller_stub

    request = control_pb2.ScaleRequest(pool=pool, automatic=replicas == AUTOMATIC)
    if not request.automatic:
        request.replicas = _count(replicas)
    with controller_stub(name, controller) as stub:
        wanted = stub.Scale(request, timeout=10).replicas
        out.print(f"{pool}: {wanted} groups wanted" + (", from now on as the load needs" if request.automatic else ""))
        if wait and not request.automatic:
            _follow(stub, lambda status: _settled(status, pool))


@app.command()
def drain(
    target: Annotated[str, typer.Argument(help="A pool or a group, as `tandem pools` names them, or a node's address or Ray id.")],
    now: Annotated[bool, typer.Option("--now", help="A group: at once, even if nobody else can serve meanwhile.")] = False,
    wait: WaitOption = True,
    name: NameOption = "default",
    controller: ControllerOption = None,
) -> None:
    """Let a pool, a group or all groups of a node finish what they have and end them.

    A group is replaced by a new one, which starts first where the GPU budget has room for both.
    A pool that was drained stays empty until `tandem scale POOL N` or `auto`.
    A node's groups end at once and others come elsewhere; Ray takes nothing new there and ends with the last of them.
    What has not finished within cluster.drain_grace_s goes on elsewhere, or ends with an error that says so.
    """
    from cluster.client import controller_stub

    with controller_stub(name, controller) as stub:
        groups = set(stub.Drain(control_pb2.DrainRequest(target=target, now=now), timeout=10).groups)
        out.print(f"{len(groups)} groups drain")
        if wait:
            _follow(stub, lambda status: not groups & {group.group for group in status.groups})


@app.command()
def rollout(
    config: ConfigOption,
    set_: SetOption = None,
    allow_gap: Annotated[bool, typer.Option("--allow-gap", help="Go on where GPUs are too few to keep serving meanwhile.")] = False,
    wait: WaitOption = True,
    name: NameOption = "default",
    controller: ControllerOption = None,
) -> None:
    """Replace groups one by one so that they run another configuration or checkpoint, under load.

    A newer group starts beside an older one where the GPU budget has room, else in its place; the older one drains. Groups whose
    checkpoint or KV format differ never exchange KV: both roles are replaced side by side. Settings of the router, prices and queues
    take effect when routers start again.
    """
    from cluster.client import controller_stub
    from cluster.state import state_dir

    tree = read_config(config, set_)
    request = control_pb2.RolloutRequest(config_json=tree.model_dump_json(), allow_gap=allow_gap)
    with controller_stub(name, controller) as stub:
        groups = stub.Rollout(request, timeout=60).groups
        out.print(f"{len(groups)} groups are to be replaced")
        _keep_for_routers(state_dir(name) / "config.json", tree.model_dump_json(indent=1))
        if wait:
            _follow(stub, lambda status: not any(group.stale for group in status.groups) and _all_settled(status))


def _count(text: str) -> int:
    if not text.isdigit():
        raise InvalidRequestError("replicas", f"{text!r}; give a number or `{AUTOMATIC}`")
    return int(text)


def _keep_for_routers(path: Path, text: str) -> None:
    """Where `tandem up` has left the configuration of this machine's router, for its next start."""
    if path.exists():
        temporary = path.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(path)


def _settled(status: control_pb2.StatusReply, name: str) -> bool:
    return all(p.ready == p.wanted and not (p.starting or p.draining) for p in status.pools if p.pool == name)


def _all_settled(status: control_pb2.StatusReply) -> bool:
    return all(_settled(status, pool.pool) for pool in status.pools)


def _follow(stub: control_pb2_grpc.DirectoryStub, is_done: Callable[[control_pb2.StatusReply], bool]) -> None:
    """Prints each change of a group until it is done. Raises: ServingError as soon as a pool's group has failed to start"""
    said: dict[str, str] = {}
    failed = {pool.pool: pool.error for pool in _status(stub).pools}
    while True:
        status = _status(stub)
        now = {group.group: f"{group.state}{'; ' + group.detail if group.detail else ''}" for group in status.groups}
        now |= {gone: "gone" for gone in said if gone not in now and said[gone] != "gone"}
        if status.waits_for:
            now["waits"] = status.waits_for
        for group, text in now.items():
            if said.get(group) != text:
                said[group] = text
                err.print(f"{group}: {text}")
        if is_done(status):
            return
        for pool in status.pools:
            if pool.error and pool.error != failed.get(pool.pool, ""):
                raise ServingError(f"pool {pool.pool}: {pool.error}")
        time.sleep(POLL_S)


def _status(stub: control_pb2_grpc.DirectoryStub) -> control_pb2.StatusReply:
    """Waits for a controller that starts again."""
    while True:
        try:
            return stub.Status(control_pb2.StatusRequest(), timeout=10, wait_for_ready=True)
        except grpc.RpcError as exc:
            if exc.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
            time.sleep(POLL_S)
