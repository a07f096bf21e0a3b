"""`tandem generate`, `status` and `route`: what a client of the router can ask."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.table import Table

from cluster.cli.app import NameOption, RouterOption, app, err, out
from cluster.cli.render import route_table
from common.errors import InvalidRequestError
from common.proto import router_pb2, types_pb2


@app.command()
def generate(
    input_ids: Annotated[str, typer.Option("--input-ids", help="Prompt as token ids: 1,2,3; - reads them from stdin.")],
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens; unset = the rest of the context.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past stop tokens.")] = False,
    ttft_ms: Annotated[float | None, typer.Option(help="Wanted time to first token [ms].")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="Wanted time between tokens [ms].")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the route decision and what it took.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Deadline of the request [s].")] = 300.0,
    name: NameOption = "default",
    router: RouterOption = None,
) -> None:
    """Send token ids, stream token ids back."""
    from cluster.client import router_stub

    request = router_pb2.GenerateRequest(request_id=f"cli-{time.time_ns()}")
    request.tokenized.input_ids.extend(parse_ids(input_ids))
    request.explain = explain
    params = request.sampling_params
    params.temperature, params.top_p, params.top_k, params.ignore_eos = temperature, top_p, top_k, ignore_eos
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if seed is not None:
        params.seed = seed
    if ttft_ms is not None:
        request.slo.ttft_ms = ttft_ms
    if itl_ms is not None:
        request.slo.itl_ms = itl_ms
    with router_stub(name, router) as stub:
        for response in stub.Generate(request, timeout=timeout_s):
            if response.HasField("chunk"):
                out.print(" ".join(map(str, response.chunk.token_ids)), end=" ")
                sys.stdout.flush()
            else:
                out.print()
                _print_complete(response.complete, explain)


@app.command()
def status(name: NameOption = "default", router: RouterOption = None) -> None:
    """Pools, groups and their load."""
    from cluster.client import router_stub

    with router_stub(name, router) as stub:
        pools = stub.ListPools(router_pb2.ListPoolsRequest(), timeout=10).pools
        loads = stub.GetLoads(router_pb2.GetLoadsRequest(), timeout=10)
    prices = {pool.name: pool.usd_per_gpu_hour * pool.gpus_per_group for pool in pools}
    table = Table("pool", "group", "layout", "weights", "state", "running", "waiting", "KV blocks free", "last step", "$/h")
    for group in sorted(loads.groups, key=lambda g: (g.description.role, g.description.group)):
        about, load = group.description, group.load
        state = "unreachable" if not group.healthy else "draining" if load.draining else "ready"
        table.add_row(
            about.pool, about.group, layout_name(about.layout), about.weights, state, str(load.running), str(load.waiting),
            f"{load.free_full_blocks}/{load.total_full_blocks}", f"{load.last_step_ms:.1f} ms", f"{prices.get(about.pool, 0):.2f}",
        )  # fmt: skip
    out.print(table)
    for queue in loads.queues:
        out.print(f"queue of {queue.pool}: {queue.requests} requests, {queue.prompt_tokens} prompt tokens, {queue.predicted_wait_s:.2f} s")


@app.command()
def route(
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt [tokens].")],
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Wanted time to first token [ms].")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="Wanted time between tokens [ms].")] = None,
    latency_weight: Annotated[float | None, typer.Option(help="1 buys speed, 0 saves money.")] = None,
    name: NameOption = "default",
    router: RouterOption = None,
) -> None:
    """Show which pair of groups a request would get now, and why. Runs nothing."""
    from cluster.client import router_stub

    request = router_pb2.PlanRouteRequest(prompt_tokens=prompt_tokens, max_tokens=max_tokens, latency_weight=latency_weight)
    if ttft_ms is not None:
        request.slo.ttft_ms = ttft_ms
    if itl_ms is not None:
        request.slo.itl_ms = itl_ms
    with router_stub(name, router) as stub:
        out.print(route_table(stub.PlanRoute(request, timeout=10)))


def parse_ids(text: str) -> list[int]:
    """Raises: InvalidRequestError for anything but non-negative numbers with commas or blanks between"""
    raw = sys.stdin.read() if text == "-" else text
    try:
        ids = [int(part) for part in raw.replace(",", " ").split()]
    except ValueError as exc:
        raise InvalidRequestError("--input-ids", f"{exc}; give numbers with commas between") from exc
    if any(not 0 <= token < 2**32 for token in ids):
        raise InvalidRequestError("--input-ids", "ids must lie in [0, 2**32)")
    return ids


def layout_name(layout: types_pb2.Layout) -> str:
    return f"EP{layout.ep} TP{layout.tp}" if layout.ep > 1 else f"TP{layout.tp}"


def _print_complete(complete: router_pb2.GenerateComplete, explain: bool) -> None:
    usage, actual = complete.usage, complete.route.actual
    reason = types_pb2.FinishReason.Name(complete.finish_reason.reason).removeprefix("FINISH_REASON_").lower()
    err.print(
        f"{reason}: {usage.prompt_tokens} prompt + {usage.completion_tokens} output tokens; TTFT {actual.ttft_ms:.0f} ms, "
        f"ITL {actual.itl_ms:.1f} ms, ${actual.cost_usd:.2e}"
    )
    if explain:
        err.print(route_table(complete.route.decision, actual))
