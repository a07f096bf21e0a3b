"""The one place where a rank's forward pass is chosen and built from its spec. Called by both workers' ranks when they start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import ConfigError, NotSupportedError
from common.rank_spec import RankSpec
from model.build_decode import build_decode_cuda, decode_step_bytes, open_decode_cuda
from model.build_prefill import build_prefill_cuda, warm_prefill_cuda
from model.config import ModelConfig, check_layout, load_model_config
from model.decode_step import DecodeStep, Forward, PlainDecodeStep
from model.gpt_oss import GptOss
from model.kv_cache import KVCache
from model.parallel import ParallelGroup
from model.weights import load_shard

TORCH_DTYPE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class BuiltModel:
    """`warm`, if set, compiles and captures for the rank's own pools, together with the other ranks, and gives the forward pass to use;
    `decode` does the same for a decode step that is no forward pass with sampling behind it. `step_bytes`: device memory that they take.
    `check`, if set, waits for the device and raises WorkerLost if passes so far are void for want of a rank."""

    config: ModelConfig
    model: Forward | None
    warm: Callable[[KVCache], Forward] | None = None
    decode: Callable[[KVCache], DecodeStep] | None = None
    step_bytes: int = 0
    check: Callable[[], None] | None = None

    def ready(self, kv: KVCache) -> Forward:
        """The forward pass to serve with. Every rank calls it once, when its pools exist and before it takes requests."""
        model = self.warm(kv) if self.warm is not None else self.model
        assert model is not None  # what has a decode step alone is built for decode pools alone
        return model

    def decode_step(self, kv: KVCache, device: str) -> DecodeStep:
        """The same for a decode pool: the device's own step, or that of the forward pass."""
        return self.decode(kv) if self.decode is not None else PlainDecodeStep(self.ready(kv), kv, device)


BuildModel = Callable[[RankSpec, ParallelGroup], BuiltModel]


def build_model(spec: RankSpec, group: ParallelGroup) -> BuiltModel:
    """Reads this rank's weights and joins them with the forward pass of its device.

    Raises: ConfigError if checkpoint or layout can't be served; NotSupportedError for a device without a forward pass
    """
    if spec.device == "cuda" and spec.kv_dtype != "bfloat16":
        raise ConfigError(f"kv dtype {spec.kv_dtype!r} on cuda; the kernels take bfloat16")
    if spec.device == "cuda" and spec.role == "prefill":
        config, prefill = build_prefill_cuda(spec, group)
        return BuiltModel(
            config, prefill, warm=lambda kv: warm_prefill_cuda(prefill, kv, chunk_tokens=spec.chunk_tokens), check=prefill.check_ranks
        )
    if spec.device == "cuda" and spec.role == "decode":
        config, packed = build_decode_cuda(spec, group)
        return BuiltModel(
            config,
            None,
            decode=lambda kv: open_decode_cuda(spec, group, config, packed, kv),
            step_bytes=decode_step_bytes(spec, group, config, packed),
        )
    if spec.device != "cpu":
        raise NotSupportedError(f"a {spec.role} pool on {spec.device}: the forward pass exists for cpu")
    if spec.compute_dtype not in TORCH_DTYPE:
        raise ConfigError(f"compute dtype {spec.compute_dtype!r}; expected one of {sorted(TORCH_DTYPE)}")
    path = Path(spec.model_path)
    config = load_model_config(path)
    check_layout(config, spec.tp, spec.ep)
    weights = load_shard(
        path,
        config,
        tp=spec.tp,
        ep=spec.ep,
        rank=spec.rank,
        device=spec.device,
        dtype=TORCH_DTYPE[spec.compute_dtype],
        weights=spec.weights,
    )
    return BuiltModel(config, GptOss(config, weights, group, spec.device))
