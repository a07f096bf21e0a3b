"""Router of the MoE layer: from the residual stream to chosen experts, their weights and their places, in fp32 accuracy.

The norm's weight is folded into the router's at load, as a sum of two bf16 terms that hold the product exactly, and the row's 1 / RMS is
applied to the products. So the tensor cores read the bf16 residual itself, never a rounded norm, and the choice equals fp32's.
Called by `model/`. Legend: T tokens, C hidden_size, E experts, k experts_per_token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import route_ref


@dataclass(frozen=True)
class Routing:
    """Where each token goes.

    Shapes: expert_ids [T, k] int32, global; expert_weights [T, k] fp32; ranks [T, k] int32: place among its expert's rows, -1 if not local
    Shapes: counts [num_local_experts] int32: rows per local expert
    """

    expert_ids: Tensor
    expert_weights: Tensor
    ranks: Tensor
    counts: Tensor


def fold_router(weight: Tensor, norm_weight: Tensor) -> Tensor:
    """The router's weight times the norm's, as bf16 high terms above bf16 low terms: what `route` takes.

    Shapes: weight [E, C]; norm_weight [C]
    Returns: [2E, C] bf16; high + low differs from the exact product of bf16 factors by less than 2^-17 of it
    """
    product = weight.float() * norm_weight.float()
    high = product.bfloat16()
    return torch.cat((high, (product - high.float()).bfloat16()))


def route(
    residual: Tensor,
    inverse_rms: Tensor,
    folded: Tensor,
    router_bias: Tensor,
    experts_per_token: int,
    counts: Tensor,
    *,
    first_expert: int = 0,
    num_tokens: Tensor | None = None,
    logit_offset: Tensor | None = None,
) -> Routing:
    """Router projection of the normed residual, top-k and softmax over the chosen.

    Shapes: residual [T, C] bf16; inverse_rms [T] fp32; folded [2E, C] from `fold_router`; router_bias [E]
    Shapes: counts [num_local_experts] int32, zeros
    Shapes: num_tokens [1] int32: rows from there on are padding and take no expert row; None: all rows count
    Shapes: logit_offset [T, E] fp32, added to the logits; benchmarks with random weights spread the routing with it
    Returns: Routing; ids by falling logit, ties to the lower id, equal on every rank. Ranks within an expert are in no fixed order
    Effects: adds to counts; two kernels; capturable; no host sync
    Source: `rms_norm_ref`, `route_ref`
    """
    tokens = residual.shape[0]
    shape = (tokens, experts_per_token)
    if not residual.is_cuda:
        high, low = (residual.float() @ folded.float().t()).chunk(2, dim=1)
        logits = (high + low) * inverse_rms[:, None] + router_bias.float()
        ids, weights = route_ref(logits if logit_offset is None else logits + logit_offset, experts_per_token)
        used = tokens if num_tokens is None else int(num_tokens)
        return Routing(ids.int(), weights, _ranks_ref(ids, counts, first_expert, used), counts)
    from kernels.triton_ops.router import launch_choose

    ids = torch.empty(shape, dtype=torch.int32, device=residual.device)
    ranks = torch.empty_like(ids)
    weights = torch.empty(shape, dtype=torch.float32, device=residual.device)
    if tokens:
        products = torch.mm(residual, folded.t(), out_dtype=torch.float32)
        launch_choose(products, inverse_rms, router_bias, logit_offset, ids, weights, ranks, counts, num_tokens, first_expert)
    return Routing(ids, weights, ranks, counts)


def _ranks_ref(ids: Tensor, counts: Tensor, first_expert: int, used: int) -> Tensor:
    ranks = torch.full(ids.shape, -1, dtype=torch.int32)
    for token, choices in enumerate(ids[:used].tolist()):
        for k, expert in enumerate(choices):
            local = expert - first_expert
            if 0 <= local < counts.shape[0]:
                ranks[token, k] = counts[local]
                counts[local] += 1
    return ranks
