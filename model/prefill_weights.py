"""A rank's weights as the FP8 prefill forward wants them, made once at load from what `model/weights.py` read.

Experts are FP8 with one scale per 128 rows, their rows in the kernel's order, biases in the columns' padding; projections are FP8 in
128x128 blocks or stay bf16, as the caller chooses. Called by the prefill worker's ranks and by benchmarks.
Legend: C hidden_size, E local experts, I local intermediate, R rows, P padded columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError
from kernels.experts_prefill import check_sizes, down_order, gate_up_order
from kernels.gemm_fp8 import fold_bias
from kernels.quantize import BIAS_COLUMNS, padded_columns
from kernels.reference import FP8_BLOCK, fp8_quant_blocks_ref
from kernels.router import fold_router
from model.config import ModelConfig
from model.shards import ExpertMatrix, Fp8Matrix, LayerShard, Mxfp4Matrix, ShardWeights

Projections = Literal["fp8", "bf16", "bf16_qkv"]  # which of the QKV and output projections are FP8: both, none, the output's
SERVED_PROJECTIONS: Projections = "bf16"  # what keeps a layer's output within cosine 0.999 of fp32 (docs/decisions/even-scales.md)


class Fp8Weight(NamedTuple):
    """values [..., R, P] float8_e4m3fn, rows not padded; scales [..., ceil(R / 128), P / 128] fp32, one per 128x128 block."""

    values: Tensor
    scales: Tensor


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
    config: ModelConfig, shard: ShardWeights, device: torch.device | str, *, projections: Projections = "fp8"
) -> PrefillWeights:
    """Quantises the projections, packs the experts and folds their biases, layer by layer.

    Units: projections: "fp8" is the fastest; "bf16_qkv" keeps Q, K and V exact, where FP8 costs the most accuracy; "bf16" both
    Effects: the shard's expert tensors are copied to the device one layer at a time; dense ones are quantised
    Raises: ConfigError if the shard's experts are MXFP4: an FP8 pool loads what `tandem convert` wrote; ShapeError if the experts' sizes
        have no kernel
    """
    layers = tuple(_prepare_layer(config, layer, device, projections) for layer in shard.layers)
    return PrefillWeights(shard.embed.to(device), layers, shard.norm.to(device), shard.lm_head.to(device))


def quantize_projection(weight: Tensor) -> Fp8Weight:
    """A dense projection [R, C] in FP8 blocks; rows cut back to R, columns padded to P."""
    values, scales = fp8_quant_blocks_ref(weight)
    return Fp8Weight(values[: weight.shape[0]].contiguous(), scales)


def fp8_matrix(matrix: ExpertMatrix) -> Fp8Matrix:
    """An expert matrix in FP8 blocks, quantised if it is dense.

    Raises: ConfigError if it is MXFP4
    """
    if isinstance(matrix, Fp8Matrix):
        return matrix
    if isinstance(matrix, Mxfp4Matrix):
        raise ConfigError("the FP8 prefill got MXFP4 experts; run `tandem convert` and set the pool's weights to fp8")
    values, scales = fp8_quant_blocks_ref(matrix)
    return Fp8Matrix(values, scales, matrix.shape[1], matrix.shape[2])


def pack_experts(matrix: Fp8Matrix, bias: Tensor, order: Tensor, device: torch.device | str) -> Fp8Weight:
    """Experts' matrices with their rows in this order, with room for the bias columns, scales even and bias folded in.

    Shapes: bias [E, rows] fp32; order [rows or more] int64: which row lies where, numbers from `rows` on mean a row of zeros
    Effects: takes one expert at a time to the device
    """
    experts, rows = matrix.values.shape[0], order.shape[0]
    padded = padded_columns(matrix.columns, BIAS_COLUMNS)
    kept = min(padded, matrix.values.shape[2])
    order = order.to(device)
    values = torch.zeros((experts, rows, padded), dtype=torch.float8_e4m3fn, device=device)
    for expert in range(experts):
        source = matrix.values[expert, : matrix.rows, :kept].to(device).to(values.dtype).view(torch.uint8)
        missing = rows - source.shape[0]
        source = torch.nn.functional.pad(source, (0, 0, 0, missing)) if missing else source
        values.view(torch.uint8)[expert, :, :kept] = source[order]
    scales = torch.ones((experts, -(-rows // FP8_BLOCK), padded // FP8_BLOCK), dtype=torch.float32, device=device)
    scales[:, :, : kept // FP8_BLOCK] = matrix.scales[:, : scales.shape[1], : kept // FP8_BLOCK].to(device)
    ordered_bias = torch.nn.functional.pad(bias.to(device), (0, rows - bias.shape[1]))[:, order]
    fold_bias(values, scales, ordered_bias, matrix.columns, BIAS_COLUMNS)
    return Fp8Weight(values, scales)


def _prepare_layer(config: ModelConfig, layer: LayerShard, device: torch.device | str, projections: Projections) -> PrefillLayer:
    experts = layer.experts
    check_sizes(experts.gate_up_bias.shape[0], experts.intermediate)
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
        gate_up=pack_experts(fp8_matrix(experts.gate_up), experts.gate_up_bias, gate_up_order(2 * experts.intermediate), device),
        down=pack_experts(fp8_matrix(experts.down), experts.down_bias, down_order(config.hidden_size), device),
        first_expert=experts.first_expert,
        intermediate=experts.intermediate,
        num_kv_heads=(layer.qkv.shape[0] // config.head_dim - num_qo_heads) // 2,
    )
