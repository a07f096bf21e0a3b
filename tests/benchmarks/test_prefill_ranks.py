"""The parts of a rank that the benchmark cuts out of one GPU's weights give that GPU's logits."""

from dataclasses import replace

import pytest

from benchmarks import prefill_random, prefill_ranks
from benchmarks.prefill_ranks import NOISE, check_group, is_one_rank, rank_weights
from kernels import cuda_library
from kernels.peers import PeerLayout, Peers
from tests.support.emulated_cuda import load_emulated
from tests.support.emulated_peers import emulated_peers
from tests.support.thread_group import run_ranks

SMALL = replace(
    prefill_random.gpt_oss_config("20b", 2), hidden_size=256, intermediate_size=192, num_experts=8, num_qo_heads=8, num_kv_heads=2,
    vocab_size=512,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _few_random_values(monkeypatch):
    monkeypatch.setattr(prefill_random, "PAYLOAD_VALUES", 1 << 20)


def test_a_group_of_slices_gives_one_rank_s_logits():
    cosines, other = run_ranks(2, lambda group: check_group(SMALL, group, "cpu", 200, 64))
    assert list(cosines) == ["collectives, launched", NOISE]
    assert is_one_rank(cosines), cosines
    assert other is None


def test_a_bias_that_every_rank_adds_is_not_one_rank_s(monkeypatch):
    """The output bias twice: 1 - cosine is then many times what rounding leaves."""
    own = prefill_ranks.slice_of

    def doubled(*args):
        weights = own(*args)
        return replace(weights, layers=tuple(replace(layer, o_bias=2 * layer.o_bias) for layer in weights.layers))

    monkeypatch.setattr(prefill_ranks, "slice_of", doubled)
    cosines, _ = run_ranks(2, lambda group: check_group(SMALL, group, "cpu", 200, 64))
    assert not is_one_rank(cosines), cosines


class Rounding:
    """Peers whose kernels get bf16, as the products on a GPU are."""

    def __init__(self, peers: Peers):
        self._peers = peers
        self.status = peers.status

    def sum_projection(self, x, bias, residual):
        self._peers.sum_projection(x.bfloat16(), bias, residual)

    def sum_experts_norm(self, pairs, *others, **options):
        self._peers.sum_experts_norm(pairs.bfloat16(), *others, **options)


def test_ranks_that_add_over_each_other_s_memory_give_one_rank_s_logits(monkeypatch):
    monkeypatch.setattr(cuda_library, "load", load_emulated)
    peers = [Rounding(rank) for rank in emulated_peers(PeerLayout(2, 90, SMALL.hidden_size, 0))]
    cosines, _ = run_ranks(2, lambda group: check_group(SMALL, group, "cpu", 200, 64, peers[group.rank]))
    assert list(cosines) == ["collectives, launched", "peers, launched", NOISE]
    assert is_one_rank(cosines), cosines


@pytest.mark.parametrize(("ep", "experts", "inner"), [(2, 4, 192), (1, 8, 64)])
def test_random_weights_of_a_rank_have_its_shapes(ep, experts, inner):
    weights = rank_weights(SMALL, tp=2, ep=ep, rank=1, device="cpu", unique_layers=1)
    layer = weights.layers[0]
    assert layer.gate_up.values.shape == (experts, 2 * inner, 384)
    assert layer.first_expert == (4 if ep == 2 else 0)
    assert (layer.qkv.shape[0], layer.num_kv_heads, layer.router.shape[0]) == (6 * 64, 1, 16)
    assert weights.lm_head.shape[0] == 256
