import math
from dataclasses import dataclass

import pytest
import torch

from common.errors import ShapeError
from kernels.attention_prefill import AttentionHeads
from kernels.attention_prompt import PromptAttention, window_attention
from kernels.reference import paged_attention_ref
from tests.kernels.triton_prefill import interpreted_ops, poisoned


@dataclass(frozen=True)
class Case:
    tokens: int
    q_heads: int = 4
    kv_heads: int = 2
    window: int = 24
    block_m: int = 32
    block_n: int = 16
    earlier: int = 0

    def __str__(self) -> str:
        return f"T{self.tokens}-H{self.q_heads}-K{self.kv_heads}-W{self.window}-m{self.block_m}-n{self.block_n}-after{self.earlier}"


CASES = [
    Case(1),
    Case(23),
    Case(24),
    Case(25),
    Case(97, q_heads=6, kv_heads=2),
    Case(64, window=17),
    Case(70, window=1, q_heads=3, kv_heads=1),
    Case(300, q_heads=2, kv_heads=1, window=128, block_m=128, block_n=64),
    Case(40, earlier=23),
    Case(33, earlier=5, window=17),
    Case(150, q_heads=16, kv_heads=2, window=128, block_m=128, block_n=64),
    Case(70, q_heads=8, kv_heads=1, window=128, block_m=256, block_n=32, earlier=127),
]
HEAD_DIM = 16


def make(case: Case):
    g = torch.Generator().manual_seed(case.tokens)
    q = torch.randn(case.tokens, case.q_heads, HEAD_DIM, generator=g) * 2
    k, v = (torch.randn(case.earlier + case.tokens, case.kv_heads, HEAD_DIM, generator=g) for _ in range(2))
    return q, k, v, torch.randn(case.q_heads, generator=g)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_window_attention_kernel_equals_reference(case):
    ops = interpreted_ops("window_attention")
    q, k, v, sinks = make(case)
    out = poisoned(*q.shape)
    ops.launch_window_attention(q, k, v, sinks, out, case.window, HEAD_DIM**-0.5, block_m=case.block_m, block_n=case.block_n)
    torch.testing.assert_close(out, window_attention(q, k, v, sinks, case.window), rtol=1e-4, atol=1e-5)


def test_window_attention_sees_the_key_at_its_edge_and_none_beyond():
    ops = interpreted_ops("window_attention")
    q, sinks = torch.full((90, 2, HEAD_DIM), 4.0), torch.full((2,), -50.0)
    for distance, weight in ((23, 1.0), (24, 0.0)):
        k, v = torch.zeros(90, 1, HEAD_DIM), torch.zeros(90, 1, HEAD_DIM)
        k[89 - distance], v[89 - distance] = 4.0, 1.0
        out = poisoned(90, 2, HEAD_DIM)
        ops.launch_window_attention(q, k, v, sinks, out, 24, 0.25, block_m=32, block_n=16)
        assert float((out[89] - weight).abs().max()) < 1e-4


def test_the_sink_counts_once_however_many_tiles_a_window_takes():
    ops = interpreted_ops("window_attention")
    zeros, ones = torch.zeros(90, 1, HEAD_DIM), torch.ones(90, 1, HEAD_DIM)
    out = poisoned(90, 1, HEAD_DIM)
    ops.launch_window_attention(zeros, zeros, ones, torch.full((1,), math.log(24)), out, 24, 0.25, block_m=32, block_n=16)
    torch.testing.assert_close(out[24:], torch.full((66, 1, HEAD_DIM), 0.5))


@pytest.mark.parametrize("window", [24, None])
def test_a_piece_after_earlier_rows_is_the_same_rows_of_the_whole(window):
    q, k, v, sinks = make(Case(90))

    def attend(first: int, last: int) -> torch.Tensor:
        if window is not None:
            return window_attention(
                q[first:last], k[max(first - window + 1, 0) : last], v[max(first - window + 1, 0) : last], sinks, window
            )
        attention = PromptAttention(AttentionHeads(4, 2, HEAD_DIM), workspace=torch.empty(0))
        attention.plan(last - first, last)
        return attention.run(q[first:last], k[:last], v[:last], sinks)

    torch.testing.assert_close(torch.cat((attend(0, 50), attend(50, 90))), attend(0, 90))


@pytest.mark.parametrize("tokens", [1, 33])
def test_prompt_attention_equals_the_paged_twin_over_shuffled_blocks(tokens):
    q, k, v, sinks = make(Case(tokens))
    attention = PromptAttention(AttentionHeads(4, 2, HEAD_DIM), workspace=torch.empty(0))
    attention.plan(tokens)
    blocks = -(-tokens // 8)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).int()
    pool = poisoned(blocks, 2, 2, 8, HEAD_DIM)
    for token in range(tokens):
        pool[table[token // 8], 0, :, token % 8], pool[table[token // 8], 1, :, token % 8] = k[token], v[token]
    expected = paged_attention_ref(
        q, pool.nan_to_num(0.0), table[None], torch.tensor([0]), torch.tensor([tokens]), torch.tensor([0, tokens]), sinks,
        window=None, sm_scale=HEAD_DIM**-0.5,
    )  # fmt: skip
    torch.testing.assert_close(attention.run(q, k, v, sinks), expected, rtol=1e-5, atol=1e-6)


def test_other_rows_than_planned_are_refused():
    q, k, v, sinks = make(Case(23))
    attention = PromptAttention(AttentionHeads(4, 2, HEAD_DIM), workspace=torch.empty(0))
    attention.plan(24)
    with pytest.raises(ShapeError, match="planned for"):
        attention.run(q, k, v, sinks)
