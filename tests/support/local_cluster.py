"""A real local cluster for tests: Ray, controller, two prefill pools, one decode pool of four ranks, the router's own process.

Started once per session; a test that breaks it starts its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from cluster.state import ClusterState
from common.config import Config, parse_config
from common.proto import router_pb2, router_pb2_grpc
from tests.support.pace import within

VOCAB_SIZE = 1024
COMMAND_S = 300.0


@dataclass(frozen=True)
class LocalCluster:
    name: str
    router: str
    checkpoint: Path
    config: Config
    metrics: str  # host:port of the controller's
    state: ClusterState


def cluster_config(checkpoint: Path, **changes) -> Config:
    tree = {
        "model": {"path": str(checkpoint), "max_model_len": 2048},
        "pools": [
            {"name": "prefill-tp1", "role": "prefill", "layout": {"tp": 1}, "chunk_tokens": 256, "kv_blocks": 512},
            {"name": "prefill-tp2", "role": "prefill", "layout": {"tp": 2}, "chunk_tokens": 256, "kv_blocks": 512},
            {"name": "decode-ep4", "role": "decode", "layout": {"tp": 4, "ep": 4}, "max_batch": 64, "kv_blocks": 4096},
        ],
        "kv": {"dtype": "float32"},
        "router": {"listen": "127.0.0.1:0"},
        "cluster": {"device": "cpu", "compute_dtype": "float32"},
    }
    return parse_config(tree | changes)


@contextmanager
def running_cluster(name: str, folder: Path, config: Config):
    """Up and down by the command in processes of its own: any number of clusters, and of Rays, beside one another.

    Raises: AssertionError with what the command said; always takes down what it started
    """
    file = folder / "config.json"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(config.model_dump_json())
    try:
        _tandem(folder, "up", "--name", name, "--config", str(file))
        state = ClusterState.model_validate_json((folder / name / "state.json").read_text())
        yield LocalCluster(name, str(state.router_address), config.model.path, config, str(state.metrics_address), state)
    finally:
        if (folder / name / "state.json").exists():
            _tandem(folder, "down", "--name", name)


def _tandem(folder: Path, *args: str) -> None:
    environment = {**os.environ, "TANDEM_STATE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-m", "cluster.cli", *args], env=environment, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, f"tandem {args[0]}: {done.stdout}{done.stderr}"


def request(prompt: list[int], **sampling) -> router_pb2.GenerateRequest:
    """Greedy unless told otherwise, and deaf to stop tokens, which a small vocabulary does not have."""
    message = router_pb2.GenerateRequest(request_id=f"test-{prompt[:3]}")
    message.tokenized.input_ids.extend(prompt)
    for name, value in {"temperature": 0.0, "ignore_eos": True, **sampling}.items():
        setattr(message.sampling_params, name, value)
    return message


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list
    complete: router_pb2.GenerateComplete | None


async def ask(stub: router_pb2_grpc.RouterStub, message: router_pb2.GenerateRequest, timeout_s: float = 60.0) -> Answer:
    """Collects one answer and checks that token indices leave no gap.

    Raises: grpc.aio.AioRpcError
    """
    answer = Answer([], [], None)
    async for response in stub.Generate(message, timeout=timeout_s):
        assert answer.complete is None, "something came after the end"
        if response.HasField("chunk"):
            assert response.chunk.first_token_index == len(answer.tokens)
            answer.tokens.extend(response.chunk.token_ids)
            answer.logprobs.extend(response.chunk.logprobs)
        else:
            answer.complete = response.complete
    assert answer.complete is not None, "the stream ended without an answer"
    return answer


async def wait_idle(stub: router_pb2_grpc.RouterStub, timeout_s: float) -> float:
    """Waits until every group has all of its blocks back and nothing runs. Returns: seconds it took

    Raises: AssertionError with the loads if it takes longer
    """
    started = time.monotonic()
    while True:
        loads = await stub.GetLoads(router_pb2.GetLoadsRequest())
        busy = [
            g.description.group
            for g in loads.groups
            if g.load.running or g.load.waiting or g.load.transfers
            or g.load.free_full_blocks != g.load.total_full_blocks or g.load.free_sliding_blocks != g.load.total_sliding_blocks
        ]  # fmt: skip
        if not busy and loads.running_requests == 0:
            return time.monotonic() - started
        assert time.monotonic() - started < within(timeout_s), f"not idle after {timeout_s} s: {loads}"
        await asyncio.sleep(0.05)


def channel_of(cluster: LocalCluster) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(cluster.router)
