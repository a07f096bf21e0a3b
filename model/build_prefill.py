"""Builds the CUDA prefill forward of one rank from its spec: weights, forward pass, graphs. Called by `model/build.py` for device cuda."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch

from common.errors import ConfigError, NotSupportedError
from common.rank_spec import RankSpec
from kernels.peers import PeerLayout, Peers
from model.config import ModelConfig, check_layout, load_model_config
from model.device_group import COLLECTIVE_TIMEOUT_S
from model.kv_cache import KVCache
from model.parallel import ParallelGroup
from model.peer_memory import open_peers
from model.prefill_cuda import CudaPrefill
from model.prefill_graph import GraphedPrefill
from model.prefill_weights import SERVED_PROJECTIONS, Projections, prepare_prefill_weights
from model.weights import load_shard

logger = logging.getLogger(__name__)
HEAD_DIM = 64
MOST_ROWS_AT_ONCE = 8192  # of a sum: room for two halves of them from each rank


def build_prefill_cuda(
    spec: RankSpec, group: ParallelGroup, *, projections: Projections = SERVED_PROJECTIONS
) -> tuple[ModelConfig, CudaPrefill]:
    """Reads this rank's weights and makes its forward pass, which serves as it is; `warm_prefill_cuda` adds graphs and warms it.

    Units: projections: "fp8" is faster than the default
    Effects: device memory holds the shard, and one layer twice
    Raises: ConfigError if checkpoint, layout or weight format can't be served; NotSupportedError for heads of another
        size than the attention is checked on
    """
    if spec.weights != "fp8":
        raise ConfigError(f"a prefill pool on cuda got weights {spec.weights!r}; run `tandem convert` and set them to fp8")
    path = Path(spec.model_path)
    config = load_model_config(path)
    check_layout(config, spec.tp, spec.ep)
    if config.head_dim != HEAD_DIM:
        raise NotSupportedError(
            f"a prefill pool on cuda for heads of {config.head_dim}: its attention is checked for {HEAD_DIM}; use device cpu"
        )
    shard = load_shard(
        path, config, tp=spec.tp, ep=spec.ep, rank=spec.rank, device=spec.device, dtype=torch.bfloat16, weights=spec.weights, packed=True
    )  # fmt: skip
    layers = deque(shard.layers)
    weights = prepare_prefill_weights(config, replace(shard, layers=()), spec.device, projections=projections, layers=layers)
    return config, CudaPrefill(
        config, weights, group, block_size=spec.block_size, device=spec.device, max_positions=spec.max_model_len,
        peers=_peers(spec, group, config),
    )  # fmt: skip


def _peers(spec: RankSpec, group: ParallelGroup, config: ModelConfig) -> Peers | None:
    """Two GPUs add up over each other's memory, which beats NCCL; in larger groups each rank would send its part to too many."""
    if group.size != 2 or spec.device != "cuda":
        return None
    rows = min(spec.chunk_tokens, spec.max_model_len, MOST_ROWS_AT_ONCE)
    status = torch.zeros(1, dtype=torch.int32, device=spec.device)
    try:
        return open_peers(
            group, PeerLayout(group.size, rows, config.hidden_size, 0), status, timeout_s=COLLECTIVE_TIMEOUT_S, exchange=spec.device
        )  # fmt: skip
    except NotSupportedError as exc:
        logger.warning("sums of the prefill group go over NCCL, which is slower: %s", exc.message)
        return None


def warm_prefill_cuda(prefill: CudaPrefill, kv: KVCache, *, chunk_tokens: int) -> GraphedPrefill:
    """Compiles, warms and captures; to be called once the rank has its cache and before it takes requests, on every rank."""
    return GraphedPrefill(prefill, kv, chunk_tokens=chunk_tokens)
