"""Fault runs against a whole cluster on this machine, every answer checked: real router, controller, Ray actors, sockets and shared memory.

    python -m benchmarks.faults kill --size 5000        [--nightly for the large size, --out FILE to record the figures]

The ranks run the fake model of tests/support, whose tokens are a hash of the KV that they hold: a wrong block gives a wrong token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults.head import run_head
from benchmarks.faults.overload import run_overload, run_slow
from benchmarks.faults.routers import run_router
from benchmarks.faults.soak import run_soak
from benchmarks.faults.storms import run_cancel, run_kill, run_messages

RUNS = {  # name: (run, size in CI, nightly size)
    "kill": (run_kill, 5_000, 100_000),
    "cancel": (run_cancel, 5_000, 20_000),
    "messages": (run_messages, 5_000, 20_000),
    "overload": (run_overload, 60, 600),
    "slow": (run_slow, 50, 200),
    "router": (run_router, 5, 50),
    "head": (run_head, 3, 50),
    "soak": (run_soak, 600, 21_600),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--size", type=int, help="requests, seconds (overload, soak), clients (slow) or kills (router, head)")
    parser.add_argument("--nightly", action="store_true", help="the large size")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file of results; this run's entry is replaced")
    options = parser.parse_args()
    run, small, large = RUNS[options.run]
    size = options.size or (large if options.nightly else small)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-faults-") as folder:
        result = run(Path(folder), size, options.seed)
    figures = {"size": size, "took_s": round(time.monotonic() - began, 1), "load_average": round(os.getloadavg()[1], 1), **result.figures}
    print(json.dumps(figures, indent=1))
    for miss in result.misses:
        print(f"MISSED: {miss}")
    if options.out is not None:
        known = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps({**known, options.run: {**figures, "missed": result.misses}}, indent=1) + "\n")
    return 1 if result.misses else 0


if __name__ == "__main__":
    sys.exit(main())
