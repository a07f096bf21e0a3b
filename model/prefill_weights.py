"""A rank's weights as the FP8 prefill forward wants them, made once at load from what `model/weights.py` read.

Experts are FP8 with one scale per 128 rows, their rows in the kernel's order, biases in the columns' padding; projections are FP8 in
128x128 blocks or stay bf16, as the caller chooses. Called by the prefill worker's ranks and by benchmarks.
Legend: C hidden_size, E local experts, I local intermediate, R rows, P padded columns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.reference import fp8_quant_blocks_ref
from kernels.router import fold_router
from model.config import ModelConfig
from model.fp8_experts import Fp8Weight, pack_shard
from model.shards import LayerShard, ShardWeights

Projections = Literal["fp8", "bf16", "bf16_qkv"]  # which of the QKV and output projections are FP8: both, none, the output's
SERVED_PROJECTIONS: Projections = "bf16"  # what keeps a layer's output within cosine 0.999 of fp32 (docs/decisions/even-scales.md)


@dataclass(frozen=True)
class PrefillLayer:
    """One layer on one rank.

    Shapes: qkv [(H + 2K) * D, P] in FP8 or [.., C] in bf16; qkv_bias [(H + 2K) * D]; sinks [H] fp32; o [C, H * D]; o_bias [C]
    Shapes: router [2 * all experts, C] from `fold_router`, the MoE norm inside; router_bias [all experts]
    Shapes: gate_up [E, 2I rounded up to 128, P] in `gate_up_order` and down [E, C, P] in `down_order`, biases folded in; norms [C]
    Units: intermediate: I
    """

    attn_norm: Tensor
    qkv: Fp8Weight | Tensor
    qkv_bias: Tensor
    sinks: Tensor
    o: Fp8Weight | Tensor
    o_bias: Tensor
    mlp_norm: Tensor
    router: Tensor
    router_bias: Tensor
    gate_up: Fp8Weight
    down: Fp8Weight
    first_expert: int
    intermediate: int
    num_kv_heads: int


@dataclass(frozen=True)
class PrefillWeights:
    """Shapes: embed [V, C] bf16; norm [C]; lm_head [local rows of V, C] bf16"""

    embed: Tensor
    layers: tuple[PrefillLayer, ...]
    norm: Tensor
    lm_head: Tensor


def prepare_prefill_weights(
    config: ModelConfig,
    shard: ShardWeights,
    device: torch.device | str,
    *,
    projections: Projections = "fp8",
    layers: deque[LayerShard] | None = None,
) -> PrefillWeights:
    """Quantises the projections, packs the experts and folds their biases, layer by layer.

    Units: projections: "fp8" is the fastest; "bf16_qkv" keeps Q, K and V exact, where FP8 costs the most accuracy; "bf16" both
    Units: layers: taken from the left one by one in place of the shard's own, so that memory holds one layer twice at most
    Raises: ConfigError unless the shard's experts are packed FP8: a pool loads what `tandem convert` wrote; ShapeError if the experts'
        sizes have no kernel
    """
    left = deque(shard.layers) if layers is None else layers
    prepared = []
    while left:
        prepared.append(_prepare_layer(config, left.popleft(), device, projections))
    return PrefillWeights(shard.embed.to(device), tuple(prepared), shard.norm.to(device), shard.lm_head.to(device))


def quantize_projection(weight: Tensor) -> Fp8Weight:
    """A dense projection [R, C] in FP8 blocks; rows cut back to R, columns padded to P."""
    values, scales = fp8_quant_blocks_ref(weight)
    return Fp8Weight(values[: weight.shape[0]].contiguous(), scales)


def _prepare_layer(config: ModelConfig, layer: LayerShard, device: torch.device | str, projections: Projections) -> PrefillLayer:
    experts = layer.experts
    gate_up, down = pack_shard(experts, config.hidden_size, device)
    num_qo_heads = layer.sinks.shape[0]
    return PrefillLayer(
        attn_norm=layer.attn_norm.to(device),
        qkv=quantize_projection(layer.qkv.to(device)) if projections == "fp8" else layer.qkv.to(device),
        qkv_bias=layer.qkv_bias.to(device),
        sinks=layer.sinks.to(device).float(),
        o=layer.o.to(device) if projections == "bf16" else quantize_projection(layer.o.to(device)),
        o_bias=layer.o_bias.to(device),
        mlp_norm=layer.mlp_norm.to(device),
        router=fold_router(layer.router.to(device), layer.mlp_norm.to(device)),
        router_bias=layer.router_bias.to(device),
        gate_up=gate_up,
        down=down,
        first_expert=experts.first_expert,
        intermediate=experts.intermediate,
        num_kv_heads=(layer.qkv.shape[0] // config.head_dim - num_qo_heads) // 2,
    )
