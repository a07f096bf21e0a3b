"""The experts of a decode step on a GPU, in the format of their pool: what `model/decode_cuda.py` asks of a layer's, and their packing.

Legend: C hidden_size, I local intermediate.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.errors import NotSupportedError
from kernels.moe_decode import ExpertOutputs, ExpertWeights, pack_mxfp4
from kernels.moe_decode_fp8 import Fp8ExpertWeights
from model.config import MXFP4_GROUP
from model.fp8_experts import pack_shard
from model.shards import ExpertShard, Fp8Matrix, Mxfp4Matrix


class DecodeExperts(Protocol):
    """One layer's local experts in a format of their own.

    Units: first_expert: global id of local expert 0; num_local: how many
    """

    @property
    def first_expert(self) -> int: ...

    @property
    def num_local(self) -> int: ...

    def scratch(self, tokens: int, k: int, device: torch.device | str) -> Any:
        """What `run` needs for steps of up to `tokens` tokens: a dataclass of tensors, of any layer for all of them."""

    def run(self, x: Tensor, expert_ids: Tensor, scratch: Any, *, alpha: float, limit: float) -> ExpertOutputs:
        """Every local (token, expert) pair's output before the weighted sum.

        Shapes: x [B, C] bf16; expert_ids [B, k] int32, -1 for padded rows
        Effects: no host sync; capturable. A pair's result does not depend on the other pairs, bit for bit
        """


def pack_decode_experts(experts: ExpertShard, hidden: int) -> DecodeExperts:
    """A layer's experts as they were loaded in the layout of their format's kernels, on the same device.

    Units: hidden: C
    Raises: NotSupportedError for another format; ShapeError for sizes without a kernel
    """
    device = experts.gate_up_bias.device
    if isinstance(experts.gate_up, Fp8Matrix):
        return Fp8ExpertWeights(*pack_shard(experts, hidden, device), experts.intermediate, experts.first_expert)
    if not isinstance(experts.gate_up, Mxfp4Matrix) or not isinstance(experts.down, Mxfp4Matrix):
        raise NotSupportedError("decode on the GPU takes MXFP4 or FP8 experts; set weights: mxfp4 or fp8 for this pool")
    gate_up, gate_up_bias = _pad_rows(experts.gate_up, experts.gate_up_bias, 2 * hidden)
    return ExpertWeights(
        pack_mxfp4(gate_up.blocks, gate_up.scales, gate_up=True),
        gate_up_bias.bfloat16(),
        pack_mxfp4(*_pad_groups(experts.down, hidden // MXFP4_GROUP), gate_up=False),
        experts.down_bias.bfloat16(),
        experts.first_expert,
    )


def _pad_rows(matrix: Mxfp4Matrix, bias: Tensor, rows: int) -> tuple[Mxfp4Matrix, Tensor]:
    """Zero rows at the end: the kernel's two products are of one width, that of the hidden state; gpt-oss itself has it."""
    missing = rows - matrix.blocks.shape[1]
    padded = Mxfp4Matrix(pad(matrix.blocks, (0, 0, 0, 0, 0, missing)), pad(matrix.scales, (0, 0, 0, missing)))
    return (padded, pad(bias, (0, missing))) if missing else (matrix, bias)


def _pad_groups(matrix: Mxfp4Matrix, groups: int) -> tuple[Tensor, Tensor]:
    missing = groups - matrix.blocks.shape[2]
    return pad(matrix.blocks, (0, 0, 0, missing)), pad(matrix.scales, (0, missing))
