"""Builds the CUDA decode step of one rank from its spec: weights, packed layer by layer; buffers and graphs once the KV exists.

Called by `model/build.py` for decode pools on device cuda.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import torch

from common.errors import ConfigError, NotSupportedError
from common.rank_spec import RankSpec
from model.config import ModelConfig, check_layout, load_model_config
from model.decode_cuda import CudaDecode, DecodeWeights, pack_weights
from model.decode_step_cuda import CudaDecodeStep
from model.kv_cache import KVCache
from model.parallel import ParallelGroup
from model.weights import load_shard


def build_decode_cuda(spec: RankSpec, group: ParallelGroup) -> tuple[ModelConfig, DecodeWeights]:
    """Reads and packs this rank's weights.

    Effects: device memory holds the shard, and one layer twice
    Raises: ConfigError if checkpoint, layout or weight format can't be served; NotSupportedError for more than one rank
    """
    if spec.weights != "mxfp4":
        raise ConfigError(f"a decode pool on cuda got weights {spec.weights!r}; its kernels take mxfp4")
    if group.size > 1:
        raise NotSupportedError(f"a decode group of {group.size} ranks on cuda: one rank is served so far")
    path = Path(spec.model_path)
    config = load_model_config(path)
    check_layout(config, spec.tp, spec.ep)
    shard = load_shard(path, config, tp=spec.tp, ep=spec.ep, rank=spec.rank, device=spec.device, dtype=torch.bfloat16, weights=spec.weights)
    layers = deque(shard.layers)
    return config, pack_weights(replace(shard, layers=()), layers)


def open_decode_cuda(spec: RankSpec, config: ModelConfig, weights: DecodeWeights, kv: KVCache) -> CudaDecodeStep:
    """Compiles, makes the step's buffers and records its graphs; to be called before the rank takes requests."""
    longest = min(spec.max_model_len, config.max_position)
    decode = CudaDecode(config, weights, kv, max_batch=spec.max_batch, max_positions=longest, device=spec.device)
    step = CudaDecodeStep(decode, spec.max_batch)
    step.capture()
    return step
