"""Greedy generation with a KV cache for batches of prompts of mixed length, in compact vocabulary rows.

Prompts are padded on the right; a slot of the cache is a position, so causality hides the padding and later tokens
overwrite it. Called by `evaluate`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tools.tiny_gpt_oss.attention import SLIDING_WINDOW
from tools.tiny_gpt_oss.network import KeyValueCache, TinyGptOss


def _masks(positions: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """(sliding, full) masks [B, T, slots] for queries at positions [B, T]."""
    distance = positions[..., None] - torch.arange(slots, device=positions.device)
    return (distance >= 0) & (distance < SLIDING_WINDOW), distance >= 0


@torch.no_grad()
def generate_greedy(
    model: TinyGptOss, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_rows: set[int], dtype: torch.dtype
) -> list[list[int]]:
    """Continuations up to and including a stop row, at most `max_new_tokens` each.

    Uses the weights as they are, with no fake quantisation.
    """
    config, device = model.config, model.lm_head.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths.max())
    slots = longest + max_new_tokens
    rows = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    like = torch.empty(0, dtype=dtype, device=device)
    caches = [
        KeyValueCache(len(prompts), slots, config.num_key_value_heads, config.head_dim, like) for _ in range(config.num_hidden_layers)
    ]
    no_quantisation = torch.zeros((), device=device)
    # The prompt pass sees only its own slots: the rest of the cache is still empty.
    prompt_masks = tuple(torch.nn.functional.pad(mask, (0, max_new_tokens)) for mask in _masks(positions, longest))
    hidden, _ = model(rows, positions, prompt_masks, no_quantisation, caches=caches, dtype=dtype)
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    stops = torch.tensor(sorted(stop_rows), device=device)
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    written: list[Tensor] = []
    for step in range(max_new_tokens):
        token = model.logits(last)[:, : config.vocabulary_rows].argmax(-1)
        written.append(token)
        is_done |= torch.isin(token, stops)
        if step + 1 == max_new_tokens or bool(is_done.all()):
            break
        at = (lengths + step)[:, None]
        hidden, _ = model(token[:, None], at, _masks(at, slots), no_quantisation, caches=caches, dtype=dtype)
        last = hidden[:, 0]
    return [_until_stop(row, stop_rows) for row in torch.stack(written, dim=1).tolist()]


def _until_stop(rows: list[int], stop_rows: set[int]) -> list[int]:
    for index, row in enumerate(rows):
        if row in stop_rows:
            return rows[: index + 1]
    return rows
