"""Measures one frontend process on one core: tokens/s under many SSE streams, and what it adds to the time to first token.

The router is a fake in a process of its own: groups of streams step together, as the sequences of a decode group do, one token per stream
and step. The clients are a raw epoll loop in another process. Both share the core that the frontend does not run on.
    python -m benchmarks.frontend                    # everything, written to benchmarks/results/frontend.json
    python -m benchmarks.frontend throughput --streams 2000 --step-ms 100
    python -m benchmarks.frontend ttft --streams 200

What the frontend adds to the time to first token ("own") is the time from the moment that a client, connected, sends its request until
the first content is in the client's kernel, less the time that the router took from having the request to beginning to write the first
token. So it counts accept and HTTP, the rendering, gRPC both ways with the wake-ups of both ends (the fake router's, too), parsing, SSE,
the socket, and what the stamps cost. It leaves out the client's connect and how long the client's loop takes to read what has come;
"seen by the client" holds these, too.

Measured are requests that come by chance (a Poisson process) while all the streams asked for run; the rounds, each with fresh
processes, are pooled. A round in which others (the host, too) took more than 3% of one of the two cores is run again, whatever its figures,
up to three times as many rounds in all; then those count that others disturbed least. The record says how many were tried.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import uvloop

from benchmarks.frontend_legs import StampedApp, StampedLink, Stamps, legs_ms, points_s, pooled, table_of
from benchmarks.frontend_load import Clients, Load, cpu_s, run_router
from common.heap import settle_memory
from frontend import router_client
from frontend.harmony.format import HarmonyFormat
from frontend.http.app import build_app
from frontend.server import FrontendServer, serve
from frontend.settings import FrontendSettings
from frontend.vocab import load_vocabulary

RESULTS = Path(__file__).parent / "results" / "frontend.json"
FRONTEND_CORE, OTHER_CORE = 0, 1
MOST_OTHERS = 0.03  # of a core, in a round that counts


def serve_router(pipe: Connection, load: Load) -> None:
    os.sched_setaffinity(0, {OTHER_CORE})
    uvloop.run(run_router(pipe, load))


def serve_frontend(pipe: Connection, router: str, is_stamped: bool) -> None:
    stamps = Stamps()

    def answer() -> None:
        while (asked := pipe.recv()) != "end":
            pipe.send(cpu_s() if asked == "cpu" else stamps)
        os.kill(os.getpid(), signal.SIGTERM)

    os.sched_setaffinity(0, {FRONTEND_CORE})
    settings = FrontendSettings(router=router, port=0, model_names=("m",), max_streams=100_000, drain_s=0.0)
    chat_format = HarmonyFormat(load_vocabulary())
    threading.Thread(target=answer, daemon=True).start()
    if not is_stamped:
        serve(settings, chat_format, pipe.send)
        return
    router_client.RouterLink = functools.partial(StampedLink, stamps)  # type: ignore[assignment,misc]
    server = FrontendServer(settings, StampedApp(build_app(settings, chat_format), stamps), pipe.send)  # type: ignore[arg-type]
    settle_memory()
    server.run()


def busy_s(core: int) -> float:
    """Seconds that the core was not idle, those that the host took of it too."""
    line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} "))
    user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(most_s: float) -> None:
    """Until both cores are nearly idle for a second, or no longer than `most_s`."""
    until_s = time.monotonic() + most_s
    while time.monotonic() < until_s:
        before_s = [busy_s(core) for core in (FRONTEND_CORE, OTHER_CORE)]
        time.sleep(1.0)
        if max(busy_s(core) - before for core, before in zip((FRONTEND_CORE, OTHER_CORE), before_s, strict=True)) <= 2 * MOST_OTHERS:
            return


def measure(load: Load, seed: int) -> tuple[dict, list[dict[str, float]]]:
    """One run with fresh processes. Returns: its figures, and the legs [ms] of each request that came when all streams ran"""
    context = multiprocessing.get_context("spawn")
    router_pipe, router_end = context.Pipe()
    pipe, end = context.Pipe()
    router = context.Process(target=serve_router, args=(router_end, load), daemon=True)
    router.start()
    frontend = context.Process(target=serve_frontend, args=(end, router_pipe.recv(), load.arrivals > 0), daemon=True)
    frontend.start()
    port = pipe.recv()
    os.sched_setaffinity(0, {OTHER_CORE})
    Clients(port, stays=0).run([i * 0.0125 for i in range(8)])

    def ask(process: Connection, what: str):
        process.send(what)
        return process.recv()

    def used_s() -> list[float]:
        """CPU of the frontend, the router and the clients, and how long the two cores were busy."""
        return [ask(pipe, "cpu"), ask(router_pipe, "cpu"), cpu_s(), busy_s(FRONTEND_CORE), busy_s(OTHER_CORE)]

    time.sleep(0.5)  # what the first streams left is put away
    before_s = used_s()
    clients = Clients(port, load.streams, load.prompt_words)
    wall_s = clients.run(load.starts_s(seed))
    frontend_s, router_s, clients_s, core_s, other_core_s = (after - before for after, before in zip(used_s(), before_s, strict=True))
    stamps, router_stamps_s = ask(pipe, "stamps"), ask(router_pipe, "stamps")
    for process, started in ((pipe, frontend), (router_pipe, router)):
        process.send("end")
        started.join(10)
    firsts_ms = sorted((stream.read_s - stream.begun_s) * 1e3 for stream in clients.streams)
    measured = list(enumerate(clients.streams))[load.streams :]
    figures = {
        "failed_streams": clients.failed,
        "tokens": clients.tokens,
        "wall_s": wall_s,
        "frontend_cpu_s": frontend_s,
        "frontend_cpu_share": frontend_s / wall_s,
        "router_cpu_share": router_s / wall_s,
        "client_cpu_share": clients_s / wall_s,
        "others_share": max(core_s - frontend_s, other_core_s - router_s - clients_s) / wall_s,
        "first_content_p50_ms": firsts_ms[len(firsts_ms) // 2],
        "first_content_p99_ms": firsts_ms[int(len(firsts_ms) * 0.99)],
        "running": [stream.running for _, stream in measured],
    }
    return figures, [legs_ms(points_s(number, stream, stamps, router_stamps_s)) for number, stream in measured]


def facts() -> dict:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def measure_throughput(load: Load, rounds: int) -> list[dict]:
    runs = []
    for seed in range(rounds):
        figures, _ = measure(load, seed)
        del figures["running"]
        tokens, frontend_s = figures["tokens"], figures["frontend_cpu_s"]
        run = {
            **facts(),
            "run": "throughput",
            "streams": load.streams,
            "step_ms": load.step_ms,
            "groups": load.groups,
            "ramp_s": load.ramp_s,
            "offered_tokens_per_s": load.streams / load.step_ms * 1e3,
            "tokens_per_s": tokens / figures["wall_s"],
            "tokens_per_frontend_cpu_s": tokens / frontend_s,
            "frontend_cpu_us_per_token": frontend_s / tokens * 1e6,
            "frontend_cpu_us_per_stream": frontend_s / load.streams * 1e6,
            **figures,
        }
        runs.append(run)
        print(json.dumps(run, indent=1))
    return runs


def quiet_rounds(load: Load, rounds: int) -> tuple[list[tuple[dict, list[dict[str, float]]]], int]:
    """The rounds that others left alone, or disturbed least, and how many were tried: chosen by others' share of the cores alone."""
    done = []
    for seed in range(3 * rounds):
        wait_for_quiet(20.0)
        done.append(measure(load, seed))
        if sum(figures["others_share"] <= MOST_OTHERS for figures, _ in done) == rounds:
            break
    return sorted(done, key=lambda measured: measured[0]["others_share"])[:rounds], len(done)


def measure_ttft(load: Load, rounds: int) -> dict:
    measured, tried = quiet_rounds(load, rounds)
    running = [count for figures, _ in measured for count in figures["running"]]
    run = {
        **facts(),
        "run": "ttft",
        "streams": load.streams,
        "step_ms": load.step_ms,
        "groups": load.groups,
        "prompt_words": load.prompt_words,
        "arrivals_per_s": load.arrivals_per_s,
        "rounds": rounds,
        "rounds_tried": tried,
        "running_least": min(running),
        "running_mean": statistics.mean(running),
        "running_most": max(running),
        **{f"{name}_most": max(figures[name] for figures, _ in measured) for name in ("frontend_cpu_share", "others_share")},
        "failed_streams": sum(figures["failed_streams"] for figures, _ in measured),
        **pooled([requests for _, requests in measured]),
    }
    print(json.dumps({name: value for name, value in run.items() if name != "legs"}, indent=1))
    print(table_of(run))
    return run


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", nargs="?", choices=("all", "throughput", "ttft"), default="all")
    options.add_argument("--streams", type=int)
    options.add_argument("--tokens", type=int)
    options.add_argument("--step-ms", type=float)
    options.add_argument("--prompt-words", type=int, nargs="+", default=[1, 600], help="of ttft's requests; a run for each")
    options.add_argument("--rounds", type=int, help="default: 3 for throughput, 5 for ttft")
    chosen = options.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    runs = []
    if chosen.what in ("all", "throughput"):
        load = Load(chosen.streams or 2000, chosen.tokens or 120, chosen.step_ms or 100.0, 16, 2.0)
        runs += measure_throughput(load, chosen.rounds or 3)
    if chosen.what in ("all", "ttft"):
        for words in chosen.prompt_words:
            load = Load(chosen.streams or 200, chosen.tokens or 240, chosen.step_ms or 50.0, 16, 2.0, 200, 40.0, words)
            runs.append(measure_ttft(load, chosen.rounds or 5))
    if chosen.what == "all":
        RESULTS.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
