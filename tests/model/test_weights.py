"""A rank's shard: every layout's shards join to the whole model bit for bit, in every weight format."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from kernels.reference import mxfp4_dequant_ref
from model.convert import convert_checkpoint
from model.fixture import fixture_config
from model.layout import cut_for_rank
from model.shards import Fp8Matrix, LayerShard, Mxfp4Matrix, ShardWeights
from model.weights import WeightFormat, load_shard
from tests.support.tiny_checkpoint import Tiny, write_chosen, write_tiny
from tests.support.tolerance import assert_same_bytes


@dataclass(frozen=True)
class Case:
    tp: int
    ep: int
    weights: WeightFormat = "mxfp4"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"tp{self.tp}-ep{self.ep}-{self.weights}-{str(self.dtype).removeprefix('torch.')}"


CASES = [Case(tp, ep, weights) for tp, ep in ((1, 1), (2, 2), (2, 1), (4, 4), (4, 1), (8, 8), (8, 1)) for weights in ("mxfp4", "fp8")]
CASES += [Case(2, 1, "bf16"), Case(4, 4, "mxfp4", torch.bfloat16), Case(4, 1, "fp8", torch.bfloat16)]


def load_all(tiny: Tiny, case: Case) -> list[ShardWeights]:
    return [
        load_shard(tiny.path, tiny.config, tp=case.tp, ep=case.ep, rank=rank, device="cpu", dtype=case.dtype, weights=case.weights)
        for rank in range(case.tp)
    ]


def whole(tiny: Tiny, layer: int, name: str) -> Tensor:
    """An expert matrix of the whole model, [E, R, C] fp32."""
    prefix = f"model.layers.{layer}.mlp.experts.{name}_proj"
    return mxfp4_dequant_ref(tiny.tensors[prefix + "_blocks"], tiny.tensors[prefix + "_scales"])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("which", ["tiny", "tiny_8kv"])
def test_experts_of_all_ranks_join_to_the_whole(request, which: str, case: Case):
    tiny = request.getfixturevalue(which)
    shards = load_all(tiny, case)
    along = (0, 0, 0, 0) if case.ep == case.tp else (1, 2, 1, None)
    for layer in (0, tiny.config.num_layers - 1):
        parts = [shard.layers[layer].experts for shard in shards]
        prefix = f"model.layers.{layer}.mlp.experts."
        expected = [
            whole(tiny, layer, "gate_up").to(case.dtype),
            whole(tiny, layer, "down").to(case.dtype),
            tiny.tensors[prefix + "gate_up_proj_bias"].float(),
        ]
        got = [[part.gate_up for part in parts], [part.down for part in parts], [part.gate_up_bias for part in parts]]
        for pieces, tensor, axis in zip(got, expected, along[:3], strict=True):
            assert_same_bytes(torch.cat(pieces, axis), tensor, case)
        down_bias = torch.cat([p.down_bias for p in parts]) if along[3] == 0 else torch.stack([p.down_bias for p in parts]).sum(0)
        assert_same_bytes(down_bias, tiny.tensors[prefix + "down_proj_bias"].float(), case)
        assert [part.first_expert for part in parts] == [cut.experts.start for cut in cuts(tiny, case)]


def cuts(tiny: Tiny, case: Case):
    return [cut_for_rank(tiny.config, tp=case.tp, ep=case.ep, rank=rank, granule=32) for rank in range(case.tp)]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("which", ["tiny", "tiny_8kv"])
def test_attention_shards_hold_their_heads(request, which: str, tp: int):
    tiny, case = request.getfixturevalue(which), Case(tp, tp)
    dim, prefix = tiny.config.head_dim, "model.layers.1.self_attn."
    for shard, cut in zip(load_all(tiny, case), cuts(tiny, case), strict=True):
        layer: LayerShard = shard.layers[1]
        kv_rows = slice(cut.kv_heads.start * dim, cut.kv_heads.stop * dim)
        rows = {"q": slice(cut.qo_heads.start * dim, cut.qo_heads.stop * dim), "k": kv_rows, "v": kv_rows}
        for kind, got in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            expected = torch.cat([tiny.tensors[f"{prefix}{part}_proj.{kind}"][rows[part]] for part in "qkv"])
            assert_same_bytes(got, expected.float(), f"{case} {kind}")
        assert_same_bytes(layer.o, tiny.tensors[prefix + "o_proj.weight"][:, rows["q"]].float(), case)
        assert_same_bytes(layer.o_bias, tiny.tensors[prefix + "o_proj.bias"].float(), case)
        assert_same_bytes(layer.sinks, tiny.tensors[prefix + "sinks"][cut.qo_heads.start : cut.qo_heads.stop].float(), case)


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_vocabulary_and_replicated_tensors(tiny, tp: int):
    shards = load_all(tiny, Case(tp, tp))
    t = tiny.tensors
    assert_same_bytes(torch.cat([shard.lm_head for shard in shards]), t["lm_head.weight"].float())
    assert [shard.vocab_start for shard in shards] == [rank * 1024 // tp for rank in range(tp)]
    for shard in shards:
        assert_same_bytes(shard.embed, t["model.embed_tokens.weight"].float())
        assert_same_bytes(shard.norm, t["model.norm.weight"].float())
        for i, layer in enumerate(shard.layers):
            assert_same_bytes(layer.attn_norm, t[f"model.layers.{i}.input_layernorm.weight"].float())
            assert_same_bytes(layer.mlp_norm, t[f"model.layers.{i}.post_attention_layernorm.weight"].float())
            assert_same_bytes(layer.router, t[f"model.layers.{i}.mlp.router.weight"].float())
            assert_same_bytes(layer.router_bias, t[f"model.layers.{i}.mlp.router.bias"].float())


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2), (4, 1), (8, 1)])
def test_packed_shards_have_the_shapes_of_the_decoded_ones(tiny, tp: int, ep: int):
    """What a GPU keeps; the meta device stands in for one, so this looks at shapes."""
    shards = load_all(tiny, Case(tp, ep))
    for rank in sorted({0, tp - 1}):
        decoded = shards[rank].layers[0].experts
        for weights in ("mxfp4", "fp8"):
            packed = load_shard(
                tiny.path, tiny.config, tp=tp, ep=ep, rank=rank, device="meta", dtype=torch.bfloat16, weights=weights, packed=True
            )  # fmt: skip
            for matrix, dense in ((packed.layers[0].experts.gate_up, decoded.gate_up), (packed.layers[0].experts.down, decoded.down)):
                if isinstance(matrix, Mxfp4Matrix):
                    assert matrix.blocks.shape[:-2] == matrix.scales.shape[:-1] == dense.shape[:-1]
                    assert matrix.scales.shape[-1] * 32 == dense.shape[-1]
                else:
                    assert isinstance(matrix, Fp8Matrix)
                    assert all(size % 128 == 0 for size in matrix.values.shape[1:])
                    assert tuple(size // 128 for size in matrix.values.shape[1:]) == tuple(matrix.scales.shape[1:])
                    assert matrix.rows <= matrix.values.shape[1] < matrix.rows + 128


@pytest.mark.parametrize(
    ("byte", "scale", "expected"),
    [
        (0xE3, 127, (1.5, -4.0)),
        (0xE3, 128, (3.0, -8.0)),
        (0x21, 127, (0.5, 1.0)),
        (0x80, 130, (0.0, 0.0)),
        (0x7F, 120, (-6 / 128, 6 / 128)),
    ],
)
def test_low_nibble_is_the_even_element(tmp_path, byte: int, scale: int, expected: tuple[float, float]):
    """Planted in one expert's last group of one row; everything else is zero."""
    config = fixture_config(vocab_size=32, num_layers=1, hidden_size=64, intermediate_size=96, head_dim=8)
    blocks, scales = torch.zeros(8, 64, 3, 16, dtype=torch.uint8), torch.full((8, 64, 3), 127, dtype=torch.uint8)
    blocks[5, 63, 2, 15], scales[5, 63, 2] = byte, scale
    tiny = write_chosen(tmp_path, config, {"down_proj_blocks": blocks, "down_proj_scales": scales})
    down = load_all(tiny, Case(1, 1))[0].layers[0].experts.down
    assert tuple(down[5, 63, 94:96].tolist()) == expected
    down[5, 63, 94:96] = 0
    assert not down.any()


def test_progress_counts_layers_and_ends_at_the_total(tiny):
    calls: list[tuple[int, int]] = []
    load_shard(
        tiny.path,
        tiny.config,
        tp=1,
        ep=1,
        rank=0,
        device="cpu",
        dtype=torch.float32,
        weights="mxfp4",
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(i, 5) for i in range(1, 6)]


def test_fp8_without_a_conversion_says_what_to_run(tmp_path):
    tiny = write_tiny(tmp_path, num_layers=1, vocab_size=64)
    with pytest.raises(ConfigError, match=f"not there; run `tandem convert {tmp_path}`"):
        load_all(tiny, Case(1, 1, "fp8"))


def test_a_layout_that_does_not_fit_is_refused(tiny):
    with pytest.raises(ConfigError, match="ep is 2"):
        load_shard(tiny.path, tiny.config, tp=4, ep=2, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")


def test_a_shard_does_not_share_memory_with_the_file(tiny):
    shard = load_all(tiny, Case(1, 1, dtype=torch.bfloat16))[0]
    shard.embed.fill_(7)
    assert_same_bytes(load_all(tiny, Case(1, 1, dtype=torch.bfloat16))[0].embed, tiny.tensors["model.embed_tokens.weight"])


_MEASURE = """
import sys, torch
from pathlib import Path
from model.config import load_model_config
from model.weights import load_shard
torch.set_num_threads(1)

def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

path, weights = Path(sys.argv[1]), sys.argv[2]
config = load_model_config(path)
before = kilobytes("VmRSS")
shard = load_shard(path, config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.bfloat16, weights=weights)
def size(x):
    if isinstance(x, torch.Tensor): return x.nbytes
    if isinstance(x, tuple): return sum(map(size, x))
    return sum(map(size, vars(x).values())) if hasattr(x, "__dict__") else 0
print(kilobytes("VmHWM") - before, size(shard) // 1024, size(shard.layers[0]) // 1024)
"""


@pytest.mark.parametrize("weights", ["mxfp4", "fp8"])
def test_peak_host_memory_stays_below_two_layers_above_the_result(tmp_path, weights: str):
    """The kernel's high-water mark of a fresh process, pages of the files included. With 12 layers, keeping those pages would show.

    The allocator is told to give memory back at once, as it does for tensors of real size.
    """
    config = fixture_config(num_layers=12, num_experts=12, hidden_size=384, intermediate_size=352, vocab_size=64)
    write_chosen(tmp_path, config, {"_scales": torch.tensor(127)})
    if weights == "fp8":
        convert_checkpoint(tmp_path)
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _MEASURE, str(tmp_path), weights], env=env, capture_output=True, text=True, check=True)
    above, result, layer = map(int, done.stdout.split())
    assert above < result + 2 * layer, f"peak {above} kB, result {result} kB, layer {layer} kB"
