"""Faults of attention that were reported against other systems, on every attention kernel that serves.

The window counts the query itself (A01); the sink counts once however the keys are split (A02); YaRN's range is not rounded (A04); the
error does not depend on the length (A06), where KV has one format on the GPU paths, bf16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention_decode import SHORT_CHUNK
from kernels.decode_fused import pack_qkv, prepare_step, qkv_rope_write
from kernels.reference import yarn_inv_freq_ref
from kernels.rope_kv import rope_table, rope_write_kv
from tests.gpu.attending import BLOCK_SIZE, HEAD_DIM, WAYS, WINDOW, Sequence, attend, attend_ref, equal_scores, heads_on, random_sequence

ways = pytest.mark.parametrize("way", WAYS)
kinds = pytest.mark.parametrize("window", [WINDOW, None], ids=["sliding", "full"])
RELATIVE_ERROR = 1e-2  # of bf16 inputs, probabilities and outputs, in the root mean square


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@ways
@pytest.mark.parametrize("length", [1, 127, 128, 129, 130, 255, 256, 257])
def test_a01_a_sliding_layer_sees_128_keys_and_no_key_more(device: str, way: str, length: int):
    s = random_sequence(device, length, 1, WINDOW)
    assert relative_error(attend(way, s), attend_ref(s)) < RELATIVE_ERROR
    group = s.q.shape[1] // s.k.shape[1]
    for distance, weight in ((WINDOW + 1, 0.0), (WINDOW, 1.0), (1, 1.0)):
        if distance > length:
            continue
        k, v = s.k.clone(), torch.zeros_like(s.v)
        k[length - distance], v[length - distance] = 3 * s.q[0, ::group], 1.0
        marked = attend(way, Sequence(s.q, k, v, s.sinks, WINDOW))[0, ::group]
        assert float((marked - weight).abs().max()) < 1e-2, f"key L-{distance} weighs {marked.flatten()[:4].tolist()}"


def test_a01_planting_in_full_attention_finds_the_key(device: str):
    """The planted key is one that only the window hides."""
    s = random_sequence(device, 300, 1, None)
    group = s.q.shape[1] // s.k.shape[1]
    k, v = s.k.clone(), torch.zeros_like(s.v)
    k[300 - WINDOW - 1], v[300 - WINDOW - 1] = 3 * s.q[0, ::group], 1.0
    for way in WAYS:
        assert float((attend(way, Sequence(s.q, k, v, s.sinks, None))[0, ::group] - 1.0).abs().max()) < 1e-2


def lengths_of_splits(device: str) -> list[int]:
    """Sequences that decode cuts into 1 to 16 pieces, and ones around the edge of a piece."""
    return [1, 2, 128, 129, 512, 513, 1000, *(range(1300, 8193, 512) if device == "cuda" else [1025])]


@ways
@kinds
def test_a02_the_sink_counts_once_however_many_pieces_the_keys_are_cut_into(device: str, way: str, window: int | None):
    for length in lengths_of_splits(device):
        out = attend(way, equal_scores(device, length, 1, window))
        assert float((out - 0.5).abs().max()) < 4e-3, f"L{length}: the keys have {out.flatten()[:4].tolist()} of the weight, not a half"


@ways
@kinds
def test_a02_one_key_beside_a_sink_of_any_size(device: str, way: str, window: int | None):
    s = random_sequence(device, 1, 1, window)
    group = s.q.shape[1] // s.k.shape[1]
    score = (s.q[0].float() * s.k[0].repeat_interleave(group, 0).float()).sum(1) * HEAD_DIM**-0.5
    expected = torch.sigmoid(score - s.sinks)[:, None] * s.v[0].repeat_interleave(group, 0).float()
    assert relative_error(attend(way, s)[0], expected) < RELATIVE_ERROR


@pytest.mark.parametrize("way", ["paged", "rows"])
@kinds
def test_a02_the_last_row_is_the_same_from_chunks_of_any_size(device: str, way: str, window: int | None):
    """1,000 tokens in 1 to 16 chunks: a sliding layer's last chunk has blocks before it that no query sees."""
    whole = random_sequence(device, 1000, 1000, window)
    expected = attend_ref(whole.last(1))[0]
    for chunks in range(1, 17):
        got = attend(way, whole.last(-(-1000 // chunks)))[-1]
        assert relative_error(got, expected) < RELATIVE_ERROR, f"{chunks} chunks"


def true_inv_freq(low: float = 8.092779, high: float = 17.398025) -> Tensor:
    """gpt-oss' frequencies in float64 from the correction range; (8, 18) is what rounding makes of it."""
    freq = 150000.0 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    ramp = ((torch.arange(HEAD_DIM // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return ramp / (32 * freq) + (1 - ramp) / freq


def rotated(x: Tensor, positions: int, inv_freq: Tensor) -> Tensor:
    """x [..., D] float64, further on by so many positions."""
    c, s = (positions * inv_freq).cos(), (positions * inv_freq).sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def gpt_oss_yarn(device: str) -> tuple[Tensor, float]:
    inv_freq, concentration = yarn_inv_freq_ref(HEAD_DIM, 150000.0, 32.0, 4096, 32.0, 1.0)
    return inv_freq.to(device), concentration


def decode_table(device: str, positions: list[int]) -> Tensor:
    """cos and sin that a decode step makes for sequences whose new tokens stand there: [B, D / 2, 2]."""
    inv_freq, concentration = gpt_oss_yarn(device)
    rows, blocks = len(positions), max(positions) // BLOCK_SIZE + 1

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    table = torch.full((rows, HEAD_DIM // 2, 2), float("nan"), device=device)
    lens = torch.tensor(positions, dtype=torch.int32, device=device) + 1
    prepare_step(
        ints(rows), ints(rows), lens, ints(rows, blocks), ints(rows, blocks), ints(rows), inv_freq, concentration=concentration,
        block_size=BLOCK_SIZE, chunk_blocks=SHORT_CHUNK, cos_sin=table, full_slots=ints(rows), sliding_slots=ints(rows),
        cu_chunks=ints(rows + 1),
    )  # fmt: skip
    return table


def test_a04_rotations_are_those_of_the_unrounded_range_up_to_the_longest_context(device: str):
    positions = [0, 1, 17, 4096, 16000, 65535, 131071]
    inv_freq, concentration = gpt_oss_yarn(device)
    assert concentration == pytest.approx(1.3465735903, abs=1e-9)
    assert float((inv_freq.double().cpu() / true_inv_freq() - 1).abs().max()) < 1e-6
    cos, sin = rope_table(131072, inv_freq, concentration)[positions].chunk(2, dim=1)
    for made in (torch.stack((cos, sin), dim=-1), decode_table(device, positions)):
        for position, got in zip(positions, made.double().cpu(), strict=True):
            angle = position * true_inv_freq()
            exact = torch.stack((angle.cos(), angle.sin()), dim=-1) * concentration
            limit = position * 2.0**-22 + 1e-5  # an fp32 angle
            assert float((got - exact).abs().max()) < limit, f"position {position}"
            wrong = position * true_inv_freq(8, 18)
            if position >= 4096:
                assert float((wrong.cos() - angle.cos()).abs().max()) > 10 * limit, "rounding would not show here"


@pytest.mark.parametrize(("way", "distance"), [("paged", 1), ("paged", 4096), ("paged", 15999), ("decode", 4096), ("decode", 15999)])
def test_a04_a_needle_is_found_through_16k_tokens_of_rotation(device: str, way: str, distance: int):
    """A key made, in float64, to stand where its query stands once both are rotated; the kernels rotate, store and find it."""
    length, heads = 16001, heads_on(device)
    kv_heads, group = heads.num_kv_heads, heads.num_qo_heads // heads.num_kv_heads
    generator = torch.Generator().manual_seed(distance)
    query = 1.5 * torch.randn(HEAD_DIM, dtype=torch.float64, generator=generator)
    x = torch.randn(length, heads.num_qo_heads + 2 * kv_heads, HEAD_DIM, generator=generator)
    x[-1, : heads.num_qo_heads] = query
    x[-1 - distance, heads.num_qo_heads : -kv_heads] = rotated(query, distance, true_inv_freq())
    x[:, -kv_heads:] = 0.0
    x[-1 - distance, -kv_heads:] = 1.0
    qkv = x.flatten(1).bfloat16().to(device)
    inv_freq, concentration = gpt_oss_yarn(device)
    positions = torch.arange(length, dtype=torch.int32, device=device)
    pool = torch.zeros(-(-length // BLOCK_SIZE), 2, kv_heads, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=device)
    q = rope_write_kv(qkv, None, rope_table(length, inv_freq, concentration), positions, positions, pool, heads.num_qo_heads)[-1:]
    if way == "decode":
        q = rotated_by_decode(qkv[-1:], decode_table(device, [length - 1]), heads.num_qo_heads, kv_heads)
    k, v = pool.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    pair = torch.nn.functional.cosine_similarity(q[0, ::group].double(), k[-1 - distance].double(), dim=-1)
    assert float(pair.min()) > 0.9995
    found = attend(way, Sequence(q, k.contiguous(), v.contiguous(), torch.zeros(heads.num_qo_heads, device=device), None))
    assert float((found - 1.0).abs().max()) < 1e-2
    if distance >= 4096:
        rounded = rotated(query, distance, true_inv_freq(8, 18))
        assert float(torch.nn.functional.cosine_similarity(rounded, rotated(query, distance, true_inv_freq()), dim=-1)) < 0.99


def rotated_by_decode(qkv: Tensor, cos_sin: Tensor, q_heads: int, kv_heads: int) -> Tensor:
    """Q of one row whose projection gives these values: the rotation that decode's projection kernel applies."""
    device = qkv.device
    x = torch.zeros(1, 2880 if qkv.is_cuda else 256, dtype=torch.bfloat16, device=device)
    x[:, 0] = 1.0
    weight = torch.zeros(qkv.shape[1], x.shape[1], dtype=torch.bfloat16, device=device)
    weight[:, 0] = qkv[0]
    q = torch.full((1, q_heads, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=device)
    pool = torch.zeros(1, 2, kv_heads, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    qkv_rope_write(x, pack_qkv(weight), torch.zeros_like(qkv[0]), pool, slots, cos_sin, q, scratch=torch.empty_like(qkv))
    return q


LENGTHS = (15, 16, 17, 127, 128, 129, 130, 143, 144, 145, 1023, 1024, 1025, 4095, 4096, 4097)
EMULATED_LENGTHS = (15, 17, 127, 128, 129, 145)


@ways
@kinds
@pytest.mark.parametrize("queries", [1, 8])
def test_a06_the_error_does_not_grow_at_any_length(device: str, way: str, window: int | None, queries: int):
    lengths = LENGTHS if device == "cuda" else EMULATED_LENGTHS
    sequences = [random_sequence(device, n, queries, window) for n in lengths]
    errors = torch.tensor([relative_error(attend(way, s), attend_ref(s)) for s in sequences])
    shown = dict(zip(lengths, errors.tolist(), strict=True))
    assert float(errors.max()) < RELATIVE_ERROR, shown
    assert float(errors.max()) < 2.5 * float(errors.median()), shown
