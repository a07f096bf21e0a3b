"""`tandem up`, `down` and the router's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cluster.cli.app import ConfigOption, NameOption, RouterOption, SetOption, app, err, out, read_config
from common.errors import ConfigError
from common.heap import return_freed_memory, settle_memory


@app.command()
def up(config: ConfigOption, set_: SetOption = None, name: NameOption = "default") -> None:
    """Start pools, controller and router, on this machine or on the Ray cluster of cluster.ray_address."""
    from cluster.up import bring_up

    tree = read_config(config, set_)
    with startup_progress() as show:
        state = bring_up(tree, name, show)
    out.print(f"router: {state.router_address}")
    if state.frontend_address is not None:
        out.print(f"frontend: http{'s' if tree.frontend.https else ''}://{state.frontend_address}")


@app.command()
def down(name: NameOption = "default") -> None:
    """Stop everything that `tandem up` started."""
    from cluster.up import take_down

    if not take_down(name):
        raise ConfigError(f"no cluster {name!r} is up on this machine")
    out.print(f"{name} is down")


@app.command(hidden=True)
def router(
    config: ConfigOption,
    controller: Annotated[str, typer.Option(help="host:port of the controller's directory.")],
    set_: SetOption = None,
    ready_file: Annotated[Path | None, typer.Option(help="Written with the address once requests are served.")] = None,
) -> None:
    """Run a router in this process until SIGTERM. `tandem up` starts one; run more beside it for availability."""
    import uvloop

    from cluster.router.main import serve
    from common.logs import configure_logging

    configure_logging(role="router")
    return_freed_memory()

    def ready(address: str) -> None:
        settle_memory()
        if ready_file is not None:
            write_whole(ready_file, address)

    uvloop.run(serve(read_config(config, set_), controller, ready))


@app.command()
def frontend(
    config: ConfigOption,
    set_: SetOption = None,
    name: NameOption = "default",
    router: RouterOption = None,
    ready_file: Annotated[Path | None, typer.Option(help="Written with the address once requests are taken.")] = None,
) -> None:
    """Serve OpenAI-compatible HTTP, the web page and gRPC chat in this process until SIGTERM; running replies finish."""
    from cluster.client import router_address
    from cluster.frontend_settings import frontend_settings
    from common.logs import configure_logging
    from frontend.harmony.format import HarmonyFormat
    from frontend.server import serve
    from frontend.vocab import load_vocabulary

    configure_logging(role="frontend")
    settings = frontend_settings(read_config(config, set_), router_address(name, router))

    def ready(port: int) -> None:
        if ready_file is not None:
            write_whole(ready_file, f"{settings.host}:{port}")

    serve(settings, HarmonyFormat(load_vocabulary(settings.vocab_dir), settings.limits), ready)


def write_whole(file: Path, text: str) -> None:
    """Whoever waits for the file finds it complete."""
    temporary = file.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(file)


class startup_progress:
    """One line per group while the cluster starts; plain lines where there is no terminal."""

    def __enter__(self):
        self._bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True)
        self._lines: dict[str, TaskID] = {}
        self._said: set[tuple[str, str]] = set()
        self._bar.start()
        return self._show

    def __exit__(self, *exc) -> None:
        self._bar.stop()

    def _show(self, rows: list[dict]) -> None:
        for row in rows:
            key = row["group"] or row["pool"]
            text = f"{row['pool']:<16} {key:<26} tp{row['tp']}  {row['state']}"
            if err.is_terminal:
                if key not in self._lines:
                    self._lines[key] = self._bar.add_task(text, total=None)
                self._bar.update(self._lines[key], description=text)
            elif (key, row["state"]) not in self._said:
                self._said.add((key, row["state"]))
                err.print(text)
