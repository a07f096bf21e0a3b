"""`python -m frontend`: the HTTP frontend as a process of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.logs import configure_logging
from frontend.harmony.format import HarmonyFormat
from frontend.server import serve
from frontend.settings import FrontendSettings
from frontend.vocab import load_vocabulary


def main() -> int:
    """Exit status: 0 after a clean end, 2 for a wrong setting."""
    options = argparse.ArgumentParser(prog="python -m frontend", description="OpenAI-compatible HTTP in front of a Tandem router")
    options.add_argument("--router", default="127.0.0.1:50051", help="host:port of the router")
    options.add_argument("--listen", default="127.0.0.1:8000", help="host:port to serve HTTP on")
    options.add_argument("--metrics-listen", default="127.0.0.1:0", help="host:port to serve /metrics on; port 0 = any free one")
    options.add_argument("--vocab", type=Path, help="folder with o200k_base.tiktoken")
    options.add_argument("--keys-file", type=Path, help="YAML list of API keys; default: TANDEM_API_KEYS, else open")
    options.add_argument("--model-name", action="append", default=[], help="name that requests may give; repeatable")
    options.add_argument("--drain-s", type=float, default=120.0, help="how long running replies may go on at the end [s]")
    chosen = options.parse_args()
    configure_logging(role="frontend")
    try:
        settings = FrontendSettings(
            router=chosen.router,
            **_address(chosen.listen, ""),
            **_address(chosen.metrics_listen, "metrics_"),
            vocab_dir=chosen.vocab,
            keys_file=chosen.keys_file,
            model_names=tuple(chosen.model_name),
            drain_s=chosen.drain_s,
        )
        serve(settings, HarmonyFormat(load_vocabulary(settings.vocab_dir), settings.limits))
    except ConfigError as exc:
        sys.stderr.write(f"frontend: {exc}\n")
        return 2
    return 0


def _address(listen: str, prefix: str) -> dict[str, Any]:
    host, _, port = listen.rpartition(":")
    return {f"{prefix}host": host or "127.0.0.1", f"{prefix}port": int(port) if port.isdecimal() else -1}


if __name__ == "__main__":
    sys.exit(main())
