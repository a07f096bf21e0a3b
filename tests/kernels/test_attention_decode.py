"""The decode attention kernels' own source, run on the CPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.attention_decode import LONG_CHUNK, SHORT_CHUNK, SplitWorkspace, attention_sliding, chunk_blocks, launch_full, num_chunks
from kernels.decode_fused import prepare_step
from kernels.reference import paged_attention_ref
from tests.support.emulated_cuda import emulated  # noqa: F401

S, D, WINDOW = 16, 64, 128
SCALE = D**-0.5


def make_pool(generator, lens, kv_heads, *, starts=None):
    """Random KV in shuffled blocks; everything that no sequence holds is NaN."""
    starts = starts or [0] * len(lens)
    needed = [-(-(n - s) // S) for n, s in zip(lens, starts, strict=True)]
    ids = torch.randperm(sum(needed) + 3, generator=generator).int()
    pool = torch.full((sum(needed) + 3, 2, kv_heads, S, D), float("nan"), dtype=torch.bfloat16)
    table = torch.full((len(lens), max(max(needed), 9)), -1, dtype=torch.int32)
    at = 0
    for b, (n, start, count) in enumerate(zip(lens, starts, needed, strict=True)):
        table[b, :count] = ids[at : at + count]
        for i in range(count):
            used = min(S, n - start - i * S)
            pool[ids[at + i], :, :, :used] = torch.randn(2, kv_heads, used, D, generator=generator).bfloat16()
        at += count
    return pool, table


def sliding_starts(lens):
    return [max(0, (n - WINDOW) // S * S) for n in lens]


def reference(q, pool, table, starts, lens, sink, window):
    bounds = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    out = paged_attention_ref(q.float(), pool, table, starts, lens, bounds, sink, window=window, sm_scale=SCALE)
    return out.masked_fill((lens == 0)[:, None, None], 0.0)


def assert_close(got, want):
    assert not got.isnan().any()
    error = (got.float() - want).abs()
    assert error.max() < 1e-2 * want.abs().max() + 2e-3, f"{error.max()} at {error.argmax()}"


def inputs(seed, lens, kv_heads, group, starts=None):
    generator = torch.Generator().manual_seed(seed)
    pool, table = make_pool(generator, lens, kv_heads, starts=starts)
    q = (2 * torch.randn(len(lens), kv_heads * group, D, generator=generator)).bfloat16()
    sink = torch.randn(kv_heads * group, generator=generator)
    return q, pool, table, torch.tensor(starts or [0] * len(lens), dtype=torch.int32), torch.tensor(lens, dtype=torch.int32), sink


def run_sliding(q, pool, table, starts, lens, sink):
    out = torch.full_like(q, float("nan"))
    return attention_sliding(q, pool, table, starts, lens, sink, out, window=WINDOW, sm_scale=SCALE)


def run_full(q, pool, table, lens, sink):
    workspace = SplitWorkspace.allocate(len(lens), pool.shape[2], int(lens.sum()), "cpu")
    size = chunk_blocks(len(lens), pool.shape[2])
    chunks = torch.tensor([0, *(num_chunks(n, size) for n in lens.tolist())]).cumsum(0)
    workspace.cu_chunks[: len(lens) + 1] = chunks
    out = torch.full_like(q, float("nan"))
    launch_full(q, pool, table, lens, sink, out, workspace, sm_scale=SCALE, group=q.shape[1] // pool.shape[2])
    assert not workspace.arrived.any()
    assert not workspace.tickets.any()
    return out


@pytest.mark.parametrize("lens", [[1], [127, 128], [129, 15, 16], [17, 300, 255, 256, 257, 144, 2]], ids=str)
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 8), (3, 4)])
def test_sliding_matches_reference(emulated, lens, kv_heads, group):  # noqa: F811
    case = inputs(1, lens, kv_heads, group, sliding_starts(lens))
    assert_close(run_sliding(*case), reference(*case, WINDOW))


def test_sliding_rows_do_not_depend_on_the_batch(emulated):  # noqa: F811
    lens = [126, 127, 128, 129, 130, 1, 300]
    q, pool, table, starts, seq_lens, sink = inputs(8, lens, 2, 8, sliding_starts(lens))
    whole = run_sliding(q, pool, table, starts, seq_lens, sink)
    for rows in (slice(0, 1), slice(2, 3), slice(1, 5)):
        assert torch.equal(run_sliding(q[rows], pool, table[rows], starts[rows], seq_lens[rows], sink), whole[rows])


def test_sliding_window_of_more_blocks_than_lanes(emulated):  # noqa: F811
    """A window of 600 tokens is 38 blocks: the warp asks for ids of the table twice."""
    lens = [700, 599]
    q, pool, table, starts, seq_lens, sink = inputs(9, lens, 1, 8, [(n - 600) // S * S if n > 600 else 0 for n in lens])
    out = attention_sliding(q, pool, table, starts, seq_lens, sink, torch.full_like(q, float("nan")), window=600, sm_scale=SCALE)
    assert_close(out, reference(q, pool, table, starts, seq_lens, sink, 600))


def test_sliding_sees_the_window_and_no_key_more(emulated):  # noqa: F811
    """Key L - 129 has no weight, key L - 128 has; both are planted so that they would win."""
    length = 300
    for position, is_seen in ((length - 129, False), (length - 128, True)):
        q, pool, table, starts, lens, sink = inputs(2, [length], 1, 8, [0])
        block, offset = table[0, position // S], position % S
        pool[block, 0, 0, offset] = q[0, 0] * 3
        pool[block, 1, 0, offset] = 100.0
        out = run_sliding(q, pool, table, starts, lens, sink)
        assert (out[0, 0].float().mean() > 50) == is_seen
        assert_close(out, reference(q, pool, table, starts, lens, sink, WINDOW))


def test_sink_counts_once(emulated):  # noqa: F811
    """Equal scores over n keys of value 1 and a sink of the same score give n / (n + 1)."""
    for length, run in ((100, run_sliding), (1300, None)):
        q, pool, table, starts, lens, sink = inputs(3, [length], 1, 8, [0])
        q.zero_()
        sink.zero_()
        pool[:, 1] = torch.where(pool[:, 1].isnan(), pool[:, 1], 1.0)
        out = run(q, pool, table, starts, lens, sink) if run else run_full(q, pool, table, lens, sink)
        assert torch.allclose(out.float(), torch.full_like(out, length / (length + 1)).float(), atol=4e-3)


def test_padded_rows_are_zero(emulated):  # noqa: F811
    q, pool, table, starts, lens, sink = inputs(4, [40, 33, 20], 2, 8, [0, 0, 0])
    lens[1] = 0
    for out in (run_sliding(q, pool, table, starts, lens, sink), run_full(q, pool, table, lens, sink)):
        assert not out[1].any()
        assert_close(out, reference(q, pool, table, starts, lens, sink, None))


@pytest.mark.parametrize("lens", [[1], [511, 512], [513, 16, 17], [2100, 3, 1024, 700, 1, 40, 513]], ids=str)
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 8), (1, 4)])
def test_full_matches_reference(emulated, lens, kv_heads, group):  # noqa: F811
    q, pool, table, starts, seq_lens, sink = inputs(5, lens, kv_heads, group)
    assert_close(run_full(q, pool, table, seq_lens, sink), reference(q, pool, table, starts, seq_lens, sink, None))


def test_full_does_not_depend_on_the_batch(emulated):  # noqa: F811
    q, pool, table, _, lens, sink = inputs(6, [1500, 40, 700], 2, 8)
    whole = run_full(q, pool, table, lens, sink)
    for b in range(3):
        alone = run_full(q[b : b + 1].contiguous(), pool, table[b : b + 1].contiguous(), lens[b : b + 1].contiguous(), sink)
        assert torch.equal(alone[0], whole[b])


def test_many_rows_are_cut_into_longer_chunks(emulated):  # noqa: F811
    lens = [2049, 4100, 1, 600, 2048] + [16 * (n % 3) for n in range(60)]
    assert chunk_blocks(len(lens), 2) == LONG_CHUNK > chunk_blocks(16, 8) == SHORT_CHUNK
    q, pool, table, starts, seq_lens, sink = inputs(8, lens, 2, 8)
    assert_close(run_full(q, pool, table, seq_lens, sink), reference(q, pool, table, starts, seq_lens, sink, None))


def test_very_long_sequences_are_cut_into_at_most_32_chunks():
    assert [num_chunks(n, 32) for n in (0, 1, 512, 513, 16384, 16385, 32768, 131072)] == [0, 1, 1, 2, 32, 17, 32, 32]
    assert [num_chunks(n, 128) for n in (0, 2048, 2049, 65536, 131072)] == [0, 1, 2, 32, 32]


def test_plan_of_a_step(emulated):  # noqa: F811
    """The kernel's slots, rotations and chunk counts equal the plain twin's."""
    from kernels import cuda_library

    lens = torch.tensor([1, 0, 128, 129, 5000, 33000], dtype=torch.int32)
    starts = torch.tensor([max(0, (n - WINDOW) // S * S) for n in lens.tolist()], dtype=torch.int32)
    generator = torch.Generator().manual_seed(7)
    full = torch.randint(0, 999, (6, 2100), generator=generator, dtype=torch.int32)
    sliding = torch.randint(0, 999, (6, 9), generator=generator, dtype=torch.int32)
    inv_freq = torch.rand(32, generator=generator)
    results = []
    for kernel, size in ((True, SHORT_CHUNK), (False, SHORT_CHUNK), (True, LONG_CHUNK), (False, LONG_CHUNK)):
        cuda_library.runs = (lambda answer: lambda tensor: answer)(kernel)
        out = {"cos_sin": torch.full((6, 32, 2), float("nan")), "cu_chunks": torch.full((7,), -5, dtype=torch.int32)}
        out |= {name: torch.full((6,), -5, dtype=torch.int32) for name in ("full_slots", "sliding_slots")}
        tokens = torch.arange(100, 108, dtype=torch.int32)
        sources = torch.tensor([7, -1 - 55, 0, 2, -1, 4], dtype=torch.int32)
        prepare_step(sources, tokens, lens, full, sliding, starts, inv_freq, concentration=1.25, block_size=S, chunk_blocks=size, **out)
        assert tokens.tolist() == [107, 55, 100, 102, 0, 104, 106, 107]  # rows change places, new ones come from the host
        results.append(out)
    for kernel, plain in (results[:2], results[2:]):
        assert torch.allclose(kernel.pop("cos_sin"), plain.pop("cos_sin"), atol=1e-5)
        for name, value in kernel.items():
            assert torch.equal(value, plain[name]), name
