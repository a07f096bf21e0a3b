"""Keyed digest of KV: equal on both sides of a transfer whatever their layouts; any bit, block, head or layer out of place changes it.

A sum modulo 2^64 over all valid tokens, so that ranks, layers and chunks add their parts in any order. With x the 32-bit words of one
token's K or V of one head:

    row[layer, kv, head, position] = sum over words w of x[w] * words[w]
    digest = sum of heads[layer, kv, head] * (low half of row * positions[position, 0] + high half * positions[position, 1])

Words and halves are signed 32-bit integers. The multipliers are secret per transfer and uniform over 64 bits. That words have 32 bits
matters: of 64-bit words two flips of top bits would cancel. Whoever does not know the key hits the digest of other bytes with a chance
below 2^-28 per attempt.
Legend: N blocks, K KV heads in the tensor, S block_size, D head_dim, n blocks of the call.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ShapeError

MASK = 2**64 - 1
_CHUNK_BYTES = 128 * 1024  # stays in the cache of one core


@dataclass(frozen=True)
class DigestKey:
    """Multipliers of one transfer: words [W], positions [num_tokens, 2], heads [num_layers, 2, num_kv_heads], all int64."""

    words: Tensor
    positions: Tensor
    heads: Tensor

    @classmethod
    def derive(cls, secret: bytes, transfer_id: int, *, num_tokens: int, row_bytes: int, num_layers: int, num_kv_heads: int) -> DigestKey:
        """Expands the cluster's secret for one transfer; both sides get the same.

        Units: row_bytes = head_dim * bytes per element; num_kv_heads of the whole model
        Raises: ShapeError if a row is not a whole number of 32-bit words
        """
        if row_bytes % 4:
            raise ShapeError(f"head rows of {row_bytes} bytes: the digest takes whole 32-bit words")

        def draw(purpose: bytes, *shape: int) -> Tensor:
            count = torch.Size(shape).numel()
            stream = hashlib.shake_256(purpose + transfer_id.to_bytes(8, "little") + secret).digest(8 * count)
            return torch.frombuffer(bytearray(stream), dtype=torch.int64).view(shape)

        heads = draw(b"tandem kv digest heads", num_layers, 2, num_kv_heads) | 1
        return cls(draw(b"tandem kv digest words", row_bytes // 4), draw(b"tandem kv digest positions", num_tokens, 2), heads)


def kv_digest(
    kv: Tensor, block_ids: Tensor, *, first_logical: int, tokens: tuple[int, int], layer: int, first_head: int, key: DigestKey
) -> int:
    """Part of the digest that tokens [start, end) of one layer contribute.

    Shapes: kv [N, 2, K, S, D], last two axes contiguous; block_ids [n] int64: blocks of logical index first_logical, first_logical + 1, ...
    Units: tokens: positions in the sequence, within those blocks; first_head: index in the model of kv's head 0
    Returns: 0 <= digest < 2^64; add parts modulo 2^64
    Effects: reads kv only, its bytes (NaN and -0.0 are values like any other)
    """
    num_blocks, (num_heads, block_size) = len(block_ids), kv.shape[2:4]
    start, end = tokens
    origin = first_logical * block_size
    weights = torch.zeros(num_blocks * block_size, 2, dtype=torch.int64, device=kv.device)
    weights[start - origin : end - origin] = key.positions[start:end]
    rows = torch.empty(num_blocks, 2 * num_heads * block_size, dtype=torch.int64, device=kv.device)
    per_chunk = max(1, _CHUNK_BYTES // (kv[0].numel() * kv.element_size()))
    for i in range(0, num_blocks, per_chunk):
        words = kv.index_select(0, block_ids[i : i + per_chunk]).view(torch.int32).to(torch.int64)
        _sum_words(words.view(-1, words.shape[-1]), key.words, rows[i : i + per_chunk].view(-1))
    halves = rows.view(torch.int32).view(num_blocks, 2, num_heads, block_size, 2).to(torch.int64)
    per_head = (halves * weights.view(num_blocks, 1, 1, block_size, 2)).sum((0, 3, 4))
    return int((per_head * key.heads[layer, :, first_head : first_head + num_heads]).sum()) & MASK


def _sum_words(words: Tensor, multipliers: Tensor, out: Tensor) -> None:
    """out [rows] = words [rows, W] times multipliers [W], modulo 2^64"""
    if words.device.type == "cpu":
        torch.mv(words, multipliers, out=out)
    else:
        torch.sum(words * multipliers, -1, out=out)  # CUDA has no integer matrix product


def kv_digest_ref(
    kv: Tensor, block_ids: Tensor, *, first_logical: int, tokens: tuple[int, int], layer: int, first_head: int, key: DigestKey
) -> int:
    """Plain twin of `kv_digest`: one token, head and word at a time, in Python integers. Same shapes, units and result."""
    num_heads, block_size = kv.shape[2:4]
    words, positions, heads = key.words.tolist(), key.positions.tolist(), key.heads.tolist()
    digest = 0
    for position in range(*tokens):
        block = kv[block_ids[position // block_size - first_logical]]
        for half in range(2):
            for head in range(num_heads):
                token = block[half, head, position % block_size].contiguous().view(torch.int32).tolist()
                row = sum(x * m for x, m in zip(token, words, strict=True)) & MASK
                spread = _signed(row & 0xFFFFFFFF) * positions[position][0] + _signed(row >> 32) * positions[position][1]
                digest += heads[layer][half][first_head + head] * spread
    return digest & MASK


def _signed(half: int) -> int:
    return half - 2**32 if half >= 2**31 else half
