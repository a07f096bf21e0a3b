"""The FP8 prefill forward on its kernels' twins against the fp32 forward, and against itself in chunks and padded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import ConfigError, NotSupportedError, ServingError, WorkerLost
from common.rank_spec import RankSpec
from kernels import experts_prefill, moe_prefill, norm, quantize
from kernels.peers import PeerLayout, Peers
from kernels.quantize import empty_fp8_rows
from kernels.reference import fp8_quant_blocks_ref, fp8_quant_hidden_ref, fp8_quant_rows_bias_ref
from model import prefill_pieces, prefill_weights
from model.batch import SequenceView, StepBatch, build_prefill_batch
from model.build import build_model
from model.build_prefill import build_prefill_cuda
from model.fp8_experts import pack_experts
from model.gpt_oss import GptOss
from model.kv_cache import KVCache
from model.parallel import LocalGroup, ParallelGroup
from model.prefill_cuda import CudaPrefill
from model.prefill_graph import GraphedPrefill, buckets_for, lengths_up_to
from model.prefill_inputs import ChunkInputs, PagedAttention, PromptChunkAttention
from model.prefill_pieces import PiecewisePrefill, cut_pieces
from model.prefill_weights import SERVED_PROJECTIONS, Projections, prepare_prefill_weights
from model.shards import Fp8Matrix, Mxfp4Matrix
from model.weights import load_shard
from tests.support.thread_group import ThreadGroup, run_ranks
from tests.support.tiny_checkpoint import Tiny, write_tiny

BLOCK = 16
PROMPT = np.random.default_rng(7).integers(3, 1000, size=200).tolist()


@dataclass(frozen=True)
class Layout:
    tp: int
    ep: int

    def __str__(self) -> str:
        return f"tp{self.tp}-ep{self.ep}"


LAYOUTS = [Layout(1, 1), Layout(2, 1), Layout(2, 2), Layout(4, 1), Layout(4, 4)]  # 4 without ep: ranks without a piece of the experts


def build(tiny: Tiny, group: ParallelGroup, ep: int = 1, projections: Projections = "fp8") -> tuple[CudaPrefill, GptOss]:
    shard, packed = (
        load_shard(
            tiny.path, tiny.config, tp=group.size, ep=ep, rank=group.rank, device="cpu", dtype=torch.float32, weights="fp8", packed=packed
        )
        for packed in (False, True)
    )  # fmt: skip
    weights = prepare_prefill_weights(tiny.config, packed, "cpu", projections=projections)
    prefill = CudaPrefill(
        tiny.config, weights, group, block_size=BLOCK, device="cpu", max_positions=512, least_piece_tokens=64
    )  # fmt: skip
    return prefill, GptOss(tiny.config, shard, group, "cpu")


def make_cache(tiny: Tiny, group: ParallelGroup) -> KVCache:
    return KVCache(tiny.config.kv_geometry(BLOCK, "float32"), group.size, group.rank, 20, 20, "cpu")


def chunk(begin: int, end: int, logits: str = "last", sliding_first: int = 0) -> StepBatch:
    blocks = np.random.default_rng(1).permutation(20).tolist()[: -(-len(PROMPT) // BLOCK)]
    view = SequenceView(PROMPT[begin:end], begin, blocks, sliding_first, blocks[::-1][sliding_first:])
    return build_prefill_batch(view, BLOCK, "cpu", logits=logits)


def whole(
    tiny: Tiny, group: ParallelGroup, ep: int = 1, projections: Projections = "fp8"
) -> tuple[Tensor, Tensor | None, KVCache, KVCache]:
    prefill, exact = build(tiny, group, ep, projections)
    cache, exact_cache = make_cache(tiny, group), make_cache(tiny, group)
    return prefill.forward(chunk(0, 200), cache), exact.forward(chunk(0, 200), exact_cache), cache, exact_cache


@pytest.fixture
def exact_formats(monkeypatch):
    """FP8 without its rounding: scales and padding as ever, payload in fp32. What is left is the order of the operations."""

    def rows(x: Tensor, bias_columns: int) -> tuple[Tensor, Tensor]:
        q, scales = fp8_quant_rows_bias_ref(x, bias_columns)
        exact = torch.zeros(q.shape)
        exact[:, : x.shape[1]] = x.float()
        exact[:, x.shape[1] : x.shape[1] + bias_columns] = 1.0
        return exact / scales.repeat_interleave(q.shape[1] // scales.shape[1], 1), scales

    def hidden(x: Tensor, scale: float, bias_columns: int) -> Tensor:
        exact = torch.zeros(fp8_quant_hidden_ref(x, scale, bias_columns).shape)
        exact[:, : x.shape[1]] = x.float()
        exact[:, x.shape[1] : x.shape[1] + bias_columns] = 1.0
        return exact / scale

    def blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
        q, scales = fp8_quant_blocks_ref(weight)
        exact = torch.zeros(q.shape)
        exact[..., : weight.shape[-2], : weight.shape[-1]] = weight
        return exact / scales.repeat_interleave(128, -2).repeat_interleave(128, -1), scales

    def empty_rows(count: int, columns: int, device: str, bias_columns: int = 0) -> tuple[Tensor, Tensor]:
        q, scales = empty_fp8_rows(count, columns, device, bias_columns)
        return torch.full(q.shape, float("nan")), scales

    for module in (quantize, norm, moe_prefill):
        monkeypatch.setattr(module, "fp8_quant_rows_bias_ref", rows)
    for module in (quantize, norm, moe_prefill, prefill_pieces):
        monkeypatch.setattr(module, "empty_fp8_rows", empty_rows)
    monkeypatch.setattr(experts_prefill, "fp8_quant_hidden_ref", hidden)
    monkeypatch.setattr(prefill_weights, "fp8_quant_blocks_ref", blocks)


@pytest.mark.parametrize("projections", ["fp8", "bf16_qkv", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_without_rounding_the_prefill_equals_the_fp32_forward_in_every_layout(tiny, exact_formats, layout, projections):
    results = run_ranks(layout.tp, lambda group: whole(tiny, group, layout.ep, projections))
    logits, exact = results[0][:2]
    # the folded biases are kept to 2^-10 of a weight block's scale
    torch.testing.assert_close(logits, exact, rtol=0, atol=0.02)
    assert [result[0] for result in results[1:]] == [None] * (layout.tp - 1)
    for _, _, cache, exact_cache in results:
        torch.testing.assert_close(cache.buffer.view(torch.float32), exact_cache.buffer.view(torch.float32), rtol=0, atol=0.02)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fp8_prefill_stays_near_fp32(tiny, layout):
    results = run_ranks(layout.tp, lambda group: whole(tiny, group, layout.ep))
    for _, _, cache, exact_cache in results:
        assert torch.equal(cache.full != 0, exact_cache.full != 0)
        near = torch.nn.functional.cosine_similarity(cache.sliding[0].flatten(), exact_cache.sliding[0].flatten(), dim=0)
        assert near > 0.999, f"K and V of the first layer: {near}"


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_group_computes_the_same_in_any_number_of_pieces(tiny, exact_formats, pieces):
    def run(group: ThreadGroup) -> list[tuple[str, tuple[int, ...]]]:
        two, _ = build(tiny, group)
        options = {"block_size": BLOCK, "device": "cpu", "max_positions": 512}
        prefill = CudaPrefill(tiny.config, two.weights, group, pieces=pieces, least_piece_tokens=1, **options)
        expected_cache, cache = make_cache(tiny, group), make_cache(tiny, group)
        expected = two.forward(chunk(0, 200), expected_cache)
        group.calls.clear()
        seen: list[int] = []
        logits = prefill.forward(chunk(0, 200), cache, on_layer=seen.append)
        assert seen == list(range(tiny.config.num_layers))
        torch.testing.assert_close(cache.buffer.view(torch.float32), expected_cache.buffer.view(torch.float32), rtol=0, atol=1e-3)
        if logits is not None:
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
        return group.calls

    for calls in run_ranks(2, run):
        sums = [shape for name, shape in calls if name == "all_reduce" and shape[0] > 1]
        sizes = [piece.stop - piece.start for piece in cut_pieces(200, pieces, 1)]
        assert sums == [(size, tiny.config.hidden_size) for size in sizes] * 2 * (tiny.config.num_layers - 1)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_graph_s_padded_rows_change_nothing_in_a_group(tiny, exact_formats, pieces):
    def run(group: ThreadGroup) -> None:
        prefill, _ = build(tiny, group)
        cache, padded_cache = make_cache(tiny, group), make_cache(tiny, group)
        expected = prefill.forward(chunk(0, 200), cache)
        runner = PiecewisePrefill(prefill, pieces=pieces, least_tokens=1, graph_tokens=256)
        assert runner.least_rows == (1 if pieces == 1 else 129)
        inputs = ChunkInputs.empty(256, "cpu")
        inputs.fill(chunk(0, 200))
        padded = runner.run(inputs, None, padded_cache, want_logits=True, on_layer=None)
        assert torch.equal(padded_cache.full != 0, cache.full != 0)
        if expected is not None:
            torch.testing.assert_close(padded, expected, rtol=0, atol=1e-3)

    run_ranks(2, run)


@pytest.mark.parametrize(("most", "lengths", "kept"), [
    (131072, (1, 2304, 8192), (128, 256, 512)), (300, (1, 300), (128, 256, 512)), (256, (1, 256), (128, 256)), (64, (1, 64), (128,)),
])  # fmt: skip
def test_warming_stays_within_the_longest_prompt(most, lengths, kept):
    assert lengths_up_to(most, (1, 2304, 8192)) == lengths
    assert buckets_for(most, (128, 256, 512)) == kept


@pytest.mark.parametrize(
    ("chunk_tokens", "later"), [(64, [(64, 128)]), (400, [(112, 512)]), (512, []), (None, [])], ids=("short", "long", "whole", "none")
)
def test_the_chunks_behind_the_first_are_warm_where_prompts_can_have_them(tiny, monkeypatch, chunk_tokens, later):
    """Their attention is another kernel: its first compilation took the first long prompt's time."""
    prefill, _ = build(tiny, LocalGroup())
    kv = KVCache(tiny.config.kv_geometry(BLOCK, "float32"), 1, 0, 40, 40, "cpu")
    seen = []
    forward = CudaPrefill.forward

    def watched(self, batch: StepBatch, cache: KVCache) -> Tensor | None:
        seen.append((batch.token_ids.shape[0], int(batch.seq_lens[0])))
        return forward(self, batch, cache)

    monkeypatch.setattr(CudaPrefill, "forward", watched)
    GraphedPrefill(prefill, kv, buckets=(), eager_tokens=(1, 48), chunk_tokens=chunk_tokens)
    assert seen == [(1, 1), (48, 48), *later]


@pytest.mark.parametrize(("tokens", "pieces", "least", "sizes"), [
    (8192, 2, 1024, [4096, 4096]), (2879, 2, 1024, [1536, 1343]), (2047, 2, 1024, [2047]), (1, 2, 1024, [1]), (200, 3, 1, [128, 72]),
])  # fmt: skip
def test_pieces_are_whole_tiles_and_cover_the_chunk(tokens, pieces, least, sizes):
    cut = cut_pieces(tokens, pieces, least)
    assert [piece.stop - piece.start for piece in cut] == sizes
    assert [piece.start for piece in cut] == [0, *[piece.stop for piece in cut[:-1]]]


def test_chunks_give_the_same_logits_and_kv_as_one_pass(tiny, exact_formats):
    logits, _, cache, _ = whole(tiny, LocalGroup())
    prefill, _ = build(tiny, LocalGroup())
    again = make_cache(tiny, LocalGroup())
    seen: list[int] = []
    assert prefill.forward(chunk(0, 131, "none"), again, on_layer=seen.append).shape[0] == 0
    assert seen == list(range(tiny.config.num_layers))
    assert prefill.forward(chunk(131, 132, "none"), again).shape[0] == 0
    last = prefill.forward(chunk(132, 200), again)
    torch.testing.assert_close(last, logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again.buffer.view(torch.float32), cache.buffer.view(torch.float32), rtol=1e-3, atol=1e-3)


def test_sliding_blocks_may_start_at_the_first_query_s_window_but_no_later(tiny, exact_formats):
    prefill, _ = build(tiny, LocalGroup())
    cache = make_cache(tiny, LocalGroup())
    expected = whole(tiny, LocalGroup())[0]
    prefill.forward(chunk(0, 192, "none"), cache)
    last = prefill.forward(chunk(192, 200, sliding_first=4), cache)
    torch.testing.assert_close(last, expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(ServingError, match="sliding blocks start at 80"):
        prefill.forward(chunk(192, 200, sliding_first=5), cache)


@pytest.mark.parametrize("rows", [False, True], ids=["pool", "rows"])
def test_padding_rows_change_nothing_and_take_no_expert_rows(tiny, exact_formats, rows):
    logits, _, cache, _ = whole(tiny, LocalGroup())
    prefill, _ = build(tiny, LocalGroup())
    inputs = ChunkInputs.empty(256, "cpu")
    inputs.fill(chunk(0, 200))
    attention = PagedAttention(tiny.config, prefill.heads, BLOCK, prefill.workspace)
    if rows:
        attention = PromptChunkAttention(tiny.config, prefill.heads, BLOCK, prefill.workspace, graph_tokens=256)
    attention.plan(chunk(0, 200), 256, "cpu")
    again = make_cache(tiny, LocalGroup())
    padded = prefill.run(inputs, attention, again, want_logits=True)
    torch.testing.assert_close(padded, logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(again.full != 0, cache.full != 0)


def test_reading_keys_from_the_pool_or_as_rows_is_the_same(tiny):
    prefill, _ = build(tiny, LocalGroup())
    from_pool = CudaPrefill(tiny.config, prefill.weights, LocalGroup(), block_size=BLOCK, device="cpu", max_positions=512, contiguous=False)
    cache, other = make_cache(tiny, LocalGroup()), make_cache(tiny, LocalGroup())
    torch.testing.assert_close(prefill.forward(chunk(0, 200), cache), from_pool.forward(chunk(0, 200), other))
    assert torch.equal(cache.buffer, other.buffer)


def test_a_later_chunk_is_no_prompt_of_rows(tiny):
    prefill, _ = build(tiny, LocalGroup())
    attention = PromptChunkAttention(tiny.config, prefill.heads, BLOCK, prefill.workspace)
    with pytest.raises(ServingError, match="does not begin its prompt"):
        attention.plan(chunk(100, 200), 100, "cpu")


@pytest.mark.parametrize("projections", ["bf16", "bf16_qkv"])
def test_unquantised_projections_bring_the_prefill_nearer_to_fp32(tiny, projections):
    group = LocalGroup()
    prefill, exact = build(tiny, group)
    shard = load_shard(tiny.path, tiny.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="fp8", packed=True)
    weights = prepare_prefill_weights(tiny.config, shard, "cpu", projections=projections)
    closer = CudaPrefill(tiny.config, weights, group, block_size=BLOCK, device="cpu", max_positions=512)
    caches = [make_cache(tiny, group) for _ in range(3)]
    for forward, cache in zip((prefill, closer, exact), caches, strict=True):
        forward.forward(chunk(0, 200), cache)
    errors = [float((cache.sliding[0].float() - caches[2].sliding[0].float()).norm()) for cache in caches]
    assert errors[1] < 0.05 * errors[0], errors


def test_mxfp4_experts_are_refused(tiny):
    shard = load_shard(tiny.path, tiny.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="fp8")
    packed = Mxfp4Matrix(torch.zeros(1, 1, 1, 16, dtype=torch.uint8), torch.zeros(1, 1, 1, dtype=torch.uint8))
    object.__setattr__(shard.layers[0].experts, "gate_up", packed)
    with pytest.raises(ConfigError, match="MXFP4"):
        prepare_prefill_weights(tiny.config, shard, "cpu")


def test_decoded_experts_are_refused(tiny):
    shard = load_shard(tiny.path, tiny.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.bfloat16, weights="fp8")
    with pytest.raises(ConfigError, match="decoded"):
        prepare_prefill_weights(tiny.config, shard, "cpu")


def test_a_prefill_pool_reads_its_experts_without_decoding_them(tiny, monkeypatch):
    """Decoding and quantising again gave the same values, but took minutes of one core and twice the memory for a real model."""
    monkeypatch.setattr("model.weights.fp8_dequant_blocks_ref", None)
    spec = RankSpec("p", "g", "prefill", str(tiny.path), 1, 1, 0, "", 1, b"", device="cpu", weights="fp8", max_model_len=64)
    config, prefill = build_prefill_cuda(spec, LocalGroup())
    packed = load_shard(tiny.path, config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.bfloat16, weights="fp8", packed=True)
    expected = prepare_prefill_weights(config, packed, "cpu", projections=SERVED_PROJECTIONS)
    for ours, theirs in zip(prefill.weights.layers, expected.layers, strict=True):
        assert torch.equal(ours.down.values.view(torch.uint8), theirs.down.values.view(torch.uint8))


def test_a_bias_in_a_block_of_its_own_is_kept_to_the_least_step(tiny):
    """Columns that fill whole blocks leave the bias no block with weights to share a scale with."""
    matrix = Fp8Matrix(*fp8_quant_blocks_ref(torch.randn(3, 200, 256)), 200, 256)
    bias = torch.randn(3, 200) * torch.tensor([[0.01], [1.0], [40.0]])
    packed = pack_experts(matrix, bias, torch.arange(200), "cpu")
    assert packed.values.shape == (3, 200, 384)
    assert torch.equal(packed.scales, matrix.scales.amax(2, keepdim=True).expand(3, 2, 3))
    scale = packed.scales[:, :, 2].repeat_interleave(128, 1)[:, :200]
    folded = packed.values[:, :, 256:].float().sum(2) * scale
    assert bool(((folded - bias).abs() <= scale * 2.0**-10).all())


def test_what_a_prefill_pool_on_cuda_cannot_serve_is_refused(tiny, tmp_path):
    spec = RankSpec("p", "g", "prefill", str(tiny.path), 1, 1, 0, "", 1, b"", device="cuda", weights="fp8")
    other = write_tiny(tmp_path, head_dim=32)
    with pytest.raises(NotSupportedError, match="heads of 32"):
        build_model(replace(spec, model_path=str(other.path)), LocalGroup())
    with pytest.raises(ConfigError, match="tandem convert"):
        build_model(replace(spec, weights="mxfp4"), LocalGroup())
    with pytest.raises(ConfigError, match="bfloat16"):
        build_model(replace(spec, kv_dtype="float32"), LocalGroup())


def test_a_rank_that_missed_a_sum_is_told(tiny):
    prefill, _ = build(tiny, LocalGroup())
    prefill.check_ranks()  # alone, there is nobody to miss
    prefill.peers = Peers(PeerLayout(2, 1, 256, 0), 0, torch.zeros(1), [0, 0], torch.tensor([2], dtype=torch.int32), 1.0)
    with pytest.raises(WorkerLost, match="did not take part"):
        prefill.check_ranks()
