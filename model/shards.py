"""The weights that one rank holds, as plain data. Filled by `model/weights.py`, read by the forward passes.

Legend: C hidden, E local experts, I local intermediate, H local query heads, K local KV heads, D head_dim, V vocabulary, G groups of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mxfp4Matrix:
    """Experts' matrices as in the checkpoint: blocks [E, R, G, 16] uint8, scales [E, R, G] uint8, G = columns / 32."""

    blocks: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Fp8Matrix:
    """Experts' matrices in 128x128 blocks, padded with zeros: values [E, R', C'] float8_e4m3fn, scales [E, R'/128, C'/128] fp32.

    `rows`, `columns`: the sizes without padding.
    """

    values: Tensor
    scales: Tensor
    rows: int
    columns: int


ExpertMatrix = Tensor | Mxfp4Matrix | Fp8Matrix


@dataclass(frozen=True)
class ExpertShard:
    """A rank's experts, or its piece of every expert.

    Shapes: gate_up [E, 2I, C], rows 2i gate, 2i + 1 up; gate_up_bias [E, 2I] fp32; down [E, C, I]; down_bias [E, C] fp32, zero on the
        ranks that must not add it
    Units: first_expert: global id of local expert 0; intermediate: I, may be 0 on the last ranks of a small model
    """

    first_expert: int
    intermediate: int
    gate_up: ExpertMatrix
    gate_up_bias: Tensor
    down: ExpertMatrix
    down_bias: Tensor


@dataclass(frozen=True)
class LayerShard:
    """One layer on one rank.

    Shapes: qkv [(H + 2K) * D, C], rows q, k, v; qkv_bias [(H + 2K) * D]; o [C, H * D]; o_bias [C], whole on every rank: added once, after
        the sum over ranks; sinks [H] fp32; router [all experts, C]; router_bias [all experts]; the norms [C]
    """

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    sinks: Tensor
    o: Tensor
    o_bias: Tensor
    mlp_norm: Tensor
    router: Tensor
    router_bias: Tensor
    experts: ExpertShard


@dataclass(frozen=True)
class ShardWeights:
    """A rank's share of the model.

    Shapes: embed [V, C], whole on every rank; norm [C]; lm_head [local rows, C]: rows from `vocab_start`, fewer on the last ranks if
        the vocabulary doesn't divide
    """

    tp: int
    ep: int
    rank: int
    embed: Tensor
    layers: tuple[LayerShard, ...]
    norm: Tensor
    lm_head: Tensor
    vocab_start: int
