"""Variants of a decode kernel's source beside the one that is served, in one run on a GPU: the same bits or not, and microseconds a launch.

    python3 -m benchmarks.candidates experts --variant wide=/tmp/wide --variant deep=/tmp/deep --models 20b,120b --batches 16,32,64
    python3 -m benchmarks.candidates attention --variant ring=/tmp/ring --batches 1,32 --contexts 8192,32768

A variant is a folder with those files of `kernels/cuda` that differ. All are built at the same time; then rounds alternate between the
forms, over distinct weights or pools, so that a card that slows down slows all of them. What wins becomes the one form that there is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.decode_kernels import COPY_GBPS, expert_launch, full_case, graph_us
from benchmarks.decode_random import random_weights
from benchmarks.prefill_random import gpt_oss_config
from common.errors import ConfigError
from kernels import cuda_library

SERVED = "served"
LIBRARIES = {"experts": "moe_decode", "attention": "attention_full"}
ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """`launches` all write `out`; `nbytes`: what one of them must move."""

    name: str
    launches: list[Callable[[], None]]
    out: Tensor
    nbytes: float


def overlay(variant: Path, target: Path) -> Path:
    """All kernel sources in `target`, with the variant's files in place of those of the same name. Returns: target

    Raises: ConfigError for a folder that is not there, or that holds a file that no kernel has
    """
    if not variant.is_dir():
        raise ConfigError(f"variant {variant}: no such folder")
    shutil.copytree(cuda_library.SOURCES, target)
    for path in sorted(variant.iterdir()):
        if not (target / path.name).exists():
            raise ConfigError(f"variant {variant}: kernels/cuda has no {path.name}")
        shutil.copy(path, target / path.name)
    return target


def take(sources: Path) -> None:
    """Kernels are loaded from there from now on."""
    cuda_library.SOURCES = sources
    cuda_library.load.cache_clear()


def build(sources: Path, library: str) -> None:
    take(sources)
    cuda_library.build(library)


def expert_cases(models: list[str], batches: list[int]) -> Iterator[Case]:
    for model in models:
        config = gpt_oss_config(model)
        weights = random_weights(config, "mxfp4")
        for batch in batches:
            run, hit, out = expert_launch(config, weights, batch)
            yield Case(f"{model} B={batch}", [partial(run, i) for i in range(len(weights.layers))], out, hit * 270 * 90 * 544)
        del weights
        torch.cuda.empty_cache()


def attention_cases(batches: list[int], contexts: list[int]) -> Iterator[Case]:
    for context in contexts:
        for batch in batches:
            run, (_, out, _, _, _, pools) = full_case(batch, context)
            yield Case(f"B={batch} context {context}", [partial(run, i) for i in range(len(pools))], out, batch * context * 2048)


def compare(case: Case, forms: dict[str, Path]) -> str:
    """One line: the floor, then each form's us in its rounds; * marks outputs that are not the served form's bits."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    outputs = {}
    for _ in range(ROUNDS):
        for name, sources in forms.items():
            take(sources)
            case.launches[0]()
            outputs[name] = case.out.clone()
            times[name].append(graph_us(case.launches))
    same = {name: torch.equal(output, outputs[SERVED]) for name, output in outputs.items()}
    columns = [f"{name}{'' if same[name] else '*'} {' '.join(f'{us:.1f}' for us in rounds)}" for name, rounds in times.items()]
    return f"{case.name:22} floor {case.nbytes / COPY_GBPS / 1e3:6.1f}  " + "  ".join(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", choices=tuple(LIBRARIES))
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=FOLDER", help="may be given several times")
    parser.add_argument("--models", default="20b,120b", help="for experts")
    parser.add_argument("--batches", default="1,8,16,32,64,128")
    parser.add_argument("--contexts", default="8192", help="for attention [tokens]")
    arguments = parser.parse_args()
    batches, contexts = ([int(n) for n in text.split(",")] for text in (arguments.batches, arguments.contexts))
    variants = dict(text.split("=", 1) for text in arguments.variant)
    with tempfile.TemporaryDirectory() as folder:
        forms = {SERVED: cuda_library.SOURCES} | {name: overlay(Path(path), Path(folder) / name) for name, path in variants.items()}
        with multiprocessing.get_context("spawn").Pool(len(forms)) as pool:
            pool.starmap(build, [(sources, LIBRARIES[arguments.kernel]) for sources in forms.values()])
        is_experts = arguments.kernel == "experts"
        cases = expert_cases(arguments.models.split(","), batches) if is_experts else attention_cases(batches, contexts)
        for case in cases:
            print(compare(case, forms), flush=True)


if __name__ == "__main__":
    main()
