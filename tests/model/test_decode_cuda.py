"""A whole decode step through the CUDA kernels' own source (run on the CPU) against the plain fp32 forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import NotSupportedError, ShapeError
from kernels.moe_decode_fp8 import Fp8ExpertWeights
from kernels.reference import fp8_quant_blocks_ref, mxfp4_dequant_ref
from model.batch import SequenceView, build_decode_batch
from model.config import ModelConfig
from model.decode_cuda import CudaDecode, pack_weights
from model.gpt_oss import GptOss
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from model.shards import ExpertShard, Fp8Matrix, LayerShard, Mxfp4Matrix, ShardWeights
from tests.support.emulated_cuda import emulated  # noqa: F401

HIDDEN, INNER, EXPERTS, HEADS, KV_HEADS, VOCAB, LAYERS, S = 256, 256, 16, 8, 2, 1024, 4, 16
CONFIG = ModelConfig(
    num_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=INNER, num_experts=EXPERTS, experts_per_token=4, num_qo_heads=HEADS,
    num_kv_heads=KV_HEADS, head_dim=64, vocab_size=VOCAB, window_tokens=128, sliding=(True, False) * (LAYERS // 2), rms_norm_eps=1e-5,
    rope_theta=150000.0, rope_factor=32.0, rope_original_context=4096, rope_beta_fast=32.0, rope_beta_slow=1.0, swiglu_alpha=1.702,
    swiglu_limit=7.0, max_position=4096, eos_token_ids=(0,),
)  # fmt: skip


FORMATS = pytest.mark.parametrize("weights", ["mxfp4", "fp8"])


def make_shards(seed, weights="mxfp4"):
    """The same random weights twice: as the GPU loads them (bf16, packed experts) and as the plain forward takes them (fp32, dense)."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, std=1.0):
        return (torch.randn(*shape, generator=g) * std).bfloat16()

    def mxfp4(rows, columns):
        blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=g, dtype=torch.uint8)
        return Mxfp4Matrix(blocks, torch.randint(120, 123, (EXPERTS, rows, columns // 32), generator=g, dtype=torch.uint8))

    packed, dense = [], []
    heads = (HEADS + 2 * KV_HEADS) * 64
    for _ in range(LAYERS):
        gate_up, down = mxfp4(2 * INNER, HIDDEN), mxfp4(HIDDEN, INNER)
        biases = randn(EXPERTS, 2 * INNER, std=0.2).float(), randn(EXPERTS, HIDDEN, std=0.2).float()
        layer = LayerShard(
            1 + randn(HIDDEN, std=0.1), randn(heads, HIDDEN, std=0.08), randn(heads, std=0.1), randn(HEADS).float(),
            randn(HIDDEN, HEADS * 64, std=0.08), randn(HIDDEN, std=0.1), 1 + randn(HIDDEN, std=0.1), randn(EXPERTS, HIDDEN, std=0.5),
            randn(EXPERTS), ExpertShard(0, INNER, gate_up, biases[0], down, biases[1]),
        )  # fmt: skip
        plain = {name: getattr(layer, name).float() for name in LayerShard.__dataclass_fields__ if name != "experts"}
        experts = ExpertShard(0, INNER, mxfp4_dequant_ref(gate_up.blocks, gate_up.scales), biases[0],
                              mxfp4_dequant_ref(down.blocks, down.scales), biases[1])  # fmt: skip
        if weights == "fp8":  # the same values: a 4-bit one times a power of two is one of eight bits
            in_fp8 = (Fp8Matrix(*fp8_quant_blocks_ref(m), *m.shape[1:]) for m in (experts.gate_up, experts.down))
            layer = replace(layer, experts=ExpertShard(0, INNER, next(in_fp8), biases[0], next(in_fp8), biases[1]))
        packed.append(layer)
        dense.append(LayerShard(**plain, experts=experts))
    ends = randn(VOCAB, HIDDEN), 1 + randn(HIDDEN, std=0.1), randn(VOCAB, HIDDEN, std=0.15)
    gpu = ShardWeights(1, 1, 0, ends[0], tuple(packed), ends[1], ends[2], 0)
    return gpu, replace(gpu, embed=ends[0].float(), layers=tuple(dense), norm=ends[1].float(), lm_head=ends[2].float())


def make_case(lens, seed=1, weights="mxfp4"):
    """A decode step over random KV in shuffled blocks. Returns: the GPU step with its inputs, the plain step's logits."""
    g = torch.Generator().manual_seed(seed)
    gpu, plain = make_shards(seed, weights)
    firsts = [max(0, n - 128) // S for n in lens]
    needs = [-(-n // S) for n in lens]
    full = torch.randperm(sum(needs), generator=g).split(needs)
    sliding = torch.randperm(sum(needs), generator=g).split([n - f for n, f in zip(needs, firsts, strict=True)] + [sum(firsts)])
    caches = [KVCache(CONFIG.kv_geometry(S, dtype), 1, 0, sum(needs), sum(needs), "cpu") for dtype in ("bfloat16", "float32")]
    for bf16, fp32 in ((caches[0].full, caches[1].full), (caches[0].sliding, caches[1].sliding)):
        bf16.copy_(torch.randn(bf16.shape, generator=g))
        fp32.copy_(bf16)
    tokens = torch.randint(0, VOCAB, (len(lens),), generator=g).tolist()
    views = [SequenceView([t], n - 1, f.tolist(), first, s.tolist())
             for t, n, f, first, s in zip(tokens, lens, full, firsts, sliding, strict=False)]  # fmt: skip
    want = GptOss(CONFIG, plain, LocalGroup(), "cpu").forward(build_decode_batch(views, S, "cpu"), caches[1])
    decode = CudaDecode(CONFIG, pack_weights(gpu), caches[0], max_batch=len(lens), max_positions=max(needs) * S, device="cpu")
    inputs = decode.inputs
    decode.token_ids.copy_(torch.tensor(tokens))
    inputs.seq_lens.copy_(torch.tensor(lens))
    inputs.sliding_start.copy_(torch.tensor(firsts) * S)
    for b in range(len(lens)):
        inputs.full_table[b, : needs[b]] = full[b]
        inputs.sliding_table[b, : len(sliding[b])] = sliding[b]
    return decode, want, caches


@FORMATS
def test_step_matches_the_plain_forward(emulated, weights):  # noqa: F811
    decode, want, caches = make_case([1, 127, 129, 600, 40], weights=weights)
    decode.step(5, needs_logits=True)
    error, wider = (decode.logits - want).abs(), 5 if weights == "fp8" else 1  # tokens and hidden rows have 4 bits then
    assert error.max() < wider * 3e-2 * want.abs().max(), f"{error.max()} of {want.abs().max()}"
    assert error.square().mean().sqrt() < wider * 2e-2 * want.square().mean().sqrt()  # bf16 activations through four random layers
    assert torch.equal(decode.token_ids, decode.logits.argmax(-1).int())
    for got, plain in ((caches[0].full, caches[1].full), (caches[0].sliding, caches[1].sliding)):
        assert (got.float() - plain).abs().max() < wider * 3e-2 * plain.abs().max()  # new K and V in the same slots, all else untouched


@FORMATS
def test_padded_rows_and_the_bucket_change_nothing(emulated, weights):  # noqa: F811
    decode, _, caches = make_case([70, 33, 140], weights=weights)
    tokens = decode.token_ids.clone()
    decode.step(3, needs_logits=True)
    whole = decode.logits.clone()
    decode.token_ids.copy_(tokens)
    decode.inputs.seq_lens[1] = 0
    before = [caches[0].full.clone(), caches[0].sliding.clone()]
    decode.step(3, needs_logits=True)
    assert torch.equal(decode.logits[[0, 2]], whole[[0, 2]])
    assert torch.equal(caches[0].full, before[0])  # rows 0 and 2 wrote the same again, row 1 nothing
    assert torch.equal(caches[0].sliding, before[1])
    assert decode.token_ids[1] == 0
    decode.token_ids.copy_(tokens)
    decode.logits.zero_()
    decode.step(1, needs_logits=True)
    assert torch.equal(decode.logits[0], whole[0])


def test_words_are_the_same_with_and_without_all_logits(emulated):  # noqa: F811
    """Greedy rows and rows with a temperature; beside them, with logits, a row with a filter."""
    decode, _, _ = make_case([70, 33, 140])
    tokens, rows = decode.token_ids.clone(), decode.inputs.sampling
    rows.temperature.copy_(torch.tensor([0.0, 0.8, 0.8]))
    rows.seed.copy_(torch.tensor([1, 2, 3]))
    decode.step(3)
    screened = decode.token_ids.clone()
    decode.token_ids.copy_(tokens)
    decode.logits.fill_(float("nan"))
    rows.top_k[2] = 1
    decode.step(3, needs_logits=True)
    assert decode.token_ids[:2].tolist() == screened[:2].tolist()
    assert decode.token_ids[0] == decode.logits[0].argmax()
    assert decode.token_ids[2] == decode.logits[2].argmax()


def test_nan_in_one_sequence_fails_that_row_alone(emulated):  # noqa: F811
    decode, _, caches = make_case([70, 33, 140])
    tokens = decode.token_ids.clone()
    decode.step(3, needs_logits=True)
    whole = decode.logits.clone()
    decode.token_ids.copy_(tokens)
    caches[0].full[1, decode.inputs.full_table[1, 0].long()] = float("nan")
    decode.step(3, needs_logits=True)
    assert torch.equal(decode.logits[[0, 2]], whole[[0, 2]])
    assert decode.token_ids[1] == -1


def test_experts_of_another_format_are_refused():
    _, plain = make_shards(1)
    with pytest.raises(NotSupportedError, match="MXFP4 or FP8"):
        pack_weights(plain)


def test_fp8_experts_of_sizes_without_a_kernel_are_refused():
    shard, _ = make_shards(1, "fp8")
    experts = replace(shard.layers[0].experts, intermediate=66)
    with pytest.raises(ShapeError, match="of 66 hidden columns"):
        pack_weights(replace(shard, layers=(replace(shard.layers[0], experts=experts),)))


def test_the_format_of_a_layer_is_that_of_its_shard():
    experts = pack_weights(make_shards(1, "fp8")[0]).layers[0].experts
    assert isinstance(experts, Fp8ExpertWeights)
    assert (experts.num_local, experts.first_expert, experts.intermediate) == (EXPERTS, 0, INNER)
