"""Cost-aware routing against round robin, least loaded and shortest queue on the same simulated pools, loads and seeds; and how fast the
simulator runs.

    python -m benchmarks.economics compare --out benchmarks/results/economics.json
    python -m benchmarks.economics speed --requests 1000000 --groups 2000 --out benchmarks/results/simulator.json

Pools are of the shipped H200 profile of gpt-oss-120b. All policies see the same requests; only the choice differs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict
from pathlib import Path

from cluster.load.arrivals import Lengths, Load, mixed_load, random_load
from cluster.profile import Profile, builtin_profile
from cluster.router.choice import Aim
from cluster.sim.deployment import plans_of_names
from cluster.sim.policies import POLICIES, policy_named
from cluster.sim.record import Summary
from cluster.sim.simulation import SimSettings, Simulation

FLEETS = {
    "cheap-slow and dear-fast": ("prefill:tp1:fp8:8@2", "prefill:tp8ep8:fp8:1@6", "decode:tp1:mxfp4:6@2", "decode:tp8ep8:mxfp4:1@6"),
    "one price, TP1 and TP4": ("prefill:tp1:fp8:8@3", "prefill:tp4ep4:fp8:2@3", "decode:tp1:mxfp4:8@3", "decode:tp4ep4:mxfp4:2@3"),
    "all equal": ("prefill:tp1:fp8:4@3", "prefill:tp1:fp8:4@3", "decode:tp4ep4:mxfp4:1@3", "decode:tp4ep4:mxfp4:1@3"),
}
RATES = (10.0, 25.0, 55.0)  # requests/s
TTFT_SLO_MS, ITL_SLO_MS = 1000.0, 12.0


def load_of(rate: float, count: int, seed: int) -> Load:
    """Four fifths chats, one fifth long documents; arrivals in mild bursts."""
    chats = random_load(count * 4 // 5, rate * 0.8, Lengths(2000, 0.8), Lengths(300, 0.6), burstiness=0.5, seed=seed)
    documents = random_load(count // 5, rate * 0.2, Lengths(20_000, 0.7), Lengths(200, 0.6), burstiness=0.5, seed=seed + 1000)
    return mixed_load([chats, documents])


def run_one(profile: Profile, fleet: str, policy: str, rate: float, count: int, seed: int) -> Summary:
    settings = SimSettings(aim=Aim(0.2, TTFT_SLO_MS, ITL_SLO_MS), noise=0.05, seed=seed)
    simulation = Simulation(profile, plans_of_names(FLEETS[fleet], profile, 3.0), settings)
    simulation.policy = policy_named(policy, simulation.chooser, simulation.pools)
    return simulation.run(load_of(rate, count, seed)).summary(TTFT_SLO_MS, ITL_SLO_MS)


def compare(count: int, seeds: int) -> list[dict]:
    profile = builtin_profile(36, on_cuda=True)
    records = []
    for fleet in FLEETS:
        for rate in RATES:
            for policy in POLICIES:
                for seed in range(seeds):
                    summary = run_one(profile, fleet, policy, rate, count, seed)
                    records.append({"fleet": fleet, "rate": rate, "policy": policy, "seed": seed} | asdict(summary))
                own = [r for r in records if (r["fleet"], r["rate"], r["policy"]) == (fleet, rate, policy)]
                print(fleet, rate, _row(policy, own), flush=True)
    return records


def markdown(records: list[dict]) -> str:
    """One table per fleet: medians over the seeds."""
    lines = []
    for fleet in FLEETS:
        lines += [f"\n{fleet}: `{' '.join(FLEETS[fleet])}`\n"]
        lines += ["| requests/s | policy | within SLO | $ per 1M output tokens | p50 TTFT ms | p99 TTFT ms | p99 ITL ms |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for rate in RATES:
            for policy in POLICIES:
                own = [r for r in records if (r["fleet"], r["rate"], r["policy"]) == (fleet, rate, policy)]
                lines.append(f"| {rate:g} | {_row(policy, own)}")
    return "\n".join(lines) + "\n"


def _row(policy: str, own: list[dict]) -> str:
    def middle(get) -> float:
        return statistics.median(get(r) for r in own)

    return (
        f"{policy} | {middle(lambda r: r['attainment']):.1%} | {middle(lambda r: r['usd_per_1m_tokens']):.3f} | "
        f"{middle(lambda r: r['ttft_ms']['p50']):.0f} | {middle(lambda r: r['ttft_ms']['p99']):.0f} | "
        f"{middle(lambda r: r['itl_ms']['p99']):.2f} |"
    )


def speed(requests: int, groups: int) -> dict:
    """Half of the groups prefill, half decode, in four pools each; the load keeps them two thirds busy."""
    profile = builtin_profile(36, on_cuda=True)
    each = max(1, groups // 8)
    names = [f"{role}:{layout}:{each}" for role, layout in (
        ("prefill", "tp1:fp8"), ("prefill", "tp2:fp8"), ("prefill", "tp4ep4:fp8"), ("prefill", "tp8ep8:fp8"),
        ("decode", "tp1:mxfp4"), ("decode", "tp2:mxfp4"), ("decode", "tp4ep4:mxfp4"), ("decode", "tp8ep8:mxfp4"))]  # fmt: skip
    simulation = Simulation(profile, plans_of_names(names, profile, 3.0), SimSettings(aim=Aim(0.5), noise=0.05))
    load = random_load(requests, 2.5 * groups, Lengths(8000, 0.6), Lengths(300, 0.5), seed=1)
    began, cpu = time.perf_counter(), time.process_time()
    summary = simulation.run(load).summary()
    cpu_s = time.process_time() - cpu
    return {
        "requests": requests, "groups": 8 * each, "cpu_s": cpu_s, "wall_s": time.perf_counter() - began,
        "us_per_request": cpu_s / requests * 1e6, "simulated_s": float(load.at_s[-1]), "finished": summary.finished,
        "utilisation": summary.utilisation,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["compare", "speed"])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "speed":
        result: dict = speed(args.requests, args.groups)
        print(json.dumps(result, indent=1))
    else:
        records = compare(args.requests, args.seeds)
        print(markdown(records))
        result = {"ttft_slo_ms": TTFT_SLO_MS, "itl_slo_ms": ITL_SLO_MS, "records": records}
    if args.out is not None:
        args.out.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()} | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
