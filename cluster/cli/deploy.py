"""`tandem controller`, `prepare`, `probe` and `leave`: what pods of the chart and nodes of `ray up` run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.app import ConfigOption, SetOption, app, out, read_config
from common.logs import configure_logging


@app.command(hidden=True)
def controller(config: ConfigOption, set_: SetOption = None) -> None:
    """Keep a controller running on the Ray cluster of cluster.ray_address, until SIGTERM. Runs beside the head."""
    from cluster.supervise import keep_controller

    configure_logging(role="supervisor")
    keep_controller(read_config(config, set_))


@app.command()
def prepare(
    config: ConfigOption,
    pool: Annotated[str, typer.Option("--pool", help="The pool that this node is for.")],
    set_: SetOption = None,
    timeout_s: Annotated[float, typer.Option(help="Give up after this long [s].")] = 3600.0,
    report: Annotated[Path | None, typer.Option(help="File that always holds the latest line, such as /dev/termination-log.")] = None,
) -> None:
    """Wait for the checkpoint, convert it and compile kernels, whatever the pool needs; each line says what is waited for."""
    import logging

    from cluster import prepare as node

    configure_logging(role="prepare", pool=pool)
    tree = read_config(config, set_)
    logger = logging.getLogger("cluster.prepare")

    def say(line: str) -> None:
        logger.info("%s", line)
        if report is not None:
            report.write_text(line)

    node.prepare(tree, node.pool_of(tree, pool), say, timeout_s)


@app.command(hidden=True)
def probe(
    config: ConfigOption,
    ready: Annotated[bool, typer.Option("--ready", help="Also ask whether a pair of pools can serve.")] = False,
    set_: SetOption = None,
) -> None:
    """Ask the router of this host for its health, as its configuration says it is to be spoken to; says what it waits for."""
    from cluster.router_probe import probe_router

    out.print(probe_router(read_config(config, set_), wants_ready=ready))


@app.command(hidden=True)
def leave(
    config: ConfigOption,
    controller: Annotated[str, typer.Option(help="host:port of the controller's directory.")],
    node: Annotated[str, typer.Option(help="Address or id of this node in the Ray cluster.")],
    timeout_s: Annotated[float, typer.Option(help="Go whatever still runs after this long [s].")],
    set_: SetOption = None,
) -> None:
    """Drain this node's groups and return when none is left on it. Before a node is taken away, such as in a pod's preStop hook."""
    from cluster.leave import leave as leave_cluster
    from cluster.specs import security_of
    from common.wire import Wire

    leave_cluster(Wire(security_of(read_config(config, set_))), controller, node, timeout_s, out.print)
