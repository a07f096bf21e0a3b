"""What a node of a pool needs before its ranks start: the checkpoint, its FP8 shards, compiled kernels. `tandem prepare` runs it.

Owns no state: each step looks whether it is done already. Several nodes may prepare the same shared folder at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.config import Config, PoolNode
from common.errors import ConfigError, UnsupportedArch

RETRY_S = 5.0


@dataclass(frozen=True)
class Step:
    """`what` says what a pod that stands at this step waits for. `run` returns what it found or did."""

    what: str
    run: Callable[[], str]


def pool_of(config: Config, name: str) -> PoolNode:
    """Raises: ConfigError naming the pools there are"""
    for pool in config.pools:
        if pool.name == name:
            return pool
    raise ConfigError(f"no pool {name!r}; there are {[pool.name for pool in config.pools]}")


def steps(config: Config, pool: PoolNode) -> list[Step]:
    """In the order in which they must run."""
    path = config.model.path
    needed = [Step(f"the checkpoint in {path}", lambda: _checkpoint(path))]
    if pool.weights == "fp8":
        needed.append(Step(f"FP8 shards beside {path}", lambda: _convert(path)))
    if config.cluster.device != "cpu":
        needed.append(Step("compiled CUDA kernels", _kernels))
        if pool.role == "prefill":
            what = f"kernels of FlashInfer and Triton for TP{pool.layout.tp}"
            needed.append(Step(what, lambda: _prefill_kernels(config, pool)))
    return needed


def prepare(config: Config, pool: PoolNode, say: Callable[[str], None], timeout_s: float) -> None:
    """Runs every step; one that can't be done yet (no checkpoint, another node converts) is tried again until `timeout_s`.

    Effects: `say` gets one line per change: "waits for ..." and what each step came to
    Raises: ConfigError with the step's reason once the time is up
    """
    deadline = time.monotonic() + timeout_s
    for step in steps(config, pool):
        said = ""
        while True:
            try:
                say(f"{step.what}: {step.run()}")
                break
            except ConfigError as exc:
                if time.monotonic() > deadline:
                    raise ConfigError(f"gave up after {timeout_s:.0f} s, still waits for {step.what}: {exc.message}") from exc
                if exc.message != said:
                    said = exc.message
                    say(f"waits for {step.what}: {said}")
                time.sleep(RETRY_S)


def _checkpoint(path: Path) -> str:
    """Raises: ConfigError if it is not whole"""
    from model.checkpoint import open_checkpoint
    from model.config import load_model_config

    open_checkpoint(path, load_model_config(path)).release()
    return "whole"


def _convert(path: Path) -> str:
    """Raises: ConfigError if the folder can't be written or another node converts it"""
    import torch

    from model.convert import convert_checkpoint

    report = convert_checkpoint(path, device="cuda" if torch.cuda.is_available() else "cpu")
    return "there already" if report.reused else f"written, {report.num_bytes:,} bytes"


def _kernels() -> str:
    """Without a compiler this is no failure: the image may carry none, and the ranks say so if they need one."""
    from kernels.cuda_library import NAMES, build_all

    try:
        build_all()
    except UnsupportedArch as exc:
        return f"not built: {exc.message}"
    return f"{len(NAMES)} libraries"


def _prefill_kernels(config: Config, pool: PoolNode) -> str:
    """Decode runs on CUDA kernels of our own alone. Without a GPU here the ranks compile at their start."""
    import torch

    from model.config import load_model_config
    from model.prefill_kernels import compile_prefill_kernels

    if not torch.cuda.is_available():
        return "not compiled: no GPU here"
    started = time.monotonic()
    layout = pool.layout
    compile_prefill_kernels(
        load_model_config(config.model.path), tp=layout.tp, ep=layout.ep, block_size=config.kv.block_size, device="cuda"
    )
    return f"ready after {time.monotonic() - started:.0f} s"
