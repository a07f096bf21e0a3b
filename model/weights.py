"""Loads one rank's share of a checkpoint, tensor by tensor and expert by expert.

Plain forward passes take experts decoded to the compute dtype; the GPU kernels take them packed, as the files hold them. Called by each
rank of a group at start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels.reference import fp8_dequant_blocks_ref, mxfp4_dequant_ref
from model.checkpoint import Checkpoint, open_checkpoint
from model.config import MXFP4_GROUP, ModelConfig
from model.fp8_folder import FP8_BLOCK, Fp8Folder, open_fp8_folder, padded
from model.layout import RankCut, cut_for_rank
from model.shards import ExpertMatrix, ExpertShard, Fp8Matrix, LayerShard, Mxfp4Matrix, ShardWeights

WeightFormat = Literal["mxfp4", "fp8", "bf16"]


def load_shard(
    path: Path,
    config: ModelConfig,
    *,
    tp: int,
    ep: int,
    rank: int,
    device: torch.device | str,
    dtype: torch.dtype,
    weights: WeightFormat,
    packed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ShardWeights:
    """Reads what `rank` of the layout holds.

    Units: weights: the experts' format; packed: experts keep it, for kernels that read it; progress(done, total) counts layers, and one
        more for embedding and head
    Returns: weights in dtype, but for packed experts
    Effects: all headers are checked before any tensor is read; host memory above the result stays below one layer
    Raises: ConfigError listing everything wrong with the files; or that the layout does not fit; or, for "fp8", to run `tandem convert`
    """
    cut = cut_for_rank(config, tp=tp, ep=ep, rank=rank, granule=FP8_BLOCK if weights == "fp8" else MXFP4_GROUP)
    checkpoint = open_checkpoint(path, config)
    fp8 = open_fp8_folder(path, config, checkpoint) if weights == "fp8" else None
    loader = _Loader(checkpoint, fp8, config, cut, torch.device(device), dtype, packed)
    layers = []
    for layer in range(config.num_layers):
        layers.append(loader.layer(layer))
        if progress:
            progress(layer + 1, config.num_layers + 1)
    result = ShardWeights(
        tp=tp,
        ep=ep,
        rank=rank,
        embed=loader.dense("model.embed_tokens.weight"),
        layers=tuple(layers),
        norm=loader.dense("model.norm.weight"),
        lm_head=loader.dense("lm_head.weight", rows=cut.vocab),
        vocab_start=cut.vocab.start,
    )
    if progress:
        progress(config.num_layers + 1, config.num_layers + 1)
    return result


class _Loader:
    """Copies slices of mapped files to the device; every copy is followed by giving the pages back."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        fp8: Fp8Folder | None,
        config: ModelConfig,
        cut: RankCut,
        device: torch.device,
        dtype: torch.dtype,
        packed: bool,
    ):
        self._checkpoint = checkpoint
        self._fp8 = fp8
        self._config = config
        self._cut = cut
        self._device = device
        self._dtype = dtype
        self._packed = packed

    def dense(self, name: str, *, rows: range | None = None, columns: range | None = None, dtype: torch.dtype | None = None) -> Tensor:
        view = self._checkpoint.tensor(name)
        if rows is not None:
            view = view[rows.start : rows.stop]
        if columns is not None:
            view = view[:, columns.start : columns.stop]
        return self._copied(view, dtype or self._dtype)

    def layer(self, layer: int) -> LayerShard:
        prefix, cut, dim = f"model.layers.{layer}.", self._cut, self._config.head_dim
        q_rows, kv_rows = (range(heads.start * dim, heads.stop * dim) for heads in (cut.qo_heads, cut.kv_heads))
        attn = prefix + "self_attn."
        qkv = [
            [self.dense(f"{attn}{part}_proj.{kind}", rows=rows) for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))]
            for kind in ("weight", "bias")
        ]
        return LayerShard(
            attn_norm=self.dense(prefix + "input_layernorm.weight"),
            qkv=torch.cat(qkv[0]),
            qkv_bias=torch.cat(qkv[1]),
            sinks=self.dense(attn + "sinks", rows=cut.qo_heads, dtype=torch.float32),
            o=self.dense(attn + "o_proj.weight", columns=q_rows),
            o_bias=self.dense(attn + "o_proj.bias"),
            mlp_norm=self.dense(prefix + "post_attention_layernorm.weight"),
            router=self.dense(prefix + "mlp.router.weight"),
            router_bias=self.dense(prefix + "mlp.router.bias"),
            experts=self._experts(layer),
        )

    def _experts(self, layer: int) -> ExpertShard:
        cut, config = self._cut, self._config
        name = f"model.layers.{layer}.mlp.experts."
        inner = cut.intermediate
        wide = range(2 * inner.start, 2 * inner.stop)  # gate and up of one unit are neighbours, so they are cut together
        matrix = self._from_mxfp4 if self._fp8 is None else self._from_fp8
        gate_up_bias = self._checkpoint.tensor(name + "gate_up_proj_bias")[cut.experts.start : cut.experts.stop, wide.start : wide.stop]
        down_bias = self.dense(name + "down_proj_bias", rows=cut.experts, dtype=torch.float32)
        return ExpertShard(
            first_expert=cut.experts.start,
            intermediate=len(inner),
            gate_up=matrix(layer, "gate_up", wide, range(config.hidden_size)),
            gate_up_bias=self._copied(gate_up_bias, torch.float32),
            down=matrix(layer, "down", range(config.hidden_size), inner),
            down_bias=down_bias if cut.adds_down_bias else down_bias.zero_(),
        )

    def _from_mxfp4(self, layer: int, name: str, rows: range, columns: range) -> ExpertMatrix:
        prefix, experts = f"model.layers.{layer}.mlp.experts.{name}_proj", self._cut.experts
        groups = slice(columns.start // MXFP4_GROUP, columns.stop // MXFP4_GROUP)
        where = (slice(experts.start, experts.stop), slice(rows.start, rows.stop), groups)
        blocks = self._checkpoint.tensor(prefix + "_blocks")[where]
        scales = self._checkpoint.tensor(prefix + "_scales")[where]
        if self._packed:
            return Mxfp4Matrix(self._copied(blocks, torch.uint8), self._copied(scales, torch.uint8))
        out = torch.empty((len(experts), len(rows), len(columns)), dtype=self._dtype, device=self._device)
        for expert in range(len(experts)):
            out[expert] = mxfp4_dequant_ref(blocks[expert].to(self._device), scales[expert].to(self._device), self._dtype)
            self._checkpoint.release()
        return out

    def _from_fp8(self, layer: int, name: str, rows: range, columns: range) -> ExpertMatrix:
        assert self._fp8 is not None
        experts = self._cut.experts
        spans = [(span.start, span.start + padded(len(span))) for span in (rows, columns)]
        values = self._fp8.tensor(layer, name + ".values")[experts.start : experts.stop, slice(*spans[0]), slice(*spans[1])]
        in_blocks = [slice(begin // FP8_BLOCK, end // FP8_BLOCK) for begin, end in spans]
        scales = self._fp8.tensor(layer, name + ".scales")[experts.start : experts.stop, in_blocks[0], in_blocks[1]]
        if self._packed:
            return Fp8Matrix(self._copied(values, values.dtype), self._copied(scales, scales.dtype), len(rows), len(columns))
        out = torch.empty((len(experts), len(rows), len(columns)), dtype=self._dtype, device=self._device)
        for expert in range(len(experts)):
            out[expert] = fp8_dequant_blocks_ref(values[expert], scales[expert], len(rows), len(columns))
            self._fp8.release(layer)
        return out

    def _copied(self, view: Tensor, dtype: torch.dtype) -> Tensor:
        copy = torch.empty(view.shape, dtype=dtype, device=self._device)
        copy.copy_(view)
        self._checkpoint.release()
        return copy
