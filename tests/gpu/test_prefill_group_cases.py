"""M02 and M06 of the public faults through the whole prefill forward of a group, from a checkpoint on disk; the ranks take turns on one
device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.batch import SequenceView, build_prefill_batch
from model.config import ModelConfig
from model.convert import convert_checkpoint
from model.fixture import fixture_config, random_tensors, write_checkpoint
from model.kv_cache import KVCache
from model.prefill_cuda import CudaPrefill
from model.prefill_weights import SERVED_PROJECTIONS, prepare_prefill_weights
from model.weights import load_shard
from tests.gpu.fp8_experts import TOP_K
from tests.support.thread_group import ThreadGroup, run_ranks
from tests.support.tiny_checkpoint import Tiny, write_chosen
from tests.support.tolerance import assert_calc_diff

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def only_biases(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Weights are zero, biases of attention's output and of the experts one; embeddings alternate, and the head gives the stream itself."""
    config = fixture_config(vocab_size=1024, num_layers=2)
    chosen = {
        "embed_tokens.weight": stream(config), "o_proj.bias": torch.tensor(1), "down_proj_bias": torch.tensor(1),
        "norm.weight": torch.tensor(1), "lm_head.weight": torch.eye(1024, config.hidden_size),
    }  # fmt: skip
    made = write_chosen(tmp_path_factory.mktemp("biases"), config, chosen)
    convert_checkpoint(made.path)
    return made


def stream(config: ModelConfig) -> Tensor:
    return torch.tensor([3.0, -3.0]).repeat(config.hidden_size // 2)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)])
def test_m02_the_whole_forward_adds_every_bias_once(device: str, only_biases: Tiny, tp: int, ep: int):
    """A layer adds 2 to the stream, and the last norm shows how much has come together."""
    total = stream(only_biases.config) + 2 * only_biases.config.num_layers
    logits, _ = forward_of_ranks(only_biases.path, only_biases.config, device, tp, ep, list(range(20)))
    expected = total * total.square().mean().rsqrt()
    assert float((logits[0, : len(expected)].cpu() - expected).abs().max()) < 2e-2, logits[0, :4]


def forward_of_ranks(path: Path, config: ModelConfig, device: str, tp: int, ep: int, tokens: list[int]) -> tuple[Tensor, list[list]]:
    """One prompt through a prefill group as it serves. Returns: logits [1, V] fp32, and what each rank joined"""

    def rank_main(group: ThreadGroup) -> tuple[Tensor | None, list]:
        prefill = prefill_of_rank(path, config, device, group, ep)
        blocks = -(-len(tokens) // BLOCK_SIZE)
        kv = KVCache(config.kv_geometry(BLOCK_SIZE, "bfloat16"), group.size, group.rank, blocks, blocks, device)
        ids = list(range(blocks))
        return prefill.forward(build_prefill_batch(SequenceView(tokens, 0, ids, 0, ids[::-1]), BLOCK_SIZE, "cpu"), kv), group.calls

    results = run_ranks(tp, rank_main, in_turns=True)
    assert results[0][0] is not None
    return results[0][0], [calls for _, calls in results]


def prefill_of_rank(path: Path, config: ModelConfig, device: str, group: ThreadGroup, ep: int) -> CudaPrefill:
    shard = load_shard(path, config, tp=group.size, ep=ep, rank=group.rank, device="cpu", dtype=torch.bfloat16, weights="fp8", packed=True)
    weights = prepare_prefill_weights(config, shard, device, projections=SERVED_PROJECTIONS)
    return CudaPrefill(config, weights, group, block_size=BLOCK_SIZE, device=device, max_positions=512)


def test_m06_ranks_without_a_token_still_join_every_sum(device: str, tmp_path: Path):
    """A prompt of one token whose four experts are those of the first two ranks."""
    config = fixture_config(vocab_size=1024, num_layers=2)
    tensors = random_tensors(config)
    for name, tensor in tensors.items():
        if name.endswith("router.bias"):
            tensor[:TOP_K] += 100.0
    write_checkpoint(tmp_path, config, tensors)
    convert_checkpoint(tmp_path)
    alone, _ = forward_of_ranks(tmp_path, config, device, 1, 1, [77])
    together, calls = forward_of_ranks(tmp_path, config, device, 4, 4, [77])
    assert bool(together.isfinite().all())
    assert_calc_diff(together, alone, 1e-2)  # sums in another order turn FP8 roundings over
    assert calls[0]
    assert all(each == calls[0] for each in calls)
