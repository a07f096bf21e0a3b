"""`tandem bench`: a load generator with the flags that people know."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.cli.app import NameOption, RouterOption, app, err, out
from cluster.cli.load_options import TraceOption
from common.errors import ConfigError, WorkerLost
from common.proto import router_pb2


@app.command()
def bench(
    request_rate: Annotated[str, typer.Option(help="Requests per second; inf sends all at once.")] = "inf",
    burstiness: Annotated[float, typer.Option(help="1 is Poisson, smaller comes in bursts, larger is more even.")] = 1.0,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many requests.")] = 100,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests at once.")] = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 128,
    random_range: Annotated[float, typer.Option(min=0, help="Sigma of the log of both lengths; 0 = all alike.")] = 0.0,
    trace: TraceOption = None,
    goodput: Annotated[list[str] | None, typer.Option(help="Bounds as NAME:MS (ttft, tpot, itl, e2el), blanks between.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    base_url: Annotated[str | None, typer.Option(help="OpenAI-style server to send to instead of the router.")] = None,
    model: Annotated[str, typer.Option(help="Model name, with --base-url.")] = "gpt-oss",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token, with --base-url.")] = None,
    usd_per_hour: Annotated[float | None, typer.Option(help="Price of the whole server; unset = by the router's figures.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Deadline of each request.")] = 600.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    name: NameOption = "default",
    router: RouterOption = None,
) -> None:
    """Send a load to a router or an OpenAI-style server and report TTFT, ITL, TPOT, E2E, goodput and price."""
    from cluster.bench.measure import parse_goodput
    from cluster.load.arrivals import Lengths, random_load
    from cluster.load.traces import read_trace

    bounds = parse_goodput([item for text in goodput or [] for item in text.split()])
    rate = _rate(request_rate)
    if trace is not None:
        load = read_trace(trace).head(num_prompts)
        load = load if math.isinf(rate) else load.at_rate(rate)
    else:
        lengths = Lengths(random_input_len, random_range), Lengths(random_output_len, random_range)
        load = random_load(num_prompts, 1e9 if math.isinf(rate) else rate, *lengths, burstiness=burstiness, seed=seed)
    figures = asyncio.run(_run(load, max_concurrency, bounds, usd_per_hour, (name, router, base_url, model, api_key, timeout_s, seed)))
    out.print(bench_table(figures))
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=1) + "\n")
    if not figures["completed"]:
        raise WorkerLost(f"no request was answered: {', '.join(figures['errors'])}")


async def _run(load, max_concurrency: int | None, bounds: dict[str, float], usd_per_hour: float | None, where: tuple) -> dict[str, Any]:
    from cluster.bench.drive import drive
    from cluster.bench.measure import summarize
    from cluster.bench.targets import OpenAITarget, RouterTarget, Target
    from cluster.client import router_address, router_stub
    from cluster.credentials import client_wire

    name, router, base_url, model, api_key, timeout_s, seed = where
    target: Target
    if base_url is not None:
        target = OpenAITarget(base_url, model, api_key, timeout_s, seed)
    else:
        with router_stub(name, router) as stub:
            vocab_size = stub.GetModelInfo(router_pb2.GetModelInfoRequest(), timeout=10).vocab_size
        wire = client_wire(name)
        target = RouterTarget(wire.channel(router_address(name, router)), vocab_size, timeout_s, seed, wire)
    try:
        with Progress(TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err) as bar:
            task = bar.add_task("requests", total=len(load))
            samples, duration_s = await drive(target, load, max_concurrency, lambda done: bar.update(task, completed=done))
    finally:
        await target.close()
    return summarize(samples, duration_s, bounds, usd_per_hour)


def bench_table(figures: dict[str, Any]) -> Table:
    table = Table("figure", "mean", "median", "p99")
    for key, label in (("ttft_ms", "TTFT ms"), ("tpot_ms", "TPOT ms"), ("itl_ms", "ITL ms"), ("e2el_ms", "E2E ms")):
        table.add_row(label, *(f"{figures[key][name]:.2f}" for name in ("mean", "median", "p99")))
    plain = [
        ("completed / failed", f"{figures['completed']} / {figures['failed']}"),
        ("duration", f"{figures['duration_s']:.2f} s"),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        ("output tokens/s", f"{figures['output_throughput']:.1f}"),
    ]
    if figures["goodput"] is not None:
        plain.append(("goodput, requests/s", f"{figures['goodput']:.2f}"))
    if figures["usd_per_1m_output_tokens"] is not None:
        plain.append(("$ per 1M output tokens", f"{figures['usd_per_1m_output_tokens']:.3f}"))
    for label, value in plain:
        table.add_row(label, value)
    return table


def _rate(text: str) -> float:
    """Raises: ConfigError"""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise ConfigError(f"--request-rate {text!r}: expected requests per second above 0, or inf")
    return rate
