"""Router: RMSNorm folded into the router's GEMM, top-k, softmax of the chosen, and each choice's rank within its expert, in one pass.

The residual is exact in bf16; its product with the norm weight is split into two bf16 terms, so logits carry fp32's accuracy.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "first_expert", "num_local"])
def _route(
    residual_ptr, norm_weight_ptr, router_weight_ptr, router_bias_ptr, offset_ptr, ids_ptr, weights_ptr, ranks_ptr, counts_ptr,
    num_tokens_ptr, num_rows, first_expert, num_local, eps,
    COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_NUM_TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, PADDED_EXPERTS)
    present = token < num_rows
    logits = tl.zeros((BLOCK_T, PADDED_EXPERTS), dtype=tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    row_start = residual_ptr + token.to(tl.int64)[:, None] * COLUMNS
    for start in range(0, COLUMNS, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        inside = column < COLUMNS
        x = tl.load(row_start + column[None, :], mask=present[:, None] & inside[None, :], other=0.0).to(tl.float32)
        scaled = x * tl.load(norm_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        w = tl.load(
            router_weight_ptr + expert[None, :] * COLUMNS + column[:, None],
            mask=(expert < EXPERTS)[None, :] & inside[:, None], other=0.0,
        ).to(DOT)  # fmt: skip
        high = scaled.to(tl.bfloat16)
        low = (scaled - high.to(tl.float32)).to(tl.bfloat16)
        logits = tl.dot(high.to(DOT), w, logits, input_precision="ieee")
        logits = tl.dot(low.to(DOT), w, logits, input_precision="ieee")
        squares += x * x
    logits *= tl.rsqrt(tl.sum(squares, axis=1) / COLUMNS + eps)[:, None]
    logits += tl.load(router_bias_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)[None, :]
    if HAS_OFFSET:
        logits += tl.load(
            offset_ptr + token[:, None] * EXPERTS + expert[None, :], mask=present[:, None] & (expert < EXPERTS)[None, :], other=0.0
        )
    logits = tl.where((expert < EXPERTS)[None, :], logits, float("-inf"))
    routed = present
    if HAS_NUM_TOKENS:
        routed = present & (token < tl.load(num_tokens_ptr))

    choice = tl.arange(0, PADDED_K)
    chosen = tl.zeros((BLOCK_T, PADDED_K), dtype=tl.int32)
    values = tl.full((BLOCK_T, PADDED_K), float("-inf"), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        value, best = tl.max(logits, axis=1, return_indices=True, return_indices_tie_break_left=True)
        logits = tl.where(expert[None, :] == best[:, None], float("-inf"), logits)
        chosen = tl.where(choice[None, :] == k, best[:, None], chosen)
        values = tl.where(choice[None, :] == k, value[:, None], values)
    shares = tl.exp(values - tl.max(values, axis=1)[:, None])
    shares /= tl.sum(shares, axis=1)[:, None]
    local = chosen - first_expert
    wanted = (choice < TOP_K)[None, :] & present[:, None]
    counted = wanted & routed[:, None] & (local >= 0) & (local < num_local)
    ranks = tl.atomic_add(counts_ptr + local, 1, mask=counted, sem="relaxed")
    at = token[:, None] * TOP_K + choice[None, :]
    tl.store(ids_ptr + at, chosen, mask=wanted)
    tl.store(weights_ptr + at, shares, mask=wanted)
    tl.store(ranks_ptr + at, tl.where(counted, ranks, -1), mask=wanted)


def launch_route(
    residual,
    norm_weight,
    router_weight,
    router_bias,
    logit_offset,
    ids,
    weights,
    ranks,
    counts,
    num_tokens,
    first_expert: int,
    eps: float,
) -> None:
    """residual [T, C]; router_weight [E, C]; ids, weights, ranks [T, k] and counts [num_local_experts] int32 (zeros before): filled."""
    tokens, columns = residual.shape
    experts, top_k = router_weight.shape[0], ids.shape[1]
    interpreted = not residual.is_cuda
    block_t = 16 if tokens <= 2048 else 64
    _route[(triton.cdiv(tokens, block_t),)](
        residual, norm_weight, router_weight, router_bias, weights if logit_offset is None else logit_offset,
        ids, weights, ranks, counts, counts if num_tokens is None else num_tokens, tokens, first_expert, counts.shape[0], eps,
        COLUMNS=columns, EXPERTS=experts, PADDED_EXPERTS=triton.next_power_of_2(experts), TOP_K=top_k,
        PADDED_K=triton.next_power_of_2(top_k), HAS_OFFSET=logit_offset is not None, HAS_NUM_TOKENS=num_tokens is not None,
        BLOCK_T=block_t, BLOCK_C=64, DOT=tl.float32 if interpreted else tl.bfloat16, num_warps=4, num_stages=3,
    )  # fmt: skip
