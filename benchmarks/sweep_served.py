"""`tandem sweep` on two GPUs: prefill groups in FP8 on one, decode groups in MXFP4 on the other, shapes of 20b, as they are served.

    python -m benchmarks.sweep_served --out FOLDER [--layers 24]        two GPUs
    python -m benchmarks.sweep_served --out FOLDER --one-gpu             one: the groups share it, and only the one that is measured works
    python -m benchmarks.sweep_served --out FOLDER --device cpu          a tiny model, no GPU

The checkpoint is random, made in FOLDER if it is not there, and made so that tokens spread over the experts: random layers of the usual
kind drown a token's embedding in what they add, and then every token takes the same experts. Here layers add little, and the router sees
the token.

Cells that do not fit are told with their reason. If a group ends, its ranks' logs are kept in FOLDER as profile.json.GROUP-rRANK.err, the
other cells are measured, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.transfer_served import ON_CPU, ON_CUDA, Progress, Settings, random_checkpoint, shapes_of_20b
from cluster.up import bring_up, take_down
from common.config import Config, parse_config
from model.config import ModelConfig
from model.convert import convert_checkpoint
from model.fixture import fixture_config

NAME = "sweep-served"
KV_BLOCKS = {"cpu": (1024, 1024), "one": (3_000, 75_000)}  # of prefill and decode; where each has its GPU, they follow its memory
QUIET_SCALES = (112, 115)  # 2^-15 to 2^-13: experts add a hundredth of the stream
SPREADS = {"embed_tokens": 1.0, "bias": 0.01, "o_proj": 0.002}


def tiny_shapes() -> ModelConfig:
    """All of a model's parts in milliseconds on a CPU; 32 experts, so that there is something to spread over."""
    return fixture_config(num_layers=4, vocab_size=1024, hidden_size=128, intermediate_size=64, num_experts=32)


def sweep_config(path: Path, device: str, settings: Settings, max_batch: int, kv_blocks: tuple[int, int] | None, longest: int) -> Config:
    decode = {"name": "decode", "role": "decode", "weights": settings["weights"]["decode"], "max_batch": max_batch}
    prefill = {"name": "prefill", "role": "prefill", "weights": settings["weights"]["prefill"]}
    if kv_blocks is not None:
        prefill["kv_blocks"], decode["kv_blocks"] = kv_blocks
    tree = {
        "model": {"path": str(path), "max_model_len": longest},
        "pools": [prefill, decode],
        "kv": {"dtype": settings["kv_dtype"]},
        "router": {"listen": "127.0.0.1:0"},
        "autoscale": {"mode": "off"},
        "cluster": {"device": device, "compute_dtype": "float32", "start_timeout_s": 400},
    }
    return parse_config(tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint, state and profile")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--one-gpu", action="store_true", help="both groups on the first GPU")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--prefill-tokens", default="1024,8192,32768")
    parser.add_argument("--batches", default="1,8,16,32,64,128")
    parser.add_argument("--contexts", default="1024,8192,32768")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    folder, on_cuda, began = arguments.out, arguments.device == "cuda", time.monotonic()
    settings = ON_CUDA if on_cuda else ON_CPU
    path = folder / f"quiet-{arguments.layers if on_cuda else 'tiny'}"
    if not path.exists():
        shapes = shapes_of_20b(arguments.layers) if on_cuda else tiny_shapes()
        random_checkpoint(path, shapes, "cuda" if on_cuda else "cpu", scales=QUIET_SCALES, spreads=SPREADS)
        if on_cuda:
            convert_checkpoint(path, device="cuda")
            torch.cuda.empty_cache()
    print(f"checkpoint: {time.monotonic() - began:.0f} s", flush=True)
    os.environ["TANDEM_STATE_DIR"] = str(folder.resolve() / "state")
    if arguments.one_gpu:  # Ray counts two, and hides none from anybody
        os.environ |= {"RAY_OVERRIDE_RESOURCES": '{"GPU": 2}', "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    kv_blocks = KV_BLOCKS.get("one" if arguments.one_gpu else arguments.device)
    longest = 40_000 if on_cuda else 2048
    max_batch = max(int(batch) for batch in arguments.batches.split(","))
    try:
        bring_up(sweep_config(path, arguments.device, settings, max_batch, kv_blocks, longest), NAME, Progress(began))
        print(f"cluster up: {time.monotonic() - began:.0f} s", flush=True)
        command = [
            sys.executable, "-m", "cluster.cli", "sweep", "--name", NAME, "--out", str(folder / "profile.json"),
            "--steps", str(arguments.steps), "--hardware", "H200" if on_cuda else "CPU", "--prefill-tokens", arguments.prefill_tokens,
            "--batches", arguments.batches, "--contexts", arguments.contexts,
        ]  # fmt: skip
        swept = subprocess.run(command, timeout=500)
        print(f"swept: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        take_down(NAME)
    sys.exit(swept.returncode)


if __name__ == "__main__":
    main()
