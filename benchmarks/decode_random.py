"""Random gpt-oss decode weights, KV and inputs of the true shapes, made on the GPU in the packed layouts: for speed and kernel checks.

Every layer has its own bytes (else a small batch would read from L2), KV pools are random and block tables shuffled; nothing is zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import torch
from torch import Tensor

from benchmarks.prefill_random import RandomWeights
from kernels.experts_prefill import down_order, gate_up_order
from kernels.moe_decode import CODE_BYTES, UNIT_BYTES, UNIT_ROWS, ExpertWeights
from kernels.moe_decode_fp8 import Fp8ExpertWeights
from model.config import ModelConfig
from model.decode_cuda import CudaDecode, DecodeLayer, DecodeWeights
from model.decode_experts import DecodeExperts
from model.fp8_experts import Fp8Weight
from model.kv_cache import KVCache
from model.next_words import pack_vocabulary

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


def mxfp4_experts(config: ModelConfig) -> Iterator[ExpertWeights]:
    """One layer's after the other."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    while True:
        yield ExpertWeights(
            packed_experts(experts, 2 * inner, hidden),
            randn(experts, 2 * inner, std=0.2),
            packed_experts(experts, hidden, inner),
            randn(experts, hidden, std=0.2),
        )


def fp8_experts(config: ModelConfig) -> Iterator[Fp8ExpertWeights]:
    """The same in FP8; layers after the first have its experts in another order, in memory of their own."""
    hidden, inner, maker = config.hidden_size, config.intermediate_size, RandomWeights(config, "cuda", seed=1)
    gate_up, _ = maker.experts(2 * inner, hidden, gate_up_order(2 * inner), 0.2)
    down, _ = maker.experts(hidden, inner, down_order(hidden), 0.2)
    del maker

    def in_other_order(weight: Fp8Weight, by: int) -> tuple[Tensor, Tensor]:
        return weight.values.view(torch.uint8).roll(by, 0).view(torch.float8_e4m3fn), weight.scales.roll(by, 0)

    yield Fp8ExpertWeights(gate_up, down, inner)
    for layer in count(1):
        yield Fp8ExpertWeights(in_other_order(gate_up, layer), in_other_order(down, layer), inner)


EXPERTS = {"mxfp4": mxfp4_experts, "fp8": fp8_experts}


def random_layer(config: ModelConfig, experts: DecodeExperts) -> DecodeLayer:
    hidden = config.hidden_size
    heads = (config.num_qo_heads + 2 * config.num_kv_heads) * config.head_dim
    return DecodeLayer(
        attn_norm=1 + randn(hidden, std=0.1),
        qkv=randn(heads, hidden, std=0.02),
        qkv_bias=randn(heads, std=0.1),
        sinks=randn(config.num_qo_heads, dtype=torch.float32),
        o=randn(hidden, config.num_qo_heads * config.head_dim, std=0.02),
        o_bias=randn(hidden, std=0.1),
        mlp_norm=1 + randn(hidden, std=0.1),
        router=randn(config.num_experts, hidden, std=0.02),
        router_bias=randn(config.num_experts, std=0.1),
        experts=experts,
    )


def random_weights(config: ModelConfig, weights: str = "mxfp4") -> DecodeWeights:
    """Units: weights: the experts' format, a key of `EXPERTS`"""
    layers = tuple(random_layer(config, experts) for experts in islice(EXPERTS[weights](config), config.num_layers))
    embed, lm_head = randn(config.vocab_size, config.hidden_size), randn(config.vocab_size, config.hidden_size, std=0.02)
    return DecodeWeights(embed, layers, 1 + randn(config.hidden_size, std=0.1), pack_vocabulary(lm_head, 0))


def shuffled_table(rows: int, width: int) -> Tensor:
    """[rows, width] int32 of distinct block ids in random order."""
    return torch.randperm(rows * width, device="cuda").int().view(rows, width)


def blocks_of(config: ModelConfig, context: int) -> tuple[int, int, int]:
    """Full blocks of a sequence, position of the first token that sliding layers keep, and their blocks."""
    first = max(0, (context - config.window_tokens) // BLOCK_SIZE * BLOCK_SIZE)
    return -(-context // BLOCK_SIZE), first, -(-(context - first) // BLOCK_SIZE)


def kv_bytes(config: ModelConfig, rows: int, context: int) -> int:
    """What the KV of `random_decode` takes."""
    full, _, sliding = blocks_of(config, context)
    return KVCache.nbytes(config.kv_geometry(BLOCK_SIZE, "bfloat16"), 1, 0, rows * full, rows * sliding)


def random_decode(config: ModelConfig, weights: DecodeWeights, rows: int, context: int) -> CudaDecode:
    """A decode step of `rows` sequences whose newest token is number `context`, over random KV."""
    blocks, first, sliding_blocks = blocks_of(config, context)
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
