"""The choice of experts from the router's products: logits, top-k, softmax of the chosen, and each choice's rank within its expert."""

import triton
import triton.language as tl

BLOCK_T = 8


@triton.jit(do_not_specialize=["num_rows", "first_expert", "num_local"])
def _choose(
    products_ptr, inverse_rms_ptr, bias_ptr, offset_ptr, ids_ptr, weights_ptr, ranks_ptr, counts_ptr, num_tokens_ptr,
    num_rows, first_expert, num_local,
    EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_NUM_TOKENS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, PADDED_EXPERTS)
    present = token < num_rows
    mask = present[:, None] & (expert < EXPERTS)[None, :]
    at = products_ptr + token.to(tl.int64)[:, None] * (2 * EXPERTS) + expert[None, :]
    logits = tl.load(at, mask=mask, other=0.0) + tl.load(at + EXPERTS, mask=mask, other=0.0)
    logits *= tl.load(inverse_rms_ptr + token, mask=present, other=0.0)[:, None]
    logits += tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)[None, :]
    if HAS_OFFSET:
        logits += tl.load(offset_ptr + token[:, None] * EXPERTS + expert[None, :], mask=mask, other=0.0)
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
    place = token[:, None] * TOP_K + choice[None, :]
    tl.store(ids_ptr + place, chosen, mask=wanted)
    tl.store(weights_ptr + place, shares, mask=wanted)
    tl.store(ranks_ptr + place, tl.where(counted, ranks, -1), mask=wanted)


def launch_choose(products, inverse_rms, router_bias, logit_offset, ids, weights, ranks, counts, num_tokens, first_expert: int) -> None:
    """products [T, 2E] fp32: high and low sums; ids, weights, ranks [T, k] and counts [num_local_experts] int32 (zeros before): filled."""
    tokens, experts, top_k = products.shape[0], products.shape[1] // 2, ids.shape[1]
    _choose[(triton.cdiv(tokens, BLOCK_T),)](
        products, inverse_rms, router_bias, weights if logit_offset is None else logit_offset, ids, weights, ranks, counts,
        counts if num_tokens is None else num_tokens, tokens, first_expert, counts.shape[0],
        EXPERTS=experts, PADDED_EXPERTS=triton.next_power_of_2(experts), TOP_K=top_k, PADDED_K=triton.next_power_of_2(top_k),
        HAS_OFFSET=logit_offset is not None, HAS_NUM_TOKENS=num_tokens is not None, BLOCK_T=BLOCK_T, num_warps=4,
    )  # fmt: skip
