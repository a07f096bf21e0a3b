"""The forward pass against transformers in fp32, for every layout, and against itself in chunks and with a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import ConfigError, NotSupportedError
from model.config import ModelConfig
from model.convert import convert_checkpoint
from model.fixture import fixture_config
from model.gpt_oss import GptOss
from model.parallel import LocalGroup, ParallelGroup
from model.shards import ShardWeights
from model.weights import WeightFormat, load_shard
from tests.support.hf_reference import build_hf_model, hf_greedy, hf_logits
from tests.support.paged_run import PagedRun, greedy
from tests.support.thread_group import ThreadGroup, run_ranks
from tests.support.tiny_checkpoint import Tiny, write_chosen, write_tiny
from tests.support.tolerance import FP32_LOGITS, FP32_OP, assert_close

PROMPT_TOKENS = (1, 15, 16, 17, 127, 128, 129, 130, 257, 1000)
NUM_NEW = 40


@dataclass(frozen=True)
class LayoutCase:
    tp: int = 1
    ep: int = 1
    weights: WeightFormat = "mxfp4"

    def __str__(self) -> str:
        return f"tp{self.tp}-ep{self.ep}-{self.weights}"


ONE_RANK = LayoutCase()
LAYOUTS = [LayoutCase(tp, ep) for tp, ep in ((1, 1), (2, 2), (2, 1), (4, 4), (4, 1), (8, 8), (8, 1))]
FP8_LAYOUTS = [LayoutCase(tp, ep, "fp8") for tp, ep in ((1, 1), (4, 4), (4, 1), (8, 1))]
PROMPTS = [np.random.default_rng(n).integers(3, 1000, size=n).tolist() for n in PROMPT_TOKENS]


def load(tiny: Tiny, group: ParallelGroup, case: LayoutCase = ONE_RANK, dtype: torch.dtype = torch.float32) -> GptOss:
    shard = load_shard(tiny.path, tiny.config, tp=case.tp, ep=case.ep, rank=group.rank, device="cpu", dtype=dtype, weights=case.weights)
    return GptOss(tiny.config, shard, group, "cpu")


def run_layout(tiny: Tiny, case: LayoutCase, prompts: list[list[int]], dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """All prompts in one ragged batch, on all ranks. Returns: per rank what forward returns."""

    def rank_main(group: ThreadGroup) -> Tensor | None:
        run = PagedRun(tiny.config, load(tiny, group, case, dtype), tp=case.tp, rank=group.rank, num_sequences=len(prompts))
        return run.step(prompts)

    return run_ranks(case.tp, rank_main)


@pytest.fixture(scope="module")
def hf_model(tiny):
    return build_hf_model(tiny.config, tiny.tensors)


@pytest.fixture(scope="module")
def expected_logits(hf_model) -> list[Tensor]:
    return [hf_logits(hf_model, ids) for ids in PROMPTS]


@pytest.fixture(scope="module")
def weights(tiny) -> ShardWeights:
    return load_shard(tiny.path, tiny.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")


@pytest.fixture(scope="module")
def model(tiny, weights) -> GptOss:
    return GptOss(tiny.config, weights, LocalGroup(), "cpu")


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_logits_equal_transformers_at_every_position_in_every_layout(tiny, expected_logits, case: LayoutCase):
    logits = run_layout(tiny, case, PROMPTS)
    assert logits[1:] == [None] * (case.tp - 1)
    for ids, got, expected in zip(PROMPTS, logits[0].split(PROMPT_TOKENS), expected_logits, strict=True):
        assert_close(got, expected, FP32_LOGITS, f"{case}, {len(ids)} tokens")


@pytest.mark.parametrize("case", FP8_LAYOUTS, ids=str)
def test_fp8_logits_equal_transformers_because_these_weights_convert_exactly(tiny, expected_logits, case: LayoutCase):
    assert_close(run_layout(tiny, case, [PROMPTS[6]])[0], expected_logits[6], FP32_LOGITS, case)


def test_logits_equal_transformers_when_every_rank_has_its_own_kv_heads(tiny_8kv):
    expected = hf_logits(build_hf_model(tiny_8kv.config, tiny_8kv.tensors), PROMPTS[6])
    for case in (LayoutCase(4, 4), LayoutCase(8, 8), LayoutCase(8, 1), LayoutCase(8, 1, "fp8"), LayoutCase(2, 1, "fp8")):
        assert_close(run_layout(tiny_8kv, case, [PROMPTS[6]])[0], expected, FP32_LOGITS, case)


def test_greedy_decode_with_a_cache_equals_transformers(model, tiny, hf_model):
    run = PagedRun(tiny.config, model, num_sequences=len(PROMPTS))
    tokens = greedy(run, PROMPTS, NUM_NEW)
    for ids, got in zip(PROMPTS, tokens, strict=True):
        assert got == hf_greedy(hf_model, ids, NUM_NEW), f"prompt of {len(ids)} tokens"


@pytest.mark.parametrize("chunk_tokens", [33, 128, 129])
def test_chunked_prefill_equals_the_whole(model, tiny, expected_logits, chunk_tokens: int):
    ids, expected = PROMPTS[8], expected_logits[8]
    run = PagedRun(tiny.config, model)
    chunks = [run.step([ids[begin : begin + chunk_tokens]]) for begin in range(0, len(ids), chunk_tokens)]
    assert_close(torch.cat(chunks), expected, FP32_LOGITS, f"chunks of {chunk_tokens}")


@pytest.mark.parametrize("block_size", [32, 64])
def test_block_size_changes_nothing(model, tiny, expected_logits, block_size: int):
    run = PagedRun(tiny.config, model, num_sequences=2, block_size=block_size)
    first = run.step([PROMPTS[8][:101], PROMPTS[6]])
    second = run.step([PROMPTS[8][101:], []])
    assert_close(torch.cat((first[:101], second)), expected_logits[8], FP32_LOGITS, f"block size {block_size}")
    assert_close(first[101:], expected_logits[6], FP32_LOGITS, f"block size {block_size}")


@pytest.mark.parametrize("case", [LayoutCase(2, 1), LayoutCase(4, 4), LayoutCase(8, 8)], ids=str)
def test_decode_in_a_mixed_batch_equals_transformers_in_every_layout(tiny, expected_logits, case: LayoutCase):
    """One sequence decodes its last 5 tokens one by one while another is prefilled in pieces beside it."""
    long, other = PROMPTS[7], PROMPTS[4]

    def rank_main(group: ThreadGroup) -> list[Tensor | None]:
        run = PagedRun(tiny.config, load(tiny, group, case), tp=case.tp, rank=group.rank, num_sequences=2)
        run.step([long[:-5], []], logits="none")
        return [run.step([[long[i - 5]], other[i * 27 : i * 27 + 27]]) for i in range(5)]

    steps = run_ranks(case.tp, rank_main)[0]
    assert_close(torch.stack([step[0] for step in steps]), expected_logits[7][-5:], FP32_LOGITS, case)
    assert_close(torch.cat([step[1:] for step in steps]), expected_logits[4], FP32_LOGITS, case)


@pytest.mark.parametrize("case", [LayoutCase(2, 1), LayoutCase(4, 4), LayoutCase(8, 1)], ids=str)
def test_each_rank_writes_the_kv_of_its_own_heads(tiny, case: LayoutCase):
    def kv_of(group: ParallelGroup, layout: LayoutCase) -> PagedRun:
        run = PagedRun(tiny.config, load(tiny, group, layout), tp=layout.tp, rank=group.rank)
        run.step([PROMPTS[6]], logits="none")
        return run

    whole = kv_of(LocalGroup(), ONE_RANK)
    for run in run_ranks(case.tp, lambda group: kv_of(group, case)):
        heads = run.kv.head_range
        for layer in range(tiny.config.num_layers):
            expected = whole.kv.layer(layer)[:, :, heads.start : heads.start + heads.count]
            unused = expected.isnan()
            assert torch.equal(run.kv.layer(layer).isnan(), unused)
            assert_close(run.kv.layer(layer)[~unused], expected[~unused], FP32_OP, f"{case} heads {heads} layer {layer}")


def test_on_layer_comes_after_the_layers_kv_is_written_and_before_the_next(model, tiny):
    run = PagedRun(tiny.config, model)
    written: list[list[bool]] = []

    def on_layer(layer: int) -> None:
        assert layer == len(written)
        written.append([bool((~run.kv.layer(other).isnan()).any()) for other in range(tiny.config.num_layers)])

    run.step([PROMPTS[3]], on_layer=on_layer)
    assert written == [[other <= layer for other in range(tiny.config.num_layers)] for layer in range(tiny.config.num_layers)]


def test_a_batch_without_wanted_rows_or_without_tokens_gives_no_logits(model, tiny):
    run = PagedRun(tiny.config, model, num_sequences=2)
    assert run.step([PROMPTS[2], PROMPTS[1]], logits="none").shape == (0, tiny.config.vocab_size)
    assert run.step([[], []], logits="last").shape == (0, tiny.config.vocab_size)
    assert run.step([[5], []], logits="last").shape == (1, tiny.config.vocab_size)


@pytest.mark.parametrize("case", [*LAYOUTS[:5], LayoutCase(8, 1), LayoutCase(4, 1, "fp8")], ids=str)
def test_biases_enter_once_however_many_ranks_there_are(tmp_path, case: LayoutCase):
    """All matrices zero: every layer adds its o bias of 2 and its down bias of 1, whatever the routing."""
    config = fixture_config(vocab_size=16, num_layers=3, hidden_size=32, intermediate_size=96, head_dim=8)
    basis = torch.eye(16, 32)
    tiny = write_chosen(
        tmp_path,
        config,
        {
            "embed_tokens.weight": 3 * basis,
            "lm_head.weight": basis,
            "norm.weight": torch.tensor(1.0),
            "o_proj.bias": torch.tensor(2.0),
            "down_proj_bias": torch.tensor(1.0),
        },
    )
    if case.weights == "fp8":
        convert_checkpoint(tmp_path)
    hidden = 3 * basis[[5, 7]] + 3 * (2.0 + 1.0)
    expected = (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + config.rms_norm_eps))[:, :16]
    assert_close(run_layout(tiny, case, [[5, 7]])[0], expected, FP32_OP, case)


@pytest.mark.parametrize("case", [LayoutCase(4, 4), LayoutCase(2, 2), LayoutCase(8, 8)], ids=str)
def test_ranks_without_a_token_join_every_collective(tmp_path, case: LayoutCase):
    """One token, 4 of 128 experts: most experts, and here some whole ranks, have nothing to do."""
    tiny = write_tiny(tmp_path, num_experts=128, num_layers=2, hidden_size=64, intermediate_size=32, vocab_size=64, head_dim=16)

    def rank_main(group: ThreadGroup) -> tuple[Tensor | None, list]:
        run = PagedRun(tiny.config, load(tiny, group, case), tp=case.tp, rank=group.rank)
        return run.step([[7]]), group.calls

    results = run_ranks(case.tp, rank_main)
    alone = run_layout(tiny, ONE_RANK, [[7]])[0]
    assert torch.isfinite(results[0][0]).all()
    assert_close(results[0][0], alone, FP32_LOGITS, case)
    calls = [("all_reduce", (1, 64))] * 4 + [("all_gather", (1, 64 // case.tp))]
    assert [calls_of_rank for _, calls_of_rank in results] == [calls] * case.tp


@pytest.mark.parametrize("vocab_size", [1021, 1023])
def test_a_vocabulary_that_does_not_divide_comes_back_whole(tmp_path, vocab_size: int):
    tiny = write_tiny(tmp_path, vocab_size=vocab_size, num_layers=1)
    expected = run_layout(tiny, ONE_RANK, [PROMPTS[3]])[0]
    assert expected.shape[1] == vocab_size
    assert_close(run_layout(tiny, LayoutCase(8, 8), [PROMPTS[3]])[0], expected, FP32_LOGITS, vocab_size)


@pytest.mark.parametrize("case", [ONE_RANK, LayoutCase(4, 4), LayoutCase(8, 1)], ids=str)
def test_bf16_agrees_with_fp32_as_well_as_transformers_bf16_does(tiny, expected_logits, case: LayoutCase):
    """bf16 flips router choices on random weights; transformers' own bf16 agrees on 175 of 200 choices."""
    logits = run_layout(tiny, case, [PROMPTS[8]], torch.bfloat16)[0]
    agreement = (logits.argmax(-1) == expected_logits[8].argmax(-1)).float().mean().item()
    assert agreement > 0.8, f"{case}: {agreement}"


def _changed(**fields) -> Callable[[ModelConfig, ShardWeights], tuple[ModelConfig, ShardWeights]]:
    return lambda config, weights: (replace(config, **fields), weights)


def _without_sinks(config: ModelConfig, weights: ShardWeights) -> tuple[ModelConfig, ShardWeights]:
    return config, replace(weights, layers=tuple(replace(layer, sinks=torch.full_like(layer.sinks, -1e9)) for layer in weights.layers))


def _without_router_bias(config: ModelConfig, weights: ShardWeights) -> tuple[ModelConfig, ShardWeights]:
    return config, replace(
        weights, layers=tuple(replace(layer, router_bias=torch.zeros_like(layer.router_bias)) for layer in weights.layers)
    )


FAULTS = {
    "window-127": _changed(window_tokens=127),
    "window-129": _changed(window_tokens=129),
    "odd-layers-slide": _changed(sliding=(False, True, False, True)),
    "alpha-1": _changed(swiglu_alpha=1.0),
    "no-clamp": _changed(swiglu_limit=1e9),
    "no-yarn": _changed(rope_factor=1.0),
    "beta-31": _changed(rope_beta_fast=31.0),
    "no-sinks": _without_sinks,
    "no-router-bias": _without_router_bias,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_notices_a_wrong_detail(tiny, weights, expected_logits, fault: str):
    config, changed = FAULTS[fault](tiny.config, weights)
    run = PagedRun(config, GptOss(config, changed, LocalGroup(), "cpu"))
    with pytest.raises(AssertionError, match="elements break"):
        assert_close(run.step([PROMPTS[8]]), expected_logits[8], FP32_LOGITS, fault)


def test_weights_of_another_rank_are_refused(tiny, weights):
    with pytest.raises(ConfigError, match="rank 1 of 2 in a group at rank 0 of 1"):
        GptOss(tiny.config, replace(weights, rank=1, tp=2), LocalGroup(), "cpu")


def test_packed_experts_are_refused_by_name(tiny):
    packed = load_shard(tiny.path, tiny.config, tp=1, ep=1, rank=0, device="meta", dtype=torch.bfloat16, weights="mxfp4", packed=True)
    with pytest.raises(NotSupportedError, match="packed experts"):
        GptOss(tiny.config, packed, LocalGroup(), "cpu")


def test_a_failing_rank_ends_the_others(tiny):
    def rank_main(group: ThreadGroup) -> None:
        if group.rank == 1:
            raise ValueError("rank 1 broke")
        group.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 broke"):
        run_ranks(2, rank_main)
