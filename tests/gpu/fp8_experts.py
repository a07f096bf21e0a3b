"""FP8 experts as ranks hold and run them in prefill and decode, from dense matrices; on the CPU through the kernels' emulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.prefill_check_tools import poison_memory
from kernels.decode_fused import combine_norm
from kernels.experts_prefill import empty_counters, experts_down, experts_gate_up
from kernels.moe_decode_fp8 import Fp8ExpertWeights
from kernels.moe_prefill import combine, permute_rows
from kernels.quantize import BIAS_COLUMNS, quantize_rows
from kernels.reference import experts_ref, fp8_quant_blocks_ref, mxfp4_dequant_ref, mxfp4_quant_ref
from kernels.router import Routing, route
from model.config import ModelConfig
from model.fixture import fixture_config
from model.fp8_experts import Fp8Weight, pack_shard
from model.layout import cut_for_rank
from model.shards import ExpertShard, Fp8Matrix

TOP_K, ALPHA, LIMIT = 4, 1.702, 7.0
TWO_FP8_SIDES_DIFF = 5e-3  # tokens and hidden rows are both rounded to FP8


def poison(device: str) -> None:
    """What the allocator hands out next is NaN on a GPU; elsewhere outputs are filled where they are made."""
    if device == "cuda":
        poison_memory()


def prefill_routing(logits: Tensor, bias: Tensor, first_expert: int, local: int) -> Routing:
    device = logits.device
    residual, folded = (torch.zeros(rows, 256, dtype=torch.bfloat16, device=device) for rows in (logits.shape[0], 2 * logits.shape[1]))
    counts = torch.zeros(local, dtype=torch.int32, device=device)
    ones = torch.ones(logits.shape[0], device=device)
    return route(residual, ones, folded, bias.bfloat16(), TOP_K, counts, first_expert=first_expert, logit_offset=logits)


@dataclass(frozen=True)
class RankExperts:
    """One rank's experts, or its pieces of them."""

    gate_up: Fp8Weight
    down: Fp8Weight
    intermediate: int
    first_expert: int = 0

    @property
    def count(self) -> int:
        return self.gate_up.values.shape[0]


@dataclass(frozen=True)
class DenseExperts:
    """Shapes: gate_up [E, 2I, C], gate_up_bias [E, 2I], down [E, C, I], down_bias [E, C] fp32"""

    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor

    def rank(self, config: ModelConfig, tp: int, ep: int, rank: int) -> RankExperts:
        """What a rank's loader makes of them."""
        cut = cut_for_rank(config, tp=tp, ep=ep, rank=rank, granule=128)
        e, i = slice(cut.experts.start, cut.experts.stop), cut.intermediate
        wide, inner = slice(2 * i.start, 2 * i.stop), slice(i.start, i.stop)
        down_bias = self.down_bias[e] if cut.adds_down_bias else torch.zeros_like(self.down_bias[e])
        gate_up, down = as_fp8(self.gate_up[e, wide]), as_fp8(self.down[e, :, inner])
        shard = ExpertShard(cut.experts.start, len(i), gate_up, self.gate_up_bias[e, wide], down, down_bias)
        return RankExperts(*pack_shard(shard, config.hidden_size, self.gate_up.device), len(i), cut.experts.start)


def as_fp8(matrix: Tensor) -> Fp8Matrix:
    return Fp8Matrix(*fp8_quant_blocks_ref(matrix), matrix.shape[1], matrix.shape[2])


def run_prefill(x: Tensor, logits: Tensor, experts: RankExperts) -> Tensor:
    """x [T, C] bf16 through a rank's experts. Returns: its part of the weighted sum [T, C] fp32"""
    device = x.device.type
    routing = prefill_routing(logits, torch.zeros_like(logits[0]), experts.first_expert, experts.count)
    rows = permute_rows(*quantize_rows(x, bias_columns=BIAS_COLUMNS), routing, first_expert=experts.first_expert)
    counters = empty_counters(device)
    poison(device)
    hidden = experts_gate_up(rows, *experts.gate_up, experts.intermediate, counters, rows_per_expert=1.0)
    y = experts_down(hidden, *experts.down, rows, counters, rows_per_expert=1.0)
    return combine(y, rows.rows, routing.expert_weights).float()


def run_decode(x: Tensor, logits: Tensor, experts: RankExperts) -> Tensor:
    """The same in a decode step on FP8 weights."""
    device = x.device.type
    ids, shares = chosen_experts(logits)
    weights = Fp8ExpertWeights(experts.gate_up, experts.down, experts.intermediate, experts.first_expert)
    poison(device)
    scratch = weights.scratch(x.shape[0], TOP_K, device)
    for unwritten in (scratch.rows.q, scratch.hidden, scratch.out):
        unwritten.view(torch.uint8).fill_(0xFF)
    pairs, rows = weights.run(x, ids.int(), scratch, alpha=ALPHA, limit=LIMIT)
    part, normed = torch.zeros_like(x), torch.empty_like(x)
    combine_norm(
        pairs, ids.int(), shares, part, torch.ones_like(x[0]), eps=1e-5, first_expert=experts.first_expert,
        num_local_experts=experts.count, normed=normed, rows=rows,
    )  # fmt: skip
    return part.float()


Run = Callable[[Tensor, Tensor, RankExperts], Tensor]
PHASES = pytest.mark.parametrize("run", [run_prefill, run_decode], ids=["prefill", "decode"])


def chosen_experts(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.argsort(logits, dim=1, descending=True, stable=True)[:, :TOP_K]
    return ids, torch.softmax(logits.gather(1, ids), dim=1)


def config_on(device: str, experts: int, *, hidden: int, intermediate: int) -> ModelConfig:
    """Real sizes on a GPU, the given ones where kernels are emulated."""
    size = (
        {"hidden_size": 2880, "intermediate_size": 2880} if device == "cuda" else {"hidden_size": hidden, "intermediate_size": intermediate}
    )
    return fixture_config(num_experts=experts, **size)


def dense_experts(config: ModelConfig, device: str) -> DenseExperts:
    """MXFP4-exact matrices."""
    torch.manual_seed(4)
    e, c, i = config.num_experts, config.hidden_size, config.intermediate_size

    def matrix(rows: int, columns: int) -> Tensor:
        return mxfp4_dequant_ref(*mxfp4_quant_ref(torch.randn(e, rows, columns, device=device) * columns**-0.5))

    biases = torch.randn(e, 2 * i, device=device), torch.randn(e, c, device=device)
    return DenseExperts(matrix(2 * i, c), biases[0], matrix(c, i), biases[1])


def exact(x: Tensor, logits: Tensor, experts: DenseExperts) -> Tensor:
    return experts_ref(x.float(), *chosen_experts(logits), experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias)
