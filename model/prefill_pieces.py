"""The prefill forward of a rank that shares the model with others: a chunk in pieces, so that the sum of one piece travels between the
ranks while the next piece computes.

Attention and everything around it goes piece by piece, which causality allows; the experts see the whole chunk at once, since their weights
are read once per pass. Owns the order of the kernels and of the sums, the same on every rank. Called by `model/prefill_cuda.py`, whose
weights and tables it uses. Legend as there; P tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.attention_prompt import PromptAttention, window_attention
from kernels.moe_prefill import combine
from kernels.norm import add_norm, add_norm_quantize
from kernels.quantize import BIAS_COLUMNS, empty_fp8_rows
from kernels.rope_kv import rope_write_kv
from model.kv_cache import KVCache
from model.parallel import PendingSum
from model.prefill_inputs import ChunkInputs, PromptChunkAttention
from model.prefill_projections import project, project_output
from model.prefill_weights import Fp8Weight, PrefillLayer

if TYPE_CHECKING:
    from model.prefill_cuda import CudaPrefill

PIECE_ALIGNMENT = 128


def cut_pieces(tokens: int, pieces: int, least_tokens: int) -> list[slice]:
    """`tokens` in at most `pieces` nearly equal parts on multiples of 128, none planned shorter than `least_tokens`; all are covered."""
    count = max(1, min(pieces, tokens // max(least_tokens, 1)))
    bounds = [min(-(-tokens * i // count // PIECE_ALIGNMENT) * PIECE_ALIGNMENT, tokens) for i in range(count)] + [tokens]
    return [slice(a, b) for a, b in pairwise(bounds) if a < b]


class PiecewisePrefill:
    """Runs whole prompts, or first chunks of them, on one rank of several.

    Units: pieces: at most so many; least_tokens: of a piece, since small sums and small GEMMs do not pay; graph_tokens: rows of the CUDA
        graph that will hold the runs, at the end of which `least_rows` and more are real
    """

    def __init__(self, prefill: CudaPrefill, *, pieces: int, least_tokens: int, graph_tokens: int | None = None):
        self._prefill = prefill
        self._pieces = pieces
        self._least_tokens = least_tokens
        self._fixed = None if graph_tokens is None else cut_pieces(graph_tokens, pieces, least_tokens)
        sizes = [None] * pieces if self._fixed is None else [(piece.stop - piece.start, piece.stop) for piece in self._fixed]
        self._full = [PromptAttention(prefill.heads, workspace=prefill.workspace, graph_sizes=both) for both in sizes]

    @property
    def least_rows(self) -> int:
        """Of a chunk that a graph holds: its last row is one of the last piece."""
        return self._fixed[-1].start + 1 if self._fixed else 1

    def run(
        self,
        inputs: ChunkInputs,
        attention: PromptChunkAttention | None,
        kv: KVCache,
        *,
        want_logits: bool,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """As `CudaPrefill.run`. `attention`: for the last row alone; None in a graph, where all rows of the last piece attend for it.

        Effects: joins two sums per layer and piece, then the one of the last layer's single row; capturable where the sums are
        """
        p = self._prefill
        layers, tokens = p.weights.layers, inputs.token_ids.shape[0]
        pieces = self._fixed or cut_pieces(tokens, self._pieces, self._least_tokens)
        for planned, piece in zip(self._full, pieces, strict=False):
            planned.plan(piece.stop - piece.start, piece.stop)
        residual = torch.nn.functional.embedding(inputs.token_ids, p.weights.embed)
        counts = torch.zeros((len(layers), layers[0].gate_up.values.shape[0]), dtype=torch.int32, device=p.device)
        sums: list[PendingSum | None] = [None] * len(pieces)
        shape = (tokens, p.heads.num_kv_heads, p.heads.head_dim)
        kv_rows = (residual.new_empty(shape), residual.new_empty(shape))
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            q: Tensor | None = None
            for number, piece in enumerate(pieces):
                pending = sums[number]
                q = self._write_kv(index, layer, residual[piece], pending() if pending else None, inputs, piece, kv, kv_rows)
                if index < last:
                    attended = self._attend(index, layer, number, piece, q, kv_rows)
                    sums[number] = p.group.start_all_reduce(project_output(attended, layer.o))
                if on_layer is not None and number == len(pieces) - 1:
                    on_layer(index)
            if index < last:
                self._experts(index, layer, residual, sums, pieces, counts[index], inputs.num_tokens)
        if not want_logits:
            return residual.new_empty((0, p.config.vocab_size), dtype=torch.float32)
        assert q is not None
        row, final = inputs.last_row - pieces[-1].start, layers[last]
        if attention is None:
            attended = self._attend(last, final, len(pieces) - 1, pieces[-1], q, kv_rows).index_select(0, row)
        else:
            attended = attention.attend_last(q, row, kv_rows, kv.layer(last), final.sinks)
        return p.last_row_logits(residual, attended, inputs.last_row, counts[last])

    def _write_kv(self, index, layer, residual, delta, inputs: ChunkInputs, piece: slice, kv: KVCache, kv_rows) -> Tensor:
        """Ends the layer before for one piece, then its norm, projection, rotation and K/V. Returns: q [P, H, D]"""
        p = self._prefill
        norm = add_norm_quantize if isinstance(layer.qkv, Fp8Weight) else add_norm
        rows = norm(residual, layer.attn_norm, p.config.rms_norm_eps, delta=delta)
        slots = inputs.sliding_slots if p.config.sliding[index] else inputs.full_slots
        return rope_write_kv(
            project(rows, layer.qkv), layer.qkv_bias, p.cos_sin, inputs.positions[piece], slots[piece], kv.layer(index),
            p.heads.num_qo_heads, kv_rows=(kv_rows[0][piece], kv_rows[1][piece]),
        )  # fmt: skip

    def _attend(self, index: int, layer: PrefillLayer, number: int, piece: slice, q: Tensor, kv_rows: tuple[Tensor, Tensor]) -> Tensor:
        config = self._prefill.config
        if not config.sliding[index]:
            return self._full[number].run(q, kv_rows[0][: piece.stop], kv_rows[1][: piece.stop], layer.sinks)
        seen = slice(max(piece.start - config.window_tokens + 1, 0), piece.stop)
        return window_attention(q, kv_rows[0][seen], kv_rows[1][seen], layer.sinks, config.window_tokens)

    def _experts(
        self,
        index: int,
        layer: PrefillLayer,
        residual: Tensor,
        sums: list[PendingSum | None],
        pieces: list[slice],
        counts: Tensor,
        num_tokens: Tensor,
    ) -> None:
        """Ends the attention of every piece, runs the experts over all, begins the sum of every piece."""
        p, config = self._prefill, self._prefill.config
        q, scales = empty_fp8_rows(residual.shape[0], residual.shape[1], residual.device, BIAS_COLUMNS)
        inverse_rms = torch.empty(residual.shape[0], dtype=torch.float32, device=residual.device)
        for pending, piece in zip(sums, pieces, strict=True):
            assert pending is not None
            add_norm_quantize(
                residual[piece], layer.mlp_norm, config.rms_norm_eps, delta=pending(), delta_bias=layer.o_bias,
                bias_columns=BIAS_COLUMNS, inverse_rms=inverse_rms[piece], out=(q[piece], scales[piece]),
            )  # fmt: skip
        y, routing, rows = p.run_experts(index, residual, inverse_rms, (q, scales), counts, num_tokens)
        for number, piece in enumerate(pieces):
            sums[number] = p.group.start_all_reduce(combine(y, rows[piece], routing.expert_weights[piece]))
