"""Choices of pools per second on one core: whole plans, with and without the changes of state that they bring about.

    python -m benchmarks.choices --out benchmarks/results/choices.json

CPU seconds of this process count, so that other work on the machine matters less; each case runs several times, median and best are told.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections import deque
from pathlib import Path

from cluster.cost_model import PoolSpec, Shape
from cluster.profile import builtin_profile
from cluster.router.chooser import Chooser, Objective
from cluster.router.pool import PoolSet
from common.kv_layout import KVGeometry
from tests.support.still_groups import add_decode, add_prefill

KV_120B = KVGeometry(36, 8, 64, 16, "bfloat16", 128, (True, False) * 18)
CASES = ((1, 16), (4, 4), (16, 1), (16, 16))  # pools of each role, groups in each


def measure_choices(pools: int, groups: int, seconds: float) -> dict:
    """Whole plans per CPU second among `pools` pools of each role with `groups` groups each. Requests differ in length. Every plan is
    carried out, so that the next one sees another state; 8 requests per group are on their way at any time."""
    profile, found = builtin_profile(36, on_cuda=True), PoolSet()
    for i in range(pools):
        tp = (1, 2, 4, 8)[i % 4]
        add_prefill(found, PoolSpec(f"p{i}", tp=tp, ep=tp, weights="fp8"), profile, groups)
        add_decode(found, PoolSpec(f"d{i}", tp=tp, ep=tp, capacity_tokens=1 << 20, kv=KV_120B), profile, groups)
    chooser = Chooser(found, profile, Objective(), seed=0)
    aim, rng = chooser.aim_of(None, None, None), random.Random(0)
    lengths = [(rng.randint(50, 16_000), rng.randint(2, 800)) for _ in range(997)]
    shapes = [Shape(prompt, output, prompt + output) for prompt, output in lengths]
    running: deque[tuple] = deque()
    planning, began, count, now_s = 0.0, time.process_time(), 0, 0.0
    while time.process_time() - began < seconds:
        now_s, count = now_s + 1e-4, count + 1
        shape = shapes[count % len(shapes)]
        before = time.process_time()
        decision = chooser.plan(shape, aim, now_s, number=count)
        planning += time.process_time() - before
        prefill, decode = found.prefill[decision.prefill_pool.name], found.decode[decision.decode_pool.name]
        giver, taker = prefill.order.first(), next(decode.by_room(shape.worst, decision.seed))
        giver.book.give(count, decision.prefill_ms, now_s)
        taker.book.attach(count, shape.prompt)
        running.append((count, prefill, giver, decode, taker))
        done = [running.popleft()] if len(running) > 8 * pools * groups else []
        for number, _, giver, _, taker in done:
            giver.book.take_back(number, now_s)
            taker.book.detach(number)
        for _, prefill, giver, decode, taker in (running[-1], *done):
            prefill.refresh(giver)
            decode.refresh(taker)
    return {
        "pools": pools,
        "groups_per_pool": groups,
        "plans_per_s": count / planning,
        "with_bookkeeping_per_s": count / (time.process_time() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of CPU time, per run")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = [[measure_choices(pools, groups, args.seconds) for pools, groups in CASES] for _ in range(args.runs)]
    records = []
    for case in zip(*runs, strict=True):
        record = {"pools": case[0]["pools"], "groups_per_pool": case[0]["groups_per_pool"]}
        for key in ("plans_per_s", "with_bookkeeping_per_s"):
            values = [one[key] for one in case]
            record |= {key: statistics.median(values), f"best_{key}": max(values)}
        records.append(record)
        print(
            f"{record['pools']} x {record['pools']} pools of {record['groups_per_pool']} groups: {record['plans_per_s']:.0f} plans/s "
            f"(best {record['best_plans_per_s']:.0f}), {record['with_bookkeeping_per_s']:.0f}/s with the state that they change "
            f"(best {record['best_with_bookkeeping_per_s']:.0f})"
        )
    if args.out is not None:
        facts = {
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        }
        args.out.write_text(json.dumps(facts | {"runs": args.runs, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
