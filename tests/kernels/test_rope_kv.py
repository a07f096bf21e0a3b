from dataclasses import dataclass

import pytest
import torch

from common.errors import ShapeError
from kernels.reference import apply_rope_ref, rope_cos_sin_ref, yarn_inv_freq_ref
from kernels.rope_kv import rope_table, rope_write_kv
from tests.kernels.triton_prefill import interpreted_ops, poisoned


@dataclass(frozen=True)
class Case:
    tokens: int
    q_heads: int
    kv_heads: int
    has_bias: bool = True
    head_dim: int = 64

    def __str__(self) -> str:
        return f"T{self.tokens}-H{self.q_heads}-K{self.kv_heads}-b{self.has_bias:d}"


CASES = [Case(1, 8, 2), Case(7, 6, 3), Case(17, 8, 1, has_bias=False), Case(2, 64, 8)]


def make(case: Case):
    g = torch.Generator().manual_seed(case.tokens)
    blocks = case.tokens // 16 + 3
    columns = (case.q_heads + 2 * case.kv_heads) * case.head_dim
    qkv = torch.randn(case.tokens, columns, generator=g)
    bias = torch.randn(columns, generator=g) if case.has_bias else None
    pool = poisoned(blocks, 2, case.kv_heads, 16, case.head_dim)
    slots = torch.randperm(blocks * 16, generator=g)[: case.tokens].int()
    positions = torch.randint(0, 5000, (case.tokens,), generator=g, dtype=torch.int32)
    inv_freq, concentration = yarn_inv_freq_ref(case.head_dim, 150000.0, 32.0, 4096, 32.0, 1.0)
    return qkv, bias, pool, slots, positions, rope_table(5000, inv_freq, concentration)


@pytest.mark.parametrize("rows", [False, True], ids=["pool", "pool+rows"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_write_kv_kernel_equals_reference(case, rows):
    ops = interpreted_ops("rope_kv")
    qkv, bias, pool, slots, positions, table = make(case)
    slots[case.tokens // 2 :: 5] = -1
    expected_pool = pool.clone()
    shape = (case.tokens, case.kv_heads, case.head_dim)
    expected_rows = (poisoned(*shape), poisoned(*shape)) if rows else None
    expected_q = rope_write_kv(qkv, bias, table, positions, slots, expected_pool, case.q_heads, kv_rows=expected_rows)
    q = poisoned(case.tokens, case.q_heads, case.head_dim)
    got_rows = (poisoned(*shape), poisoned(*shape)) if rows else None
    ops.launch_rope_write_kv(qkv, bias, table, positions, slots, q, pool, got_rows)
    for got, expected in zip(got_rows or (), expected_rows or (), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool, expected_pool, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rope_write_kv_places_each_token_in_its_slot_and_nowhere_else():
    qkv, _, pool, slots, positions, table = make(Case(5, 4, 2))
    rope_write_kv(qkv, None, table, positions, slots, pool, 4)
    written = ~pool.isnan()
    assert int(written.sum()) == 5 * 2 * 2 * 64
    v = qkv.view(5, 8, 64)[:, 6:]
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot // 16, 1, :, slot % 16], v[token])


def test_rope_table_holds_cos_then_sin_times_concentration():
    inv_freq, concentration = yarn_inv_freq_ref(64, 150000.0, 32.0, 4096, 32.0, 1.0)
    table = rope_table(300, inv_freq, concentration)
    assert table.shape == (300, 64)
    assert table[0, 0] == pytest.approx(1.3465735903)
    assert table[0, 32] == 0.0
    cos, sin = rope_cos_sin_ref(torch.tensor([299]), inv_freq, concentration)
    x = torch.randn(1, 1, 64)
    assert torch.equal(apply_rope_ref(x, cos, sin), apply_rope_ref(x, *table[299:].chunk(2, dim=1)))


def test_wrong_number_of_columns_is_refused():
    qkv, _, pool, slots, positions, table = make(Case(5, 4, 2))
    with pytest.raises(ShapeError, match="columns"):
        rope_write_kv(qkv[:, :-64], None, table, positions, slots, pool, 4)
