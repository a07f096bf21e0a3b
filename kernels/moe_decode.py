"""Mixture-of-experts products of a decode step on MXFP4 weights (W4A16): few tokens, so the weights' bytes are the time.

Owns the packed weight layout and the launch (gate/up with SwiGLU, then down, in one kernel). Routing and the weighted sum over a token's
experts are in `decode_fused.py`. Called by `model/decode_cuda.py`.

Layout of packed weights `[E, R/32, C/32, 544] uint8`: one unit holds 32 rows x 32 columns. Bytes 0..511 are 32 lanes x 16 bytes, lane
4 g + c has the eight columns 8 c .. 8 c + 7 of rows g, g + 8, g + 16 and g + 24; bytes 512..543 are the scales of those rows, g by g, as
2^(scale - 1)'s bf16 exponent. A warp's load is thus a whole number of lines and lands in the registers that the tensor core wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError, ShapeError
from kernels import cuda_library
from kernels.reference import MXFP4_GROUP, experts_ref, mxfp4_dequant_ref

UNIT_ROWS, UNIT_BYTES, CODE_BYTES = 32, 544, 512
MAX_SCALE = 128  # 2^1: the kernel multiplies by 2^(scale - 1), whose exponent must fit a byte
# For each pair of columns (2 j, 2 j + 1) of a lane's eight: where the word keeps sign, exponent high, exponent low, mantissa of each
# half, chosen so that one rotation (or one multiplication, for the last pair) brings all four to their places in bf16.
BIT_PLACES = (
    ((15, 8, 7, 6), (31, 24, 23, 22)),
    ((2, 27, 26, 25), (18, 11, 10, 9)),
    ((5, 30, 29, 28), (21, 14, 13, 12)),
    ((3, 1, 0, 4), (19, 17, 16, 20)),
)


class ExpertOutputs(NamedTuple):
    """What the experts of a step leave for the weighted sum over a token's choices.

    Shapes: rows None: pairs [B, k, C] bf16, entries of experts that are not local hold anything; else rows [B, k] int32: whose row of
        pairs [M, C] a choice's output is, -1 if its expert is not local
    """

    pairs: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True)
class Mxfp4Scratch:
    """What the experts of a step need, at the largest batch. Shapes: hidden [B * k, I], pairs [B, k, C] bf16; arrived [2] int32, zero"""

    hidden: Tensor
    pairs: Tensor
    arrived: Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's local experts for decode.

    Shapes: gate_up [E, 2I/32, C/32, 544] uint8; gate_up_bias [E, 2I] bf16, interleaved as in the checkpoint
    Shapes: down [E, C/32, I/32, 544] uint8; down_bias [E, C] bf16
    Units: first_expert: global id of local expert 0
    """

    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    first_expert: int = 0

    @property
    def num_local(self) -> int:
        return self.gate_up.shape[0]

    def scratch(self, tokens: int, k: int, device: torch.device | str) -> Mxfp4Scratch:
        inner, hidden = self.gate_up.shape[1] * UNIT_ROWS // 2, self.down.shape[1] * UNIT_ROWS
        return Mxfp4Scratch(
            torch.empty(tokens * k, inner, dtype=torch.bfloat16, device=device),
            torch.empty(tokens, k, hidden, dtype=torch.bfloat16, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )

    def run(self, x: Tensor, expert_ids: Tensor, scratch: Mxfp4Scratch, *, alpha: float, limit: float) -> ExpertOutputs:
        """As `experts_decode`, over the scratch's first rows."""
        hidden, out = scratch.hidden[: expert_ids.numel()], scratch.pairs[: x.shape[0]]
        return ExpertOutputs(experts_decode(x, expert_ids, self, hidden=hidden, arrived=scratch.arrived, out=out, alpha=alpha, limit=limit))


def pack_mxfp4(blocks: Tensor, scales: Tensor, *, gate_up: bool) -> Tensor:
    """Checkpoint MXFP4 to the packed layout.

    Shapes: blocks [E, R, C/32, 16] uint8; scales [E, R, C/32] uint8; R a multiple of 32
    Units: gate_up: rows 2i and 2i + 1 (gate, up) go to rows g and g + 8 of 16, so that SwiGLU finds both in one lane
    Returns: [E, R/32, C/32, 544] uint8 on blocks.device; the same values, nothing is rounded
    Raises: ShapeError; ConfigError for a scale above 2^1, which no real checkpoint has
    """
    experts, rows, groups, _ = blocks.shape
    if rows % UNIT_ROWS or scales.shape != blocks.shape[:3]:
        raise ShapeError(f"pack_mxfp4: blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} don't fit 32-row units")
    if int(scales.max()) > MAX_SCALE:
        raise ConfigError(f"MXFP4 scale byte {int(scales.max())} is above {MAX_SCALE}: the decode kernel can't represent it")
    packed = torch.empty(experts, rows // UNIT_ROWS, groups, UNIT_BYTES, dtype=torch.uint8, device=blocks.device)
    for e in range(experts):  # one at a time: the working copies are 8 times the weights
        codes = torch.stack((blocks[e] & 0xF, blocks[e] >> 4), dim=-1).flatten(-2).int()  # [R, G, 32]
        codes = _to_units(codes, gate_up).unflatten(-1, (4, 4, 2))  # [T, 4 rows, 8, G, 4 lanes, 4 pairs, 2 halves]
        words = torch.zeros(codes.shape[:-2], dtype=torch.int32, device=blocks.device)
        for pair, halves in enumerate(BIT_PLACES):
            for half, places in enumerate(halves):
                for bit, place in zip((3, 2, 1, 0), places, strict=True):
                    words |= (codes[..., pair, half] >> bit & 1) << place
        # [T, row, g, G, c] -> [T, G, g, c, row]
        lanes = words.permute(0, 3, 2, 4, 1).contiguous()
        packed[e, :, :, :CODE_BYTES] = lanes.view(torch.uint8).flatten(2)
        exponents = _to_units(scales[e].int() + 126, gate_up).to(torch.uint8)  # [T, row, g, G]
        packed[e, :, :, CODE_BYTES:] = exponents.permute(0, 3, 2, 1).flatten(2)
    return packed


def unpack_mxfp4(packed: Tensor, *, gate_up: bool) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_mxfp4`: blocks [E, R, C/32, 16] and scales [E, R, C/32], both uint8."""
    experts, tiles, groups, _ = packed.shape
    words = packed[..., :CODE_BYTES].contiguous().view(torch.int32).unflatten(-1, (8, 4, 4))  # [E, T, G, g, c, row]
    codes = torch.zeros(*words.shape, 4, 2, dtype=torch.int32, device=packed.device)
    for pair, halves in enumerate(BIT_PLACES):
        for half, places in enumerate(halves):
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                codes[..., pair, half] |= (words >> place & 1) << bit
    codes = codes.permute(0, 1, 5, 3, 2, 4, 6, 7).flatten(5)  # [E, T, row, g, G, 32]
    scales = packed[..., CODE_BYTES:].unflatten(-1, (8, 4)).permute(0, 1, 4, 3, 2)  # [E, T, row, g, G]
    if gate_up:
        codes, scales = (x.unflatten(2, (2, 2)).transpose(3, 4) for x in (codes, scales))
    codes = codes.reshape(experts, tiles * UNIT_ROWS, groups, MXFP4_GROUP).to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (scales.reshape(experts, tiles * UNIT_ROWS, groups).int() - 126).to(torch.uint8)


GROUP_TOKENS = (8, 16)  # tokens of an expert that a warp multiplies at a time: the instances of the kernel


def choose_group_tokens(pairs: int) -> int:
    """The fastest instance for `pairs` (token, expert) pairs. A result does not depend on it, bit for bit."""
    return 8 if pairs <= 32 else 16  # more are not grouped without a barrier of the block


def _to_units(rows: Tensor, gate_up: bool) -> Tensor:
    """[R, ...] -> [R/32, 4, 8, ...]: which of the lane's four rows, and g, of each unit."""
    if gate_up:
        return rows.unflatten(0, (-1, 2, 8, 2)).transpose(2, 3).flatten(1, 2)
    return rows.unflatten(0, (-1, 4, 8))


def experts_decode(
    x: Tensor,
    expert_ids: Tensor,
    weights: ExpertWeights,
    *,
    hidden: Tensor,
    arrived: Tensor,
    out: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Every (token, expert) pair's output before the weighted sum.

    Shapes: x [B, C] bf16; expert_ids [B, k] int32, -1 for padded rows; hidden [B * k, I] bf16 scratch; out [B, k, C] bf16
    Shapes: arrived [2] int32, zero between launches
    Returns: out; entries of experts that are not local, or -1, are left as they were
    Effects: one kernel that fills the device; no host sync; capturable. A pair's result does not depend on the other pairs, bit for bit.
    Raises: KernelError for a shape without instance
    """
    if not cuda_library.runs(x):
        return _experts_on_cpu(x, expert_ids, weights, out, alpha, limit)
    launch_experts(x, expert_ids, weights, hidden, arrived, out, alpha=alpha, limit=limit)
    return out


def launch_experts(
    x,
    expert_ids,
    weights: ExpertWeights,
    hidden,
    arrived,
    out,
    *,
    alpha: float,
    limit: float,
    blocks: int = 0,
    group_tokens: int = 0,
) -> None:
    """The launch alone; arguments as in `experts_decode`. `blocks` must all fit on the device at once; 0 takes one a multiprocessor,
    `group_tokens` 0 the fastest."""
    tokens, k = expert_ids.shape
    experts, tiles = weights.gate_up.shape[:2]
    cuda_library.call(
        "moe_decode", "tandem_moe_experts", x, weights.gate_up, weights.gate_up_bias, weights.down, weights.down_bias, expert_ids, hidden,
        out, arrived, tokens, k, x.shape[1], tiles, weights.down.shape[1], weights.first_expert,
        experts, float(alpha), float(limit), group_tokens or choose_group_tokens(tokens * k),
        blocks or cuda_library.multiprocessors(x.device.index or 0),
    )  # fmt: skip


def _experts_on_cpu(x, expert_ids, weights: ExpertWeights, out, alpha, limit):
    """Plain torch on unpacked weights: one pair is one token with one expert of weight 1."""
    gate_up = mxfp4_dequant_ref(*unpack_mxfp4(weights.gate_up, gate_up=True))
    down = mxfp4_dequant_ref(*unpack_mxfp4(weights.down, gate_up=False))
    ids = expert_ids.reshape(-1, 1).long()
    pairs = experts_ref(
        x.float().repeat_interleave(expert_ids.shape[1], 0), ids, torch.ones_like(ids, dtype=torch.float32), gate_up,
        weights.gate_up_bias.float(), down, weights.down_bias.float(), first_expert=weights.first_expert, alpha=alpha, limit=limit,
    )  # fmt: skip
    local = (ids >= weights.first_expert) & (ids < weights.first_expert + gate_up.shape[0])
    out.copy_(torch.where(local, pairs.to(out.dtype), out.flatten(0, 1)).view_as(out))
    return out
