"""Attention of gpt-oss for training: YaRN, sinks, document and sliding-window masks, a flex and an explicit path.

Both paths compute the same: softmax over the visible keys and one learned sink logit whose column is dropped.
The explicit one is the readable reference, used on the CPU and for generation. Called by `network` and `train`.
"""

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

SLIDING_WINDOW = 128  # keys visible, the query's own included
BLOCK = 128
ROPE_THETA, ROPE_FACTOR, ROPE_ORIGINAL_TOKENS = 150_000.0, 32.0, 4096
ROPE_BETA_FAST, ROPE_BETA_SLOW = 32.0, 1.0
ROPE_CONCENTRATION = 0.1 * math.log(ROPE_FACTOR) + 1.0
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, object], Tensor]


def yarn_inverse_frequencies(head_dim: int) -> Tensor:
    """[head_dim / 2] fp32; the ramp's ends are not rounded."""
    half = head_dim // 2
    index = torch.arange(half, dtype=torch.float64)
    frequency = ROPE_THETA ** (index / half)
    low = half * math.log(ROPE_ORIGINAL_TOKENS / (ROPE_BETA_FAST * 2 * math.pi)) / math.log(ROPE_THETA)
    high = half * math.log(ROPE_ORIGINAL_TOKENS / (ROPE_BETA_SLOW * 2 * math.pi)) / math.log(ROPE_THETA)
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    return (ramp / (ROPE_FACTOR * frequency) + (1 - ramp) / frequency).float()


def rope_tables(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, head_dim / 2] fp32 for positions [B, T], with the YaRN concentration."""
    angle = positions[..., None, None].float() * inverse_frequencies
    return angle.cos() * ROPE_CONCENTRATION, angle.sin() * ROPE_CONCENTRATION


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates halves of x [B, T, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend_explicit(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, mask: object) -> Tensor:
    """Reference attention with a boolean mask.

    Shapes: query [B, T, H, D]; key, value [B, S, K, D]; sink [H]; mask [B, T, S] bool, True where visible
    Returns: [B, T, H, D]; softmax in fp32
    """
    assert isinstance(mask, Tensor)
    groups = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", query, key).float() / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    column = sink.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1].to(value.dtype)
    return torch.einsum("bhts,bshd->bthd", weights, value)


_HAS_AUX = "return_aux" in inspect.signature(flex.flex_attention).parameters


def _flex_with_lse(query: Tensor, key: Tensor, value: Tensor, mask: object) -> tuple[Tensor, Tensor]:
    """(output, natural log-sum-exp of the scaled scores) in the spelling that this torch has."""
    if _HAS_AUX:
        out, aux = flex.flex_attention(query, key, value, block_mask=mask, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
        return out, aux.lse
    return flex.flex_attention(query, key, value, block_mask=mask, enable_gqa=True, return_lse=True)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, mask: object) -> Tensor:
    """As `attend_explicit` with a BlockMask; fast only under torch.compile on a GPU.

    The sink takes part of the softmax mass, so the plain output shrinks by sum / (sum + exp(sink)).
    """
    out, lse = _flex_with_lse(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
    kept = torch.sigmoid(lse - sink.float()[None, :, None])
    return (out * kept[..., None].to(out.dtype)).transpose(1, 2)


def explicit_masks(documents: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(sliding, full) masks [B, T, T] bool of packed documents; documents and positions [B, T]."""
    same = documents[:, :, None] == documents[:, None, :]
    distance = positions[:, :, None] - positions[:, None, :]
    full = same & (distance >= 0)
    return full & (distance < SLIDING_WINDOW), full


class PackedBlockMasks:
    """BlockMasks of one packed row; keeps one document buffer, so that compiled code sees the same mask every step.

    Documents lie one after the other, so two blocks share a document exactly if their ranges of ids touch.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._documents = torch.zeros(tokens, dtype=torch.int32, device=device)
        documents = self._documents

        def full_rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[q] == documents[k])

        def sliding_rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k < SLIDING_WINDOW) & (documents[q] == documents[k])

        self._rules = (sliding_rule, full_rule)

    def update(self, documents: Tensor) -> tuple[flex.BlockMask, flex.BlockMask]:
        """(sliding, full) masks for documents [T] int32, rising ids, T a multiple of 128."""
        self._documents.copy_(documents)
        blocks = documents.view(-1, BLOCK)
        first, last = blocks[:, 0], blocks[:, -1]
        index = torch.arange(len(first), device=documents.device)
        row, column = index[:, None], index[None, :]
        touched = (column <= row) & (last[None, :] >= first[:, None])
        near = touched & (row - column <= SLIDING_WINDOW // BLOCK)
        whole = (column < row) & (first[None, :] == last[:, None])
        sliding = self._mask(near, torch.zeros_like(near), self._rules[0])
        return sliding, self._mask(touched & ~whole, whole, self._rules[1])

    @staticmethod
    def _mask(partial: Tensor, whole: Tensor, rule: Callable) -> flex.BlockMask:
        return flex.BlockMask.from_kv_blocks(*_ordered(partial), *_ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=rule)


def _ordered(dense: Tensor) -> tuple[Tensor, Tensor]:
    """(number of visible key blocks [1, 1, N], their indices first [1, 1, N, N]) of a block matrix [N, N]."""
    counts = dense.sum(-1, dtype=torch.int32)
    indices = torch.argsort(dense.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None].contiguous(), indices[None, None].contiguous()
