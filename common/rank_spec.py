"""What one rank process is told when it starts: plain values, so that Ray and multiprocessing can carry it.

Made by `cluster/specs.py` from the config tree; read by `prefill_worker/rank.py` and `decode_worker/rank.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.tracing import TracingSpec
from common.wire import Security

# Formats that the experts of a pool on GPUs may have; a CPU takes all of them.
CUDA_WEIGHTS = {"prefill": ("fp8",), "decode": ("mxfp4", "fp8")}


@dataclass(frozen=True)
class RankSpec:
    """One rank of one group. All ranks of a group differ in `rank` and `listen_host` alone.

    `rendezvous`: host:port of the group's TCPStore, on rank 0's host; unused with tp 1. `incarnation`: random at each start of the
    group. `key`: the cluster's secret at the group's start; `security` says also where it is kept, if in a file that may change.
    `kv_blocks` None: as many full-layer blocks as memory allows. `metrics_port`: rank 0 takes this one or one of the next, any free
    one if 0.
    `kv_version`: names the weights and the KV format; groups of different ones never exchange KV.
    """

    pool: str
    group: str
    role: Literal["prefill", "decode"]
    model_path: str
    tp: int
    ep: int
    rank: int
    rendezvous: str
    incarnation: int
    key: bytes = field(repr=False)
    block_size: int = 16
    kv_dtype: str = "bfloat16"
    kv_blocks: int | None = None
    max_batch: int = 128
    chunk_tokens: int = 8192
    max_model_len: int = 131072
    transport: str = "auto"
    lease_s: float = 10.0
    router_lease_s: float = 3.0
    device: str = "cpu"
    compute_dtype: str = "float32"
    weights: Literal["mxfp4", "fp8", "bf16"] = "mxfp4"
    listen_host: str = "127.0.0.1"
    vocab: str | None = None
    security: Security = field(default_factory=Security)
    tracing: TracingSpec | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    kv_version: str = ""
