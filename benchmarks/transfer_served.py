"""End to end through Ray on two GPUs: prefill on one, decode on the other, 64 requests at once; tokens against a colocated run.

    python -m benchmarks.transfer_served --out FOLDER [--layers 24] [--requests 64] [--transport auto]      two GPUs, shapes of 20b
    python -m benchmarks.transfer_served --out FOLDER --device cpu                                           a tiny model, no GPU

Random weights in the official checkpoint layout, made in FOLDER if they are not there. They make a model that amplifies the least
difference of rounding (docs/performance-transfer.md), so tokens can only be compared where every step rounds alike: a decode step does so
up to 16 rows, whatever is in them, which is why the pool has 16 and the others wait. Then the served tokens are the colocated run's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from cluster.bench.measure import Sample, summarize
from cluster.up import bring_up, take_down
from common.config import Config, parse_config
from common.metric_catalog import TRANSFER_BYTES
from common.proto import router_pb2, router_pb2_grpc, types_pb2
from model.checkpoint import hf_specs
from model.config import ModelConfig
from model.convert import convert_checkpoint
from model.fixture import fixture_config, write_checkpoint, write_random_fixture

NAME, ROWS = "transfer-served", 16
PROMPT_TOKENS = (64, 1500)
SCALES = (120, 123)  # 2^-7 to 2^-5, as real checkpoints have
Settings = dict[str, Any]

ON_CUDA: Settings = {"weights": {"prefill": "fp8", "decode": "mxfp4"}, "kv_dtype": "bfloat16"}
ON_CPU: Settings = {"weights": {"prefill": "mxfp4", "decode": "mxfp4"}, "kv_dtype": "float32"}


def shapes_of_20b(num_layers: int) -> ModelConfig:
    size = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_experts": 32}
    return fixture_config(num_layers=num_layers, num_qo_heads=64, num_kv_heads=8, **size)


def random_checkpoint(
    folder: Path, config: ModelConfig, device: str, *, scales: tuple[int, int] = SCALES, spreads: dict[str, float] | None = None
) -> None:
    """Random bytes for 4-bit weights, normal numbers for the rest, drawn on the device.

    Units: scales: bytes of 4-bit weights, 127 for 1; spreads: standard deviation by a part of the tensor's name, first match, else 0.02
    Effects: one file per layer in `folder`
    """
    named = {"norm": 0.1, "bias": 0.1} if spreads is None else {"norm": 0.1} | spreads
    generator = torch.Generator(device).manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in hf_specs(config).items():
        if name.endswith(("_blocks", "_scales")):
            low, high = scales if name.endswith("_scales") else (0, 256)
            tensor = torch.randint(low, high, spec.shape, generator=generator, dtype=torch.uint8, device=device)
        else:
            spread = next((value for part, value in named.items() if part in name), 0.02)
            tensor = (torch.randn(spec.shape, generator=generator, device=device) * spread + ("norm" in name)).bfloat16()
        tensors[name] = tensor.cpu()
    write_checkpoint(folder, config, tensors, num_shards=config.num_layers)


def cluster_config(path: Path, device: str, settings: Settings, transport: str, rows: int, requests: int) -> Config:
    pools = [
        {"name": "prefill", "role": "prefill", "weights": settings["weights"]["prefill"], "kv_blocks": 2048},
        {"name": "decode", "role": "decode", "weights": settings["weights"]["decode"], "max_batch": rows, "kv_blocks": 120 * requests},
    ]
    tree = {
        "model": {"path": str(path), "max_model_len": 2048},
        "pools": pools,
        "kv": {"dtype": settings["kv_dtype"], "transport": transport},
        "router": {"listen": "127.0.0.1:0"},
        "autoscale": {"mode": "off"},
        "cluster": {"device": device, "compute_dtype": "float32", "start_timeout_s": 400},
    }
    return parse_config(tree)


async def ask_all(address: str, prompts: list[list[int]], max_tokens: int) -> tuple[list[Sample], list[list[int]], list[float], float]:
    """All at once. Returns: what clients saw, their tokens, the transfers' times in ms by the router, seconds in all"""
    import grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub, loop = router_pb2_grpc.RouterStub(channel), asyncio.get_running_loop()
        transfers: list[float] = []

        async def one(prompt: list[int]) -> tuple[Sample, list[int]]:
            request = router_pb2.GenerateRequest(request_id="served")
            request.tokenized.input_ids.extend(prompt)
            request.sampling_params.max_tokens, request.sampling_params.temperature = max_tokens, 0.0
            request.sampling_params.ignore_eos = True
            sample, tokens = Sample(loop.time(), len(prompt)), []
            try:
                async for response in stub.Generate(request, timeout=300):
                    if response.HasField("chunk"):
                        tokens.extend(response.chunk.token_ids)
                        sample.arrivals.append((loop.time(), len(response.chunk.token_ids)))
                    else:
                        transfers.append(response.complete.route.actual.transfer_ms)
            except grpc.aio.AioRpcError as exc:
                sample.error = f"{exc.code().name}: {exc.details()}"
            sample.ended_s = loop.time()
            return sample, tokens

        began = loop.time()
        answers = await asyncio.gather(*map(one, prompts))
        return [sample for sample, _ in answers], [tokens for _, tokens in answers], transfers, loop.time() - began


async def transports_of(address: str) -> dict[str, float]:
    """Returns: bytes that prefill groups have sent, by transport"""
    import grpc

    async with grpc.aio.insecure_channel(address) as channel:
        groups = (await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest())).groups
    found: dict[str, float] = {}
    for group in groups:
        if group.description.role == types_pb2.ROLE_PREFILL:
            page = await asyncio.to_thread(urllib.request.urlopen, f"http://{group.description.metrics_address}/metrics", None, 10)
            for family in text_string_to_metric_families(page.read().decode()):
                for sample in family.samples:
                    if sample.name == TRANSFER_BYTES.name:
                        name = sample.labels["transport"]
                        found[name] = found.get(name, 0.0) + sample.value
    return found


def colocated(
    folder: Path, path: Path, device: str, settings: Settings, prompts: list[list[int]], max_tokens: int, rows: int
) -> list[list[int]]:
    """Returns: what the colocated run answers, as many prompts in a step as the pool has rows"""
    plan, out = folder / "colocated-plan.json", folder / "colocated.json"
    about = {"path": str(path), "device": device, "prompts": prompts, "max_tokens": max_tokens, "rows": rows}
    plan.write_text(json.dumps(about | settings))
    command = [sys.executable, "-m", "benchmarks.transfer_served_reference", str(plan), str(out)]
    subprocess.run(command, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"}, timeout=500)
    return json.loads(out.read_text())


def differing(left: list[list[int]], right: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(left, right, strict=True))


class Progress:
    """Prints what groups do when it changes. Units: began: time.monotonic() of the start"""

    def __init__(self, began: float):
        self._began, self._shown = began, set[str]()

    def __call__(self, rows: list[dict]) -> None:
        for line in {f"{row['group'] or row['pool']} {row['state']} {row['error']}" for row in rows} - self._shown:
            print(f"{time.monotonic() - self._began:.0f} s: {line}", flush=True)
            self._shown.add(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=ROWS, help="of the decode pool; above 16, steps of different sizes round differently")
    parser.add_argument("--transport", default="auto")
    arguments = parser.parse_args()
    device, folder, began = arguments.device, arguments.out, time.monotonic()
    settings = ON_CUDA if device == "cuda" else ON_CPU
    path = folder / (f"random-20b-{arguments.layers}" if device == "cuda" else "random-tiny")
    if device == "cuda" and not path.exists():
        random_checkpoint(path, shapes_of_20b(arguments.layers), device)
        convert_checkpoint(path, device=device)
    elif not path.exists():
        write_random_fixture(path, vocab_size=1024)
    print(f"checkpoint: {time.monotonic() - began:.0f} s", flush=True)
    vocab_size = 201088 if device == "cuda" else 1024
    rng = np.random.default_rng(3)
    lengths = rng.integers(*PROMPT_TOKENS, arguments.requests)
    prompts = [rng.integers(100, vocab_size - 1100 if device == "cuda" else vocab_size, int(n)).tolist() for n in lengths]
    os.environ["TANDEM_STATE_DIR"] = str(folder.resolve() / "state")
    rounds = {}
    try:
        state = bring_up(
            cluster_config(path, device, settings, arguments.transport, arguments.rows, arguments.requests), NAME, Progress(began)
        )
        print(f"cluster up: {time.monotonic() - began:.0f} s", flush=True)
        for name in ("cold", "warm"):
            rounds[name] = asyncio.run(ask_all(str(state.router_address), prompts, arguments.max_tokens))
        used = asyncio.run(transports_of(str(state.router_address)))
    finally:
        take_down(NAME)
    expected = colocated(folder, path, device, settings, prompts, arguments.max_tokens, arguments.rows)
    print(f"colocated run: {time.monotonic() - began:.0f} s", flush=True)
    record: dict[str, Any] = {"device": device, "layers": arguments.layers, "transport": arguments.transport, "rows": arguments.rows}
    record["bytes_by_transport"] = used
    print(f"KV went over {', '.join(f'{name}: {nbytes / 1e6:.0f} MB' for name, nbytes in used.items()) or 'nothing'}")
    for name, (samples, tokens, transfers, seconds) in rounds.items():
        record[name] = summarize(samples, seconds, {})
        record[name]["tokens_differ"] = differing(tokens, expected)
        record[name]["transfer_ms_median"] = float(np.median(transfers)) if transfers else None
        print_round(name, record[name])
    (folder / "transfer_served.json").write_text(json.dumps(record, indent=1) + "\n")


def print_round(name: str, figures: dict[str, Any]) -> None:
    ttft, itl = (", ".join(f"{what} {value:.2f}" for what, value in figures[key].items()) for key in ("ttft_ms", "itl_ms"))
    answered = f"{figures['completed']} answered, {figures['failed']} failed {figures['errors'] or ''}"
    print(f"{name}: {answered}; {figures['tokens_differ']} differ from the colocated run")
    print(f"  TTFT ms {ttft}; ITL ms {itl}; transfer {figures['transfer_ms_median']} ms (median)")


if __name__ == "__main__":
    main()
