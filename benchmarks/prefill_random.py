"""Random gpt-oss weights and prompts of the true shapes, made on the GPU directly in FP8: for speed and kernel checks, never for quality.

Payload looks like converted MXFP4 weights (4-bit values times a power of two), never zeros, because data decides how fast the chip clocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.experts_prefill import down_order, gate_up_order
from kernels.gemm_fp8 import fold_bias
from kernels.quantize import BIAS_COLUMNS, padded_columns
from kernels.reference import FP4_VALUES
from kernels.router import fold_router
from model.batch import SequenceView, StepBatch, build_prefill_batch
from model.config import ModelConfig
from model.kv_cache import KVCache
from model.prefill_weights import Fp8Weight, PrefillLayer, PrefillWeights, Projections, quantize_projection

BLOCK_SIZE = 16
PAYLOAD_VALUES = 64 * 1024 * 1024
WEIGHT_SCALE = 2.0**-12


def gpt_oss_config(name: str, num_layers: int | None = None) -> ModelConfig:
    """The published numbers of `20b` or `120b`, with fewer layers on request."""
    layers, experts = {"20b": (24, 32), "120b": (36, 128)}[name]
    layers = num_layers or layers
    return ModelConfig(
        num_layers=layers, hidden_size=2880, intermediate_size=2880, num_experts=experts, experts_per_token=4, num_qo_heads=64,
        num_kv_heads=8, head_dim=64, vocab_size=201088, window_tokens=128, sliding=tuple(i % 2 == 0 for i in range(layers)),
        rms_norm_eps=1e-5, rope_theta=150000.0, rope_factor=32.0, rope_original_context=4096, rope_beta_fast=32.0, rope_beta_slow=1.0,
        swiglu_alpha=1.702, swiglu_limit=7.0, max_position=131072, eos_token_ids=(200002,),
    )  # fmt: skip


class RandomWeights:
    """Makes layers one by one from one pool of random payload, cut at random places."""

    def __init__(self, config: ModelConfig, device: str, seed: int):
        self.config = config
        self.device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._cuts = torch.Generator().manual_seed(seed)
        table = torch.tensor(FP4_VALUES, device=device)
        values = table[torch.randint(0, 16, (PAYLOAD_VALUES,), device=device, generator=self._generator, dtype=torch.int32)]
        exponent = torch.randint(4, 7, (PAYLOAD_VALUES // 32, 1), device=device, generator=self._generator)
        self._payload = (values.view(-1, 32) * torch.exp2(exponent.float())).to(torch.float8_e4m3fn).view(-1)

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, device=self.device, generator=self._generator) * std).to(dtype)

    def experts(self, rows: int, columns: int, order: Tensor, bias_std: float) -> tuple[Fp8Weight, Tensor]:
        """Returns: rows in this order with the bias folded in, as `pack_experts` leaves them, and that bias [E, rows] fp32"""
        count, padded = self.config.num_experts, padded_columns(columns, BIAS_COLUMNS)
        values = torch.empty((count, order.shape[0], padded), dtype=torch.float8_e4m3fn, device=self.device)
        size = order.shape[0] * padded
        for expert in values:
            start = int(torch.randint(0, (PAYLOAD_VALUES - size) // 16, (1,), generator=self._cuts)) * 16
            expert.view(-1).copy_(self._payload[start : start + size])
        values.view(torch.uint8)[:, :, columns:] = 0
        values.view(torch.uint8)[:, order >= rows] = 0
        scales = torch.full((count, -(-order.shape[0] // 128), padded // 128), WEIGHT_SCALE, device=self.device)
        bias = self.normal(count, rows, std=bias_std, dtype=torch.float32)
        ordered = torch.nn.functional.pad(bias, (0, order.shape[0] - rows))[:, order.to(self.device)]
        fold_bias(values, scales, ordered, columns, BIAS_COLUMNS)
        return Fp8Weight(values, scales), bias

    def layer(self, projections: Projections = "fp8") -> PrefillLayer:
        return self.layer_with_originals(projections)[0]

    def layer_with_originals(self, projections: Projections = "fp8") -> tuple[PrefillLayer, dict[str, Tensor]]:
        """Returns: the layer, and the bf16 matrices (qkv, o, router) and expert biases it was made from"""
        c = self.config
        width, query = (c.num_qo_heads + 2 * c.num_kv_heads) * c.head_dim, c.num_qo_heads * c.head_dim
        qkv, o = self.normal(width, c.hidden_size, std=0.02), self.normal(c.hidden_size, query, std=0.02)
        gate_up, gate_up_bias = self.experts(2 * c.intermediate_size, c.hidden_size, gate_up_order(2 * c.intermediate_size), 0.2)
        down, down_bias = self.experts(c.hidden_size, c.intermediate_size, down_order(c.hidden_size), 0.2)
        router, mlp_norm = self.normal(c.num_experts, c.hidden_size, std=0.02), 1 + self.normal(c.hidden_size, std=0.1)
        layer = PrefillLayer(
            attn_norm=1 + self.normal(c.hidden_size, std=0.1), qkv=quantize_projection(qkv) if projections == "fp8" else qkv,
            qkv_bias=self.normal(width, std=0.1), sinks=self.normal(c.num_qo_heads, dtype=torch.float32),
            o=o if projections == "bf16" else quantize_projection(o), o_bias=self.normal(c.hidden_size, std=0.1),
            mlp_norm=mlp_norm, router=fold_router(router, mlp_norm), router_bias=self.normal(c.num_experts, std=0.1),
            gate_up=gate_up, down=down, first_expert=0, intermediate=c.intermediate_size, num_kv_heads=c.num_kv_heads,
        )  # fmt: skip
        return layer, {"qkv": qkv, "o": o, "router": router, "gate_up_bias": gate_up_bias, "down_bias": down_bias}

    def model(self, unique_layers: int | None = None, projections: Projections = "fp8") -> PrefillWeights:
        c = self.config
        layers: list[PrefillLayer] = []
        for index in range(c.num_layers):
            layers.append(layers[index % unique_layers] if unique_layers and index >= unique_layers else self.layer(projections))
        embed, lm_head = self.normal(c.vocab_size, c.hidden_size), self.normal(c.vocab_size, c.hidden_size, std=0.02)
        return PrefillWeights(embed, tuple(layers), self.normal(c.hidden_size), lm_head)


def uniform_logits(config: ModelConfig, tokens: int, device: str, seed: int) -> Tensor:
    """Router logits that spread tokens evenly and outweigh what random weights compute. Returns: [layers, tokens, E] fp32"""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(config.num_layers, tokens, config.num_experts, device=device, generator=generator).mul_(30.0)


def random_prompt(config: ModelConfig, tokens: int, seed: int) -> tuple[StepBatch, int]:
    """A CPU batch of one whole prompt over shuffled blocks. Returns: batch, blocks per pool"""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-tokens // BLOCK_SIZE)
    full, sliding = (torch.randperm(blocks, generator=generator).tolist() for _ in range(2))
    ids = torch.randint(0, config.vocab_size, (tokens,), generator=generator).tolist()
    return build_prefill_batch(SequenceView(ids, 0, full, 0, sliding), BLOCK_SIZE, "cpu"), blocks


def make_cache(config: ModelConfig, blocks: int, device: str) -> KVCache:
    return KVCache(config.kv_geometry(BLOCK_SIZE, "bfloat16"), 1, 0, blocks, blocks, device)
