"""What is simulated: pools out of a config, or out of short names, and the KV memory that a group of gpt-oss has on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.cost_model import PoolSpec
from cluster.profile import Profile
from cluster.sim.simulation import PoolPlan
from common.config import Config, PoolNode
from common.errors import ConfigError
from common.kv_layout import KVGeometry

GPU_BYTES = {"H200": 141e9}
USABLE = 0.88  # of a GPU's memory: the rest is activations, graphs and the runtime
WEIGHT_BYTES = {"gpt-oss-120b": {"mxfp4": 65e9, "fp8": 121.5e9}, "gpt-oss-20b": {"mxfp4": 14e9, "fp8": 23.1e9}}
LAYERS = {"gpt-oss-120b": 36, "gpt-oss-20b": 24}


def geometry_of(profile: Profile, block_size: int = 16) -> KVGeometry:
    """The KV of the profile's model; of one that is no gpt-oss release, that of the tiny fixture."""
    layers = LAYERS.get(profile.model, 4)
    return KVGeometry(layers, 8, 64, block_size, "bfloat16", 128, (True, False) * (layers // 2))


def capacity_tokens(profile: Profile, tp: int, weights: str) -> int:
    """Tokens of full-layer KV that the GPUs of one group hold beside the weights; 0 = not known for this hardware."""
    gpu_bytes = next((size for name, size in GPU_BYTES.items() if name in profile.hardware.upper()), None)
    if gpu_bytes is None or profile.model not in WEIGHT_BYTES:
        return 0
    kv = geometry_of(profile)
    token_bytes = 2 * kv.num_kv_heads * kv.head_dim * 2 * len(kv.full_layers)
    return max(0, int((USABLE * gpu_bytes * tp - WEIGHT_BYTES[profile.model].get(weights, 240e9)) / token_bytes))


def spec_for(profile: Profile, name: str, tp: int, ep: int, weights: str, usd_per_gpu_hour: float, max_batch: int = 128) -> PoolSpec:
    return PoolSpec(
        name=name,
        tp=tp,
        ep=ep,
        weights=weights,
        usd_per_gpu_hour=usd_per_gpu_hour,
        max_batch=max_batch,
        capacity_tokens=capacity_tokens(profile, tp, weights),
        kv=geometry_of(profile),
    )


def plans_of_config(config: Config, profile: Profile) -> list[PoolPlan]:
    """Each pool with its least number of groups, or one if it may shrink to none."""
    return [_plan_of_node(config, profile, pool) for pool in config.pools]


def _plan_of_node(config: Config, profile: Profile, pool: PoolNode) -> PoolPlan:
    layout = pool.layout
    spec = spec_for(profile, pool.name, layout.tp, layout.ep, pool.weights, config.usd_per_gpu_hour(pool), pool.max_batch)
    return PoolPlan(pool.role, spec, max(1, pool.replicas.min))


def plans_of_names(names: Sequence[str], profile: Profile, usd_per_gpu_hour: float) -> list[PoolPlan]:
    """`prefill:tp1:fp8:8`: eight groups of TP1 in FP8; `decode:tp4ep4:mxfp4:2@2.5`: two of EP4 TP4 at $2.50 a GPU-hour.

    Raises: ConfigError naming what can't be read
    """
    return [_plan_of_name(name, i, profile, usd_per_gpu_hour) for i, name in enumerate(names)]


def _plan_of_name(name: str, number: int, profile: Profile, usd_per_gpu_hour: float) -> PoolPlan:
    try:
        text, _, price = name.partition("@")
        role, layout, weights, count = text.split(":")
        tp_text, _, ep_text = layout.removeprefix("tp").partition("ep")
        tp, ep, groups = int(tp_text), int(ep_text or 1), int(count)
        usd = float(price) if price else usd_per_gpu_hour
        exists = role in ("prefill", "decode") and tp in (1, 2, 4, 8) and ep in (1, tp) and weights in ("mxfp4", "fp8")
        if not exists or groups < 1 or usd <= 0:
            raise ValueError("no such role, layout, weights, count or price")
    except ValueError as exc:
        raise ConfigError(f"pool {name!r}: {exc}; expected ROLE:tpN[epN]:WEIGHTS:GROUPS[@USD], as in decode:tp4ep4:mxfp4:2") from exc
    spec = spec_for(profile, f"{role}-{number}-{layout}", tp, ep, weights, usd)
    return PoolPlan("prefill" if role == "prefill" else "decode", spec, groups)
