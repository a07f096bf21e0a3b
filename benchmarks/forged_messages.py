"""How many of many forged messages are believed: python -m benchmarks.forged_messages --count 100000. Expected: none."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tests.support.forgery import forge


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    started = time.monotonic()
    made, believed = forge(chosen.count, chosen.seed)
    result = {"forged": sum(made.values()), "believed": sum(believed.values()), "by_kind": dict(made)}
    print(json.dumps(result, indent=1), f"{time.monotonic() - started:.1f} s", sep="\n")
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
