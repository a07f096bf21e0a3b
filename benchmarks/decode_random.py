"""Random gpt-oss decode weights, KV and inputs of the true shapes, made on the GPU in the packed layouts: for speed and kernel checks.

Every layer has its own bytes (else a small batch would read from L2), KV pools are random and block tables shuffled; nothing is zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe_decode import CODE_BYTES, UNIT_BYTES, UNIT_ROWS, ExpertWeights
from model.config import ModelConfig
from model.decode_cuda import CudaDecode, DecodeLayer, DecodeWeights
from model.kv_cache import KVCache

BLOCK_SIZE = 16
SCALE_BYTES = (246, 249)  # scales of 2^-7 .. 2^-5, as real checkpoints have


def randn(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(0.0, std)


def packed_experts(experts: int, rows: int, columns: int) -> Tensor:
    """Random 4-bit weights [E, rows / 32, columns / 32, 544] uint8 in the decode layout."""
    packed = torch.empty(experts, rows // UNIT_ROWS, columns // 32, UNIT_BYTES, dtype=torch.uint8, device="cuda")
    packed.view(-1).view(torch.int32).random_(-(2**31), 2**31)
    packed[..., CODE_BYTES:] = torch.randint(*SCALE_BYTES, (*packed.shape[:3], UNIT_BYTES - CODE_BYTES), dtype=torch.uint8, device="cuda")
    return packed


def random_layer(config: ModelConfig) -> DecodeLayer:
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    heads = (config.num_qo_heads + 2 * config.num_kv_heads) * config.head_dim
    return DecodeLayer(
        attn_norm=1 + randn(hidden, std=0.1),
        qkv=randn(heads, hidden, std=0.02),
        qkv_bias=randn(heads, std=0.1),
        sinks=randn(config.num_qo_heads, dtype=torch.float32),
        o=randn(hidden, config.num_qo_heads * config.head_dim, std=0.02),
        o_bias=randn(hidden, std=0.1),
        mlp_norm=1 + randn(hidden, std=0.1),
        router=randn(experts, hidden, std=0.02),
        router_bias=randn(experts, std=0.1),
        experts=ExpertWeights(
            packed_experts(experts, 2 * inner, hidden),
            randn(experts, 2 * inner, std=0.2),
            packed_experts(experts, hidden, inner),
            randn(experts, hidden, std=0.2),
        ),
    )


def random_weights(config: ModelConfig) -> DecodeWeights:
    layers = tuple(random_layer(config) for _ in range(config.num_layers))
    return DecodeWeights(
        randn(config.vocab_size, config.hidden_size), layers, 1 + randn(config.hidden_size, std=0.1),
        randn(config.vocab_size, config.hidden_size, std=0.02),
    )  # fmt: skip


def shuffled_table(rows: int, width: int) -> Tensor:
    """[rows, width] int32 of distinct block ids in random order."""
    return torch.randperm(rows * width, device="cuda").int().view(rows, width)


def random_decode(config: ModelConfig, weights: DecodeWeights, rows: int, context: int) -> CudaDecode:
    """A decode step of `rows` sequences whose newest token is number `context`, over random KV."""
    blocks = -(-context // BLOCK_SIZE)
    first = max(0, (context - config.window_tokens) // BLOCK_SIZE * BLOCK_SIZE)
    sliding_blocks = -(-(context - first) // BLOCK_SIZE)
    kv = KVCache(config.kv_geometry(BLOCK_SIZE, "bfloat16"), 1, 0, rows * blocks, rows * sliding_blocks, "cuda")
    for pool in (kv.full, kv.sliding):
        for layer in pool:
            layer.normal_()
    decode = CudaDecode(config, weights, kv, max_batch=rows, max_positions=blocks * BLOCK_SIZE, device="cuda")
    inputs = decode.inputs
    decode.token_ids.random_(0, config.vocab_size)
    inputs.seq_lens.fill_(context)
    inputs.sliding_start.fill_(first)
    inputs.full_table.copy_(shuffled_table(rows, blocks))
    inputs.sliding_table[:, :sliding_blocks] = shuffled_table(rows, sliding_blocks)
    decode.logits_override = torch.randn(config.num_layers, rows, config.num_experts, device="cuda")
    return decode


def random_choices(layers: int, rows: int, config: ModelConfig) -> Tensor:
    """Uniform distinct experts of every row: [layers, rows, k] int32."""
    logits = torch.rand(layers, rows, config.num_experts, device="cuda")
    return logits.topk(config.experts_per_token, dim=-1).indices.int().contiguous()
