"""Builds the CUDA decode step of one rank from its spec: weights, packed layer by layer; buffers and graphs once the KV exists.

Called by `model/build.py` for decode pools on device cuda.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch

from common.errors import ConfigError, NotSupportedError
from common.rank_spec import CUDA_WEIGHTS, RankSpec
from kernels import cuda_library
from kernels.peers import SERVED_RANKS, Peers
from model.config import ModelConfig, check_layout, load_model_config
from model.decode_cuda import CudaDecode, DecodeWeights, pack_weights
from model.decode_memory import peer_layout, step_bytes
from model.decode_step_cuda import CudaDecodeStep
from model.kv_cache import KVCache
from model.parallel import ParallelGroup
from model.peer_memory import open_peers
from model.weights import load_shard

logger = logging.getLogger(__name__)


def build_decode_cuda(spec: RankSpec, group: ParallelGroup) -> tuple[ModelConfig, DecodeWeights]:
    """Reads and packs this rank's weights.

    Effects: device memory holds the shard, and meanwhile one layer twice
    Raises: ConfigError if checkpoint, layout or weight format can't be served; NotSupportedError for a number of ranks that
        the kernels do not take
    """
    if spec.weights not in CUDA_WEIGHTS["decode"]:
        raise ConfigError(f"a decode pool on cuda got weights {spec.weights!r}; its kernels take {' or '.join(CUDA_WEIGHTS['decode'])}")
    if group.size not in SERVED_RANKS:
        raise NotSupportedError(f"a decode group of {group.size} ranks on cuda; {', '.join(map(str, SERVED_RANKS))} are served")
    path = Path(spec.model_path)
    config = load_model_config(path)
    check_layout(config, spec.tp, spec.ep)
    shard = load_shard(
        path, config, tp=spec.tp, ep=spec.ep, rank=spec.rank, device=spec.device, dtype=torch.bfloat16, weights=spec.weights, packed=True
    )  # fmt: skip
    layers = deque(shard.layers)
    weights = pack_weights(replace(shard, layers=()), layers)
    torch.cuda.empty_cache()  # the layer that was there twice is room for KV, which is counted next
    return config, weights


def open_decode_cuda(spec: RankSpec, group: ParallelGroup, config: ModelConfig, weights: DecodeWeights, kv: KVCache) -> CudaDecodeStep:
    """Compiles, makes the step's buffers, maps those of the other ranks and records the graphs; to be called by all ranks of the group,
    before they take requests.

    Raises: as `open_peers`; WorkerLost if a rank does not come along
    """

    def join(status: torch.Tensor) -> Peers:
        return open_peers(group, peer_layout(config, group.size, spec.max_batch), status)

    cuda_library.build_all()
    decode = CudaDecode(
        config,
        weights,
        kv,
        max_batch=spec.max_batch,
        max_positions=min(spec.max_model_len, config.max_position),
        device=spec.device,
        open_peers=join if group.size > 1 else None,
    )
    step = CudaDecodeStep(decode, spec.max_batch)
    group.all_reduce(torch.zeros(1))  # the kernels of a rank that is ready would wait for one that still compiles
    step.capture()
    free_bytes, _ = torch.cuda.mem_get_info(torch.device(spec.device))
    logger.info("decode step captured; %d MiB of device memory are left", free_bytes >> 20)
    return step


def decode_step_bytes(spec: RankSpec, group: ParallelGroup, config: ModelConfig, weights: DecodeWeights) -> int:
    """Device memory that `open_decode_cuda` will take, but for graphs, libraries and the share that grows with the KV pool."""
    longest = min(spec.max_model_len, config.max_position)
    return step_bytes(config, weights, tp=group.size, rank=group.rank, max_batch=spec.max_batch, max_positions=longest)
