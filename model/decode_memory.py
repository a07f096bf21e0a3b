"""What a decode rank on a GPU takes of its device's memory, worked out from the model's shapes before anything is loaded.

Pure: shapes alone, no device. Called by `model/build_decode.py` for the step's share, and by the sweep, which holds the sum against the
blocks that a running group has. Legend: C hidden_size, E local experts, I local intermediate, H local query heads, K local KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass

import torch
from torch import Tensor

from kernels.moe_decode import UNIT_BYTES, UNIT_ROWS, ExpertWeights
from kernels.moe_decode_fp8 import Fp8ExpertWeights
from kernels.peers import PeerLayout
from kernels.quantize import BIAS_COLUMNS, padded_columns
from kernels.reference import FP8_BLOCK
from kernels.vocabulary import Screen
from model.config import MXFP4_GROUP, ModelConfig
from model.decode_cuda import ROUTER_ROWS, DecodeLayer, DecodeWeights, buffer_bytes
from model.decode_experts import DecodeExperts
from model.kv_memory import GPU_MARGIN_BYTES
from model.layout import RankCut, cut_for_rank
from model.next_words import Vocabulary

PROCESS_BYTES = 600 << 20  # CUDA context and loaded kernels; assumed, a driver tells no such number


@dataclass(frozen=True)
class DecodeMemory:
    """One rank's device memory [bytes]. `margin`: what stays free for libraries, graphs and transfers; `kv`: what is left for KV."""

    device: int
    process: int
    weights: int
    step: int
    margin: int

    @property
    def besides_kv(self) -> int:
        return self.process + self.weights + self.step + self.margin

    @property
    def kv(self) -> int:
        return max(0, self.device - self.besides_kv)


def decode_memory(
    config: ModelConfig, *, tp: int, ep: int, weights: str, max_batch: int, max_positions: int, device_bytes: int
) -> DecodeMemory:
    """Of the rank of a group that has the least left.

    Units: max_positions: the longest sequence [tokens]; device_bytes: all memory of one GPU
    Raises: ConfigError if the model can't be cut this way; NotSupportedError or ShapeError for experts without a kernel
    """

    def of_rank(rank: int) -> DecodeMemory:
        held = empty_weights(config, tp=tp, ep=ep, rank=rank, weights=weights)
        step = step_bytes(config, held, tp=tp, rank=rank, max_batch=max_batch, max_positions=max_positions)
        return DecodeMemory(device_bytes, PROCESS_BYTES, tensor_bytes(held), step, GPU_MARGIN_BYTES)

    return min(map(of_rank, range(tp)), key=lambda memory: memory.kv)


def step_bytes(config: ModelConfig, weights: DecodeWeights, *, tp: int, rank: int, max_batch: int, max_positions: int) -> int:
    """The buffers of a rank's step and what the other ranks see of them, but for the share that grows with the KV pool."""
    peers = peer_layout(config, tp, max_batch).nbytes(rank) if tp > 1 else 0
    return buffer_bytes(config, weights, max_batch=max_batch, max_positions=max_positions) + peers


def peer_layout(config: ModelConfig, ranks: int, max_batch: int) -> PeerLayout:
    return PeerLayout(ranks, max_batch, config.hidden_size, config.vocab_size)


def empty_weights(config: ModelConfig, *, tp: int, ep: int, rank: int, weights: str) -> DecodeWeights:
    """A rank's packed weights as shapes without memory (device meta): those that `pack_weights` makes of its shard."""
    cut = cut_for_rank(config, tp=tp, ep=ep, rank=rank, granule=FP8_BLOCK if weights == "fp8" else MXFP4_GROUP)
    hidden, words = config.hidden_size, len(cut.vocab)
    screen = Screen(_meta(-(-words // 16), hidden // 64, 2, 32, 16, dtype=torch.int8), _meta(words, 4, dtype=torch.float32), 0.0)
    layer = _layer(config, cut, weights)
    return DecodeWeights(
        embed=_meta(config.vocab_size, hidden),
        layers=(layer,) * config.num_layers,
        norm=_meta(hidden),
        vocabulary=Vocabulary(_meta(words, hidden), screen, cut.vocab.start),
    )


def tensor_bytes(holder: object) -> int:
    """Bytes of all tensors in a tensor, a tuple or a dataclass; one that stands there twice counts twice."""
    if isinstance(holder, Tensor):
        return holder.nbytes
    if isinstance(holder, tuple):
        return sum(map(tensor_bytes, holder))
    return sum(map(tensor_bytes, vars(holder).values())) if is_dataclass(holder) else 0


def _layer(config: ModelConfig, cut: RankCut, weights: str) -> DecodeLayer:
    hidden, dim = config.hidden_size, config.head_dim
    qkv_rows = (len(cut.qo_heads) + 2 * len(cut.kv_heads)) * dim
    router_rows = -(-config.num_experts // ROUTER_ROWS) * ROUTER_ROWS
    local = len(cut.experts)
    experts: DecodeExperts = _fp8_experts(hidden, local, len(cut.intermediate)) if weights == "fp8" else _mxfp4_experts(hidden, local)
    return DecodeLayer(
        attn_norm=_meta(hidden),
        qkv=_meta(qkv_rows, hidden),
        qkv_bias=_meta(qkv_rows),
        sinks=_meta(len(cut.qo_heads), dtype=torch.float32),
        o=_meta(hidden, len(cut.qo_heads) * dim),
        o_bias=_meta(hidden),
        mlp_norm=_meta(hidden),
        router=_meta(router_rows, hidden),
        router_bias=_meta(router_rows),
        experts=experts,
    )


def _mxfp4_experts(hidden: int, experts: int) -> ExpertWeights:
    """Both products are padded to the hidden size, see `pack_decode_experts`."""
    units, groups = hidden // UNIT_ROWS, hidden // MXFP4_GROUP
    return ExpertWeights(
        _meta(experts, 2 * units, groups, UNIT_BYTES, dtype=torch.uint8),
        _meta(experts, 2 * hidden),
        _meta(experts, units, groups, UNIT_BYTES, dtype=torch.uint8),
        _meta(experts, hidden),
    )


def _fp8_experts(hidden: int, experts: int, intermediate: int) -> Fp8ExpertWeights:
    def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        padded = padded_columns(columns, BIAS_COLUMNS)
        values = _meta(experts, rows, padded, dtype=torch.float8_e4m3fn)
        return values, _meta(experts, -(-rows // FP8_BLOCK), padded // FP8_BLOCK, dtype=torch.float32)

    gate_up_rows = -(-2 * intermediate // FP8_BLOCK) * FP8_BLOCK
    return Fp8ExpertWeights(packed(gate_up_rows, hidden), packed(hidden, intermediate), intermediate)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
