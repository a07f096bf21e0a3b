"""Attention, norm and rotary embedding of the reference against closed forms and float64 loops, where such ops went wrong elsewhere."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.reference import (
    apply_rope_ref,
    gather_kv_ref,
    paged_attention_ref,
    rms_norm_ref,
    rope_cos_sin_ref,
    write_kv_ref,
    yarn_inv_freq_ref,
)
from tests.support.tolerance import BF16_OP, FP32_OP, assert_close, assert_same_bytes

NAN = float("nan")


# Attention


@dataclass(frozen=True)
class AttentionCase:
    """One sequence of `seq_len` tokens whose last `q_len` are queries, its blocks shuffled among others."""

    seq_len: int = 130
    q_len: int = 1
    window: int | None = 128
    block_size: int = 16
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 16
    first_block: int = 0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        heads = f"H{self.num_qo_heads}K{self.num_kv_heads}"
        return f"L{self.seq_len}-q{self.q_len}-W{self.window}-S{self.block_size}-{heads}-first{self.first_block}-{str(self.dtype)[6:]}"


@dataclass
class Paged:
    """A case's tensors: dense q, k, v and sink, and the same K and V in a pool poisoned with NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor
    pool: Tensor
    table: Tensor

    def attend(self, case: AttentionCase) -> Tensor:
        return paged_attention_ref(
            self.q,
            self.pool,
            self.table,
            torch.tensor([case.first_block * case.block_size], dtype=torch.int32),
            torch.tensor([case.seq_len], dtype=torch.int32),
            torch.tensor([0, case.q_len], dtype=torch.int32),
            self.sink,
            window=case.window,
            sm_scale=case.head_dim**-0.5,
        )


def paged(case: AttentionCase, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Paged:
    size, blocks = case.block_size, -(-case.seq_len // case.block_size)
    ids = random.Random(case.seq_len).sample(range(blocks + 5), blocks)
    pool = torch.full((blocks + 5, 2, case.num_kv_heads, size, case.head_dim), NAN, dtype=case.dtype)
    for position in range(case.first_block * size, case.seq_len):
        block, offset = ids[position // size], position % size
        pool[block, 0, :, offset], pool[block, 1, :, offset] = k[position], v[position]
    table = [*ids[case.first_block :], -1, -1]
    return Paged(q.to(case.dtype), k.to(case.dtype), v.to(case.dtype), sink, pool, torch.tensor([table], dtype=torch.int32))


def random_paged(case: AttentionCase) -> Paged:
    generator = torch.Generator().manual_seed(case.seq_len * 10 + case.q_len)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype).float()

    kv = (case.seq_len, case.num_kv_heads, case.head_dim)
    return paged(case, draw(case.q_len, case.num_qo_heads, case.head_dim), draw(*kv), draw(*kv), draw(case.num_qo_heads))


def attention_by_loops(case: AttentionCase, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """gpt-oss' sdpa one query and head at a time in float64: scores, the sink appended, softmax, the sink's column dropped."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = case.num_qo_heads // case.num_kv_heads
    for row in range(case.q_len):
        position = case.seq_len - case.q_len + row
        low = 0 if case.window is None else max(0, position - case.window + 1)
        for head in range(case.num_qo_heads):
            keys, values = (x[low : position + 1, head // group].double() for x in (k, v))
            scores = torch.cat((keys @ q[row, head].double() * case.head_dim**-0.5, sink[head : head + 1].double()))
            out[row, head] = torch.softmax(scores, 0)[:-1] @ values
    return out


DEFAULT = AttentionCase()
RANDOM_CASES = [
    *(replace(DEFAULT, seq_len=n) for n in (1, 2, 15, 16, 17, 127, 128, 129, 130, 143, 144, 145, 255, 256, 257)),
    *(replace(DEFAULT, seq_len=n, window=None) for n in (1, 15, 17, 300)),
    *(replace(DEFAULT, seq_len=n, q_len=min(n, 8), window=w) for n in (8, 127, 129, 257) for w in (None, 128)),
    *(replace(DEFAULT, seq_len=n, q_len=n, window=w) for n in (2, 17, 131) for w in (None, 5)),
    replace(DEFAULT, seq_len=600, q_len=520, window=128),
    replace(DEFAULT, seq_len=300, q_len=1, first_block=10),
    replace(DEFAULT, seq_len=300, q_len=9, first_block=10),
    replace(DEFAULT, seq_len=300, q_len=9, first_block=5, block_size=32),
    replace(DEFAULT, seq_len=130, q_len=3, num_qo_heads=64, num_kv_heads=8, head_dim=64),
    replace(DEFAULT, seq_len=130, q_len=1, num_qo_heads=4, num_kv_heads=4),
    replace(DEFAULT, seq_len=130, q_len=2, num_kv_heads=1),
]


@pytest.mark.parametrize("case", RANDOM_CASES, ids=str)
def test_paged_attention_equals_loops_over_queries_and_heads(case: AttentionCase):
    data = random_paged(case)
    assert_close(data.attend(case), attention_by_loops(case, data.q, data.k, data.v, data.sink), FP32_OP, case)


@pytest.mark.parametrize("q_len", [1, 5])
def test_paged_attention_in_bf16_rounds_only_the_result(q_len: int):
    case = replace(DEFAULT, q_len=q_len, dtype=torch.bfloat16)
    data = random_paged(case)
    got = data.attend(case)
    assert got.dtype == torch.bfloat16
    assert_close(got, attention_by_loops(case, data.q, data.k, data.v, data.sink), BF16_OP, case)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize(("window", "seq_len"), [(128, n) for n in (127, 128, 129, 130, 255, 256, 257)] + [(5, 9), (1, 4), (64, 130)])
def test_the_window_counts_the_query_itself(window: int, seq_len: int, q_len: int):
    """A key that would take all the weight, just outside the last query's window and just inside."""
    case = replace(DEFAULT, seq_len=seq_len, q_len=q_len, window=window)
    for distance, is_seen in ((window, False), (window - 1, True)):
        position = seq_len - 1 - distance
        if position < 0:
            continue
        q, k, v = torch.ones(q_len, 8, 16), torch.zeros(seq_len, 2, 16), torch.zeros(seq_len, 2, 16)
        k[position], v[position] = 100.0, 1.0
        weight = paged(case, q, k, v, torch.zeros(8)).attend(case)[-1]
        assert_close(weight, torch.full_like(weight, 1.0 if is_seen else 0.0), FP32_OP, f"{case}, key {distance} back")


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("seq_len", [3, 17, 127, 128, 129, 1000])
def test_the_sink_enters_the_softmax_once(seq_len: int, window: int | None, q_len: int):
    """All scores 0, all values 1: n visible keys weigh n / (n + e^sink); a sink counted twice gives n / (n + 2 e^sink)."""
    case = replace(DEFAULT, seq_len=seq_len, q_len=q_len, window=window)
    sink = torch.linspace(-3, 5, 8)
    kv = (seq_len, 2, 16)
    got = paged(case, torch.zeros(q_len, 8, 16), torch.randn(kv), torch.ones(kv), sink).attend(case)
    for row in range(q_len):
        visible = min(seq_len - q_len + row + 1, window or seq_len)
        expected = (visible / (visible + sink.exp()))[:, None].expand(8, 16)
        assert_close(got[row], expected, FP32_OP, f"{case}, query {row}")


def test_the_sink_is_not_scaled_and_belongs_to_its_head():
    case = replace(DEFAULT, seq_len=1, q_len=1)
    sink = torch.tensor([-1e9, 0.0, 1.0, 1e9] * 2)
    got = paged(case, torch.ones(1, 8, 16), torch.ones(1, 2, 16), torch.ones(1, 2, 16), sink).attend(case)[0, :, 0]
    score = 16 * 16**-0.5
    expected = torch.tensor([1.0, 1 / (1 + math.exp(-score)), 1 / (1 + math.exp(1 - score)), 0.0] * 2)
    assert_close(got, expected, FP32_OP)


@pytest.mark.parametrize("q_lens", [(1, 1, 1), (3, 0, 7), (1, 5, 1)], ids=str)
def test_sequences_of_a_batch_do_not_see_each_other(q_lens: tuple[int, ...]):
    cases = [replace(DEFAULT, seq_len=n, q_len=q) for n, q in zip((40, 200, 129), q_lens, strict=True)]
    parts = [random_paged(case) for case in cases]
    width, shift, tables = max(part.table.shape[1] for part in parts), 0, []
    for part in parts:
        ids = torch.where(part.table[0] >= 0, part.table[0] + shift, -1)
        tables.append(torch.nn.functional.pad(ids, (0, width - ids.shape[0]), value=-1))
        shift += part.pool.shape[0]
    got = paged_attention_ref(
        torch.cat([part.q for part in parts]),
        torch.cat([part.pool for part in parts]),
        torch.stack(tables).int(),
        torch.zeros(3, dtype=torch.int32),
        torch.tensor([case.seq_len for case in cases], dtype=torch.int32),
        torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32),
        parts[0].sink,
        window=128,
        sm_scale=0.25,
    )
    expected = torch.cat([attention_by_loops(case, p.q, p.k, p.v, parts[0].sink) for case, p in zip(cases, parts, strict=True)])
    assert_close(got, expected, FP32_OP, q_lens)


def test_write_kv_fills_its_slots_and_no_other():
    pool = torch.full((4, 2, 2, 16, 8), NAN)
    k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    write_kv_ref(k, v, pool, torch.tensor([50, 3, -1, 31, 32]))
    expected = torch.full_like(pool, NAN)
    for row, block, offset in ((0, 3, 2), (1, 0, 3), (3, 1, 15), (4, 2, 0)):
        expected[block, 0, :, offset], expected[block, 1, :, offset] = k[row], v[row]
    assert_same_bytes(pool, expected)


def test_gather_kv_reads_tables_in_order():
    pool = torch.randn(5, 2, 3, 16, 4)
    k, v = gather_kv_ref(pool, torch.tensor([[4, 1], [2, -1]], dtype=torch.int32))
    assert k.shape == v.shape == (2, 32, 3, 4)
    assert torch.equal(k[0, 16 + 7], pool[1, 0, :, 7])
    assert torch.equal(v[1, 5], pool[2, 1, :, 5])


# Norm and rotary embedding


@pytest.mark.parametrize("columns", [1, 33, 2880])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_multiplies_the_weight_before_the_cast_back(columns: int, dtype: torch.dtype):
    x, weight = torch.randn(3, columns).to(dtype), (1 + 0.1 * torch.randn(columns)).to(dtype)
    x64 = x.double()
    expected = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = rms_norm_ref(x, weight, 1e-5)
    assert got.dtype == dtype
    assert_close(got, expected.to(dtype), FP32_OP if dtype == torch.float32 else BF16_OP)
    assert not rms_norm_ref(torch.zeros(1, columns), weight, 1e-5).any()


def yarn_by_formula(low: float, high: float) -> Tensor:
    """gpt-oss' frequencies in float64 from given correction bounds."""
    freq = 150000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    ramp = ((torch.arange(32, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return ramp / (32 * freq) + (1 - ramp) / freq


LOW, HIGH = 8.092779, 17.398025


def gpt_oss_yarn() -> tuple[Tensor, float]:
    return yarn_inv_freq_ref(64, 150000.0, 32.0, 4096, 32.0, 1.0)


def test_yarn_bounds_are_not_rounded():
    inv_freq, concentration = gpt_oss_yarn()
    assert concentration == pytest.approx(1.3465735903, abs=1e-9)
    known = {0: 1.0, 1: 0.6890443, 2: 0.4747820, 3: 0.3271459, 8: 0.0508132726, 16: 4.56483918e-4, 31: 3.0235114e-7}
    assert {i: inv_freq[i].item() for i in known} == pytest.approx(known, rel=1e-6)
    assert inv_freq.sum().item() == pytest.approx(3.1804383, rel=1e-6)
    assert ((inv_freq.double() - yarn_by_formula(LOW, HIGH)).abs() / inv_freq).max() < 1e-6
    assert ((yarn_by_formula(8, 18) / yarn_by_formula(LOW, HIGH) - 1).abs()).max() > 0.7  # what rounding would do


def test_without_scaling_frequencies_are_plain():
    inv_freq, concentration = yarn_inv_freq_ref(64, 150000.0, 1.0, 4096, 32.0, 1.0)
    assert concentration == 1.0
    assert_close(inv_freq, yarn_by_formula(1e9, 2e9), FP32_OP)


@pytest.mark.parametrize("distance", [1, 127, 4096, 15999])
def test_a_needle_is_found_through_16k_tokens_of_rotation(distance: int):
    """A key made, in float64, to match its query exactly after both were rotated by their positions."""
    true_freq, position = yarn_by_formula(LOW, HIGH), 16000
    query = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(distance))
    key = rotate(query, distance, true_freq)  # at position - distance it will stand where the query stands
    cos, sin = rope_cos_sin_ref(torch.tensor([position, position - distance]), *gpt_oss_yarn())
    q, k = apply_rope_ref(torch.stack((query, key)).float()[:, None], cos, sin)[:, 0]
    assert (q @ k / (q.norm() * k.norm())).item() > 0.9999
    assert (q.norm() / query.norm()).item() == pytest.approx(1.3465736, rel=1e-4)
    rounded = rotate(query, distance, yarn_by_formula(8, 18))
    if distance >= 4096:
        assert (rounded @ key / query.square().sum()).item() < 0.99


def rotate(x: Tensor, angle_position: int, inv_freq: Tensor) -> Tensor:
    c, s = (angle_position * inv_freq).cos(), (angle_position * inv_freq).sin()
    return torch.cat((x[:32] * c - x[32:] * s, x[32:] * c + x[:32] * s))


def test_rope_rotates_halves_not_neighbours():
    cos, sin = rope_cos_sin_ref(torch.tensor([3]), torch.tensor([0.5, 0.25]), 2.0)
    got = apply_rope_ref(torch.tensor([[[1.0, 10.0, 100.0, 1000.0]]]), cos, sin)[0, 0]
    expected = [
        2 * (1 * math.cos(1.5) - 100 * math.sin(1.5)),
        2 * (10 * math.cos(0.75) - 1000 * math.sin(0.75)),
        2 * (100 * math.cos(1.5) + 1 * math.sin(1.5)),
        2 * (1000 * math.cos(0.75) + 10 * math.sin(0.75)),
    ]
    assert got.tolist() == pytest.approx(expected, rel=1e-5)
