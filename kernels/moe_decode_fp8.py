"""Mixture-of-experts products of a decode step on FP8 weights: the kernels of prefill (`experts_prefill`) on a step's few rows.

Owns the way of a step's tokens to them: quantised and put in order by expert in one launch (`cuda/expert_rows.cu`). The weights are those
of a prefill pool. Called by `model/decode_cuda.py`. Legend: B tokens, k experts_per_token, E local experts, C hidden_size,
I intermediate_size, M = B * k rows, P padded columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cuda_library
from kernels.experts_prefill import empty_counters, experts_down, experts_gate_up
from kernels.moe_decode import ExpertOutputs
from kernels.moe_prefill import ExpertRows
from kernels.quantize import BIAS_COLUMNS, padded_columns
from kernels.reference import expert_rows_ref, fp8_quant_rows_bias_ref


@dataclass(frozen=True)
class Fp8Scratch:
    """What the experts of a step need, at the largest batch.

    Shapes: rows: of M rows; hidden [M, P'] float8_e4m3fn; out [M, C] bf16; counters: `empty_counters`
    """

    rows: ExpertRows
    hidden: Tensor
    out: Tensor
    counters: Tensor


@dataclass(frozen=True)
class Fp8ExpertWeights:
    """One layer's local experts for decode, values and scales as `experts_gate_up` and `experts_down` want them, biases inside.

    Shapes: gate_up [E, 2I rounded up to 128, P] float8_e4m3fn in `gate_up_order`; down [E, C, P'] in `down_order`; scales fp32
    Units: intermediate: I; first_expert: global id of local expert 0
    """

    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    intermediate: int
    first_expert: int = 0

    @property
    def num_local(self) -> int:
        return self.down[0].shape[0]

    def scratch(self, tokens: int, k: int, device: torch.device | str) -> Fp8Scratch:
        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, pairs = self.down[0].shape[1], tokens * k
        return Fp8Scratch(
            ExpertRows(
                empty(pairs, padded_columns(hidden, BIAS_COLUMNS), dtype=torch.float8_e4m3fn), empty(pairs, 1, dtype=torch.float32),
                empty(self.num_local, dtype=torch.int32), empty(tokens, k, dtype=torch.int32),
            ),
            empty(pairs, padded_columns(self.intermediate, BIAS_COLUMNS), dtype=torch.float8_e4m3fn),
            empty(pairs, hidden, dtype=torch.bfloat16), empty_counters(device),
        )  # fmt: skip

    def run(self, x: Tensor, expert_ids: Tensor, scratch: Fp8Scratch, *, alpha: float, limit: float) -> ExpertOutputs:
        """Every local (token, expert) pair's output before the weighted sum.

        Shapes: x [B, C] bf16; expert_ids [B, k] int32, -1 for padded rows
        Effects: three kernels; no host sync; capturable. A pair's result does not depend on the other pairs, bit for bit: an expert has
            128 rows at most, for which `split_tokens` has one answer, and a row's products are added in the order of the columns
        Raises: KernelError for a shape without instance
        """
        tokens, k = expert_ids.shape
        pairs, all_rows = tokens * k, scratch.rows
        rows = ExpertRows(all_rows.q[:pairs], all_rows.scales[:pairs], all_rows.ends, all_rows.rows[:tokens])
        quantize_by_expert(x, expert_ids, rows, first_expert=self.first_expert)
        mean = pairs / max(self.num_local, k)
        q = experts_gate_up(
            rows, *self.gate_up, self.intermediate, scratch.counters, rows_per_expert=mean, alpha=alpha, limit=limit,
            out=scratch.hidden[:pairs],
        )  # fmt: skip
        y = experts_down(q, *self.down, rows, scratch.counters, rows_per_expert=mean, limit=limit, out=scratch.out[:pairs])
        return ExpertOutputs(y, rows.rows)


def quantize_by_expert(x: Tensor, expert_ids: Tensor, out: ExpertRows, *, first_expert: int = 0) -> None:
    """FP8 rows of a step's tokens, with `BIAS_COLUMNS`, in order by expert and then by token.

    Shapes: x [B, C] bf16; expert_ids [B, k] int32, -1 for none; out: of B * k rows, all of it written but the rows past the last expert's
    Effects: one kernel; capturable; the bits of `quantize_rows`
    Raises: KernelError for more than 512 pairs or 8 choices
    """
    if cuda_library.runs(x):
        cuda_library.call(
            "expert_rows", "tandem_expert_rows", x, expert_ids, out.q, out.scales, out.ends, out.rows, *expert_ids.shape, first_expert,
            out.ends.shape[0], x.shape[1], out.q.shape[1], BIAS_COLUMNS,
        )  # fmt: skip
        return
    rows, ends = expert_rows_ref(expert_ids, first_expert, out.ends.shape[0])
    q, scales = fp8_quant_rows_bias_ref(x, BIAS_COLUMNS)
    token, choice = (rows >= 0).nonzero(as_tuple=True)
    target = rows[token, choice].long()
    out.q.view(torch.uint8)[target] = q.view(torch.uint8)[token]
    out.scales[target] = scales[token]
    out.ends.copy_(ends)
    out.rows.copy_(rows)
